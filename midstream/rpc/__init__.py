"""Shared gRPC code of all services: serving, errors, health, discovery, and shared streams."""
