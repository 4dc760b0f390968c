"""Authorization of peers on internal ports by the names in their certificates.

The same authority may sign certificates of parts and of clients, so a valid certificate is not enough: a part's carries
its kind as the URI `spiffe://DOMAIN/.../KIND` or as the DNS name `KIND`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import grpc.aio

from midstream.config.service import GrpcServiceConfig
from midstream.errors import ConfigError, PermissionDeniedError
from midstream.rpc.errors import Admit


class PeerNames:
    """Names that a peer's certificate may carry."""

    def __init__(self, names: str, field: str) -> None:
        """Parse a comma-separated list of kinds (`router`), DNS names and URIs.

        Raises:
            ConfigError: It is empty.
        """
        self.names = frozenset(name.strip() for name in names.split(",") if name.strip())
        if not self.names:
            raise ConfigError("is empty, so every call would be rejected", field=field)

    def include(self, dns_names: Iterable[str], uris: Iterable[str]) -> bool:
        """Return whether one of a certificate's names is listed."""
        return any(name in self.names for name in dns_names) or any(
            uri in self.names or (uri.startswith("spiffe://") and urlsplit(uri).path.rpartition("/")[2] in self.names)
            for uri in uris
        )


def admit_peers(config: GrpcServiceConfig, peers_of: Callable[[str], PeerNames]) -> Admit | None:
    """Return a check of callers' certificates; None if callers present none.

    Args:
        config: Configuration of this process.
        peers_of: Returns who may call a method, by its full name.
    """
    if not (config.tls and config.tls_require_client_cert):
        return None

    def admit(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        properties: Mapping[str, Iterable[bytes]] = context.auth_context()
        dns_names, uris = (
            [value.decode(errors="replace") for value in properties.get(key, ())] for key in ("peer_dns", "peer_uri")
        )
        allowed = peers_of(method)
        if not allowed.include(dns_names, uris):
            shown = ", ".join([*uris, *dns_names]) or "no name"
            raise PermissionDeniedError(
                f"{method} is for {' or '.join(sorted(allowed.names))}; the certificate has {shown[:200]}"
            )

    return admit
