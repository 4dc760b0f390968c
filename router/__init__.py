"""Routers take requests from clients, check them, hand them to a scheduler and stream their output back."""
