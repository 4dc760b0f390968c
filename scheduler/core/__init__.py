"""The pure core: it takes events and returns effects. It uses no sockets, clock, randomness or threads."""
