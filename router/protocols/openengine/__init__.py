"""openengine.v1, for gateways that drive engines over gRPC."""
