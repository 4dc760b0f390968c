"""Runs one model on several ranks: sharding of weights, and communication between ranks."""
