"""Settings that every service has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_PORT = 65_535


def setting(default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field that is also a flag; `help_text` says its unit and range."""
    metadata = {"help": help_text, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Base of the services' configurations."""

    name: str = setting("", "Name of this process in logs and listings; default: the service and its port.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    http_port: int = setting(0, "Port of /metrics and /health; 0 picks a free one.")
    log_level: str = setting("info", "Least level that is logged.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("json", "How log lines look.", choices=("json", "text"))
    otlp_endpoint: str = setting(
        "", "OTLP/gRPC collector that spans of requests go to, http://HOST:4317; empty: nothing is traced."
    )
    drain_timeout_s: float = setting(30.0, "Seconds that streams in progress get after SIGTERM.")


@dataclass(frozen=True, kw_only=True)
class GrpcServiceConfig(ServiceConfig):
    """Base of those with a gRPC port. One identity serves the port and the links to other services."""

    internal_transport: str = setting(
        "frames",
        "How tokens travel between scheduler, detokenizer and router: frames costs less, grpc passes through service "
        "meshes. Where the other side has only grpc, that is taken.",
        choices=("frames", "grpc"),
    )
    tls: bool = setting(False, "TLS on the gRPC port and on the links to other services.")
    tls_cert: str = setting("", "PEM file with this process's certificate chain; re-read when it changes, as all are.")
    tls_key: str = setting("", "PEM file with its private key.")
    tls_ca: str = setting("", "PEM file with the authorities of peers' certificates; empty: the system's.")
    tls_require_client_cert: bool = setting(True, "Take only clients with a certificate of the authorities.")
