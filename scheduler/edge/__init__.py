"""What joins the core to the world: gRPC, ZeroMQ, the token feed, metrics and logs."""
