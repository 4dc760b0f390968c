"""gRPC as every service uses it: serving, errors, health, discovery, shared streams."""
