"""Runs one model on several ranks: sharding of the weights, and communication between ranks."""
