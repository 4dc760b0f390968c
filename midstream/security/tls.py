"""TLS for all gRPC connections and the router's HTTP port: the only module that reads certificates and creates
credentials from them. A process has one identity: it presents the same certificate as a server and as a client. The
files are checked at each handshake, so new ones are used without a restart. If the new certificate and key do not
match, as can happen while they are being replaced, they are ignored and the old ones stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from midstream.config.service import GrpcServiceConfig
from midstream.errors import ConfigError
from midstream.security.file_signature import Signature, signature_of

logger = logging.getLogger(__name__)


class _ServerContext(ssl.SSLContext):
    """A context for a listener: each handshake uses the newest files.

    OpenSSL can add certificate authorities to a context, but not remove them, so changed files need a new context.

    Attributes:
        make: Returns a context with the current files. Raises ConfigError if they are invalid.
        newest: The context of the next handshake.
    """

    make: Callable[[], ssl.SSLContext]
    newest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.newest.wrap_bio(*args, **kwargs)


class Tls:
    """The certificate, key and certificate authorities of this process.

    Attributes:
        require_client_cert: Whether the server accepts only clients with a certificate signed by the CAs.
    """

    def __init__(self, cert: str = "", key: str = "", ca: str = "", *, require_client_cert: bool = False) -> None:
        """Read the files.

        Args:
            cert: PEM file with this process's certificate chain; if empty, no certificate is presented.
            key: PEM file with the certificate's private key, without a password.
            ca: PEM file with the CAs for peers' certificates; empty means the system's CAs.

        Raises:
            ConfigError: A file is missing, empty or damaged, or key and certificate do not match.
        """
        if bool(cert) != bool(key):
            raise ConfigError("set both certificate and key", field="tls_key" if cert else "tls_cert")
        if require_client_cert and not ca:
            raise ConfigError("require_client_cert requires a CA file", field="tls_ca")
        self.require_client_cert = require_client_cert
        self._paths = {name: Path(path) for name, path in (("cert", cert), ("key", key), ("ca", ca)) if path}
        self._lock = threading.Lock()
        self._contexts: list[_ServerContext] = []
        self._version = 1
        self._signature = self._sign()
        self._contents = self._read()

    @classmethod
    def from_config(cls, config: GrpcServiceConfig) -> Tls | None:
        """Return the configured TLS files; None for plain text. Raises ConfigError if they cannot be used."""
        if not config.tls:
            for name in ("tls_cert", "tls_key", "tls_ca"):
                if getattr(config, name):
                    raise ConfigError("is given, but tls is off", field=name)
            return None
        if not config.tls_cert:
            raise ConfigError("is empty, but tls is on", field="tls_cert")
        return cls(config.tls_cert, config.tls_key, config.tls_ca, require_client_cert=config.tls_require_client_cert)

    def refresh(self) -> int:
        """Reread changed files; return a number that changes with their contents. Thread-safe."""
        with self._lock:
            try:
                signature = self._sign()
                if signature != self._signature:
                    self._signature = signature
                    contents = self._read()
                    made = [context.make() for context in self._contexts]
                    if self._sign() == signature:
                        self._contents = contents
                        self._version += 1
                        for context, newest in zip(self._contexts, made, strict=True):
                            context.newest = newest
                        logger.info("loaded new certificates")
            except ConfigError as error:
                logger.warning("the new certificates are invalid; keeping the old ones: %s", error)
            return self._version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a gRPC channel, from the current files."""
        contents = self._contents
        return grpc.ssl_channel_credentials(contents.get("ca"), contents.get("key"), contents.get("cert"))

    def http_context(self) -> ssl.SSLContext:
        """Return an SSL context for an HTTP server; `refresh` keeps it up to date. Client certificates are verified."""
        return self._server_context(ssl.CERT_OPTIONAL if "ca" in self._paths else ssl.CERT_NONE)

    def grpc_context(self) -> ssl.SSLContext:
        """Return an SSL context for a gRPC server; it asks clients for a certificate only if they must have one."""
        return self._server_context(ssl.CERT_NONE, "h2")

    def client_context(self) -> ssl.SSLContext:
        """Return an SSL context for a non-gRPC client connection, from the current files."""
        self.refresh()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if "ca" not in self._paths:
            context.load_default_certs()
        self._load(context)
        return context

    def _server_context(self, verify_mode: ssl.VerifyMode, *protocols: str) -> ssl.SSLContext:
        """Return an SSL context for a server; `verify_mode` applies unless clients must have a certificate."""

        def make() -> ssl.SSLContext:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            self._load(context)
            context.verify_mode = ssl.CERT_REQUIRED if self.require_client_cert else verify_mode
            if protocols:
                context.set_alpn_protocols(protocols)
            return context

        context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        context.make, context.newest = make, make()
        self._contexts.append(context)
        return context

    def _sign(self) -> tuple[Signature, ...]:
        try:
            stats = [path.stat() for path in self._paths.values()]
        except OSError as error:
            raise ConfigError(f"cannot be read: {error}", field=self._field(str(error.filename))) from None
        return tuple(map(signature_of, stats))

    def _read(self) -> dict[str, bytes]:
        contents = {}
        for name, path in self._paths.items():
            try:
                contents[name] = path.read_bytes()
            except OSError as error:
                self._signature = ()  # try again, since the failure may be due only to too many open files
                raise ConfigError(f"cannot be read: {error}", field=f"tls_{name}") from None
            if not contents[name].strip():
                raise ConfigError(f"{path} is empty", field=f"tls_{name}")
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return contents

    def _load(self, context: ssl.SSLContext) -> None:
        """Load the files into a context; this validates them and checks that certificate and key match."""
        try:
            if "ca" in self._paths:
                context.load_verify_locations(self._paths["ca"])
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{self._paths['ca']} contains no certificates: {error}", field="tls_ca") from None
        try:
            if "cert" in self._paths:
                # Without this, a key with a password would make OpenSSL ask for the password on the terminal.
                context.load_cert_chain(self._paths["cert"], self._paths["key"], password=lambda: b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = f"{self._paths['cert']} and {self._paths['key']} are not a certificate and its key: {error}"
            raise ConfigError(reason, field="tls_cert") from None

    def _field(self, filename: str) -> str:
        return next((f"tls_{name}" for name, path in self._paths.items() if str(path) == filename), "tls_cert")
