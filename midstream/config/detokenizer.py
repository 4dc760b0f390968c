"""Settings of the detokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.config.service import GrpcServiceConfig, setting


@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig(GrpcServiceConfig):
    """Flags of `python -m detokenizer`."""

    model: str = setting(
        "smollm2", "Model folder, GGUF file, name on the Hugging Face Hub, or `smollm2` for the embedded model."
    )
    port: int = setting(50054, "gRPC port.")
    frames_port: int = setting(
        0, "TCP port for frames from other hosts, which use the gRPC port if they cannot reach it; 0: any free one."
    )
    schedulers: str = setting("127.0.0.1:50052", "Comma-separated scheduler targets, as for routers.")
    router_names: str = setting(
        "router", "Certificate names of peers that may call as routers, comma-separated: kinds, DNS names or URIs."
    )
    max_message_bytes: int = setting(64 << 20, "Maximum size of a gRPC message, in bytes.")
    max_pending_bytes: int = setting(8 << 20, "Maximum bytes buffered per request for a slow router.")
