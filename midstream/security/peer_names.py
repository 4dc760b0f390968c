"""Authorization of peers on internal ports by the names in their certificates.

The same authority may sign certificates of services and of clients, so a valid certificate is not enough. A service's
certificate carries its kind as the URI `spiffe://DOMAIN/.../KIND` or as the DNS name `KIND`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc.aio

from midstream.config.service import GrpcServiceConfig
from midstream.errors import ConfigError, PermissionDeniedError
from midstream.rpc.errors import Admit


class PeerNames:
    """Names; a peer's certificate must contain at least one of them."""

    def __init__(self, names: str, field: str) -> None:
        """Parse a comma-separated list of kinds (`router`), DNS names and URIs. Raises ConfigError if it is empty."""
        self.names = frozenset(name.strip() for name in names.split(",") if name.strip())
        if not self.names:
            raise ConfigError("is empty, so every call would be rejected", field=field)

    def include(self, dns_names: Iterable[str], uris: Iterable[str]) -> bool:
        """Return whether one of a certificate's names is listed."""
        return any(name in self.names for name in dns_names) or any(
            uri in self.names or (uri.startswith("spiffe://") and urlsplit(uri).path.rpartition("/")[2] in self.names)
            for uri in uris
        )


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """The names in a verified certificate; all fields are empty if there is no certificate."""

    common_names: tuple[str, ...] = ()
    dns_names: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()

    @classmethod
    def of_call(cls, context: grpc.aio.ServicerContext[Any, Any]) -> PeerCertificate:
        """Return the certificate names of a gRPC call's peer."""
        properties: Mapping[str, Iterable[bytes]] = context.auth_context()
        keys = ("x509_common_name", "peer_dns", "peer_uri")
        return cls(*(tuple(value.decode(errors="replace") for value in properties.get(key, ())) for key in keys))

    @classmethod
    def of_connection(cls, peercert: Mapping[str, Any]) -> PeerCertificate:
        """Return the names in the certificate of a TLS connection's peer, given in the `ssl` module's format."""
        subject = tuple(value for part in peercert.get("subject", ()) for key, value in part if key == "commonName")
        others: tuple[tuple[str, str], ...] = peercert.get("subjectAltName", ())
        dns_names, uris = (tuple(value for key, value in others if key == kind) for kind in ("DNS", "URI"))
        return cls(subject, dns_names, uris)

    @property
    def is_of_a_part(self) -> bool:
        """Whether the certificate names a kind of service, and therefore does not belong to a client."""
        return _PARTS.include(self.dns_names, self.uris)


_PARTS = PeerNames("router, scheduler, detokenizer, worker", "")


def admit_peers(config: GrpcServiceConfig, peers_of: Callable[[str], PeerNames]) -> Admit | None:
    """Return a function that checks callers' certificates; None if callers do not present certificates.

    Args:
        peers_of: Returns the names of the peers that may call a method, given its full name.
    """
    if not (config.tls and config.tls_require_client_cert):
        return None

    def admit(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        certificate, allowed = PeerCertificate.of_call(context), peers_of(method)
        if not allowed.include(certificate.dns_names, certificate.uris):
            shown = ", ".join([*certificate.uris, *certificate.dns_names]) or "no name"
            raise PermissionDeniedError(
                f"{method} may be called only by {' or '.join(sorted(allowed.names))}; the certificate has "
                f"{shown[:200]}"
            )

    return admit
