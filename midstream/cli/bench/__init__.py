"""Load generation and measurement against a running service."""
