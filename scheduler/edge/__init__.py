"""The I/O around the core: gRPC, ZeroMQ, the token feed, metrics and logs."""
