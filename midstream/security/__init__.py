"""TLS, CURVE keys, credentials of channels, and private folders."""
