"""Run one model on several ranks: dividing the weights, and communication between ranks."""
