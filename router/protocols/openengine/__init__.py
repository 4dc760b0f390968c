"""The openengine.v1 API, for gateways that control engines over gRPC."""
