"""The connection to the scheduler and its messages."""
