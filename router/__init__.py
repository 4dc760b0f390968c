"""Routers validate clients' requests, submit them to a scheduler and stream their output back."""
