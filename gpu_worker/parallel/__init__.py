"""Runs one model on several ranks: division of the weights, and communication between ranks."""
