"""openengine.v1 over the native path, so that gateways that drive engines over gRPC can drive this one."""
