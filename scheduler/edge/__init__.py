"""The core's I/O: gRPC, ZeroMQ, the token feed, metrics and logs."""
