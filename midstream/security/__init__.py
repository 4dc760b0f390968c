"""TLS, CURVE keys, peer names, channel credentials, and private folders."""
