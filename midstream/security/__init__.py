"""TLS, CURVE keys, credentials of channels, private folders."""
