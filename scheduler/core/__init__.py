"""The pure core: events in, effects out. It imports no socket, clock, randomness or thread."""
