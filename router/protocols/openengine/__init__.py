"""openengine.v1, for gateways that control engines over gRPC."""
