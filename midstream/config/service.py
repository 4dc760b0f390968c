"""Settings that all services have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_PORT = 65_535


def setting(default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """Declare a dataclass field that is also a flag; `help_text` states its unit and range."""
    metadata = {"help": help_text, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Base of the services' configurations."""

    name: str = setting("", "Name of this process in logs and listings; default: the service and its port.")
    host: str = setting("127.0.0.1", "Address to listen on.")
    http_port: int = setting(0, "Port for /metrics and /health; 0: any free one.")
    log_level: str = setting("info", "Minimum log level.", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("json", "Log format.", choices=("json", "text"))
    otlp_endpoint: str = setting(
        "", "OTLP/gRPC collector for traces and routers' metrics, http://HOST:4317; empty: none."
    )
    drain_timeout_s: float = setting(
        30.0, "Maximum number of seconds that open streams may take to finish after SIGTERM."
    )


@dataclass(frozen=True, kw_only=True)
class GrpcServiceConfig(ServiceConfig):
    """Base configuration of services with a gRPC port; the port and outgoing connections use the same certificate."""

    tls: bool = setting(False, "Use TLS on the gRPC port and for connections to other services.")
    tls_cert: str = setting(
        "", "PEM file with this process's certificate chain; re-read when it changes, like all of these files."
    )
    tls_key: str = setting("", "PEM file with the certificate's private key.")
    tls_ca: str = setting("", "PEM file with the CAs for peers' certificates; empty: the system's.")
    tls_require_client_cert: bool = setting(True, "Accept only clients with a certificate signed by the CAs.")
