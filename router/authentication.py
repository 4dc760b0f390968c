"""Who calls: by bearer token, by client certificate, or nobody in particular.

Both front doors ask here before anything else: gRPC through `admit`, HTTP through `AuthenticatedApp`. Who an
authenticated caller is becomes its requests' client id, whatever they say, and a part of their request ids inside, so
that nobody can resume, abort or probe what is another's. Health, metrics and the dashboard's page are open to all.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.config import RouterConfig
from midstream.errors import ConfigError, MidstreamError, UnauthenticatedError

logger = logging.getLogger(__name__)

_OPEN_METHODS = "/grpc.health.v1.Health/"
# The dashboard's page says nothing of the service; what it shows comes from /dashboard/feed, which is not open.
_OPEN_PATHS = frozenset({"/health", "/metrics", "/dashboard"})
_OPEN_PREFIX = "/dashboard/static/"
_MIN_TOKEN_CHARACTERS = 16
_LOOK_INTERVAL_S = 1.0
_MAX_CLIENT_ID = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        name: The client id of an authenticated caller, else the address that the call comes from.
        is_authenticated: Whether a token or a certificate says so.
    """

    name: str = ""
    is_authenticated: bool = False

    def scope(self, request_id: str) -> str:
        """A request's id inside the system: an authenticated caller's cannot be another's."""
        if not self.is_authenticated:
            return request_id
        return f"{request_id}@{hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()}"


_NOBODY = Caller()
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=_NOBODY)


class TokenFile:
    """Bearer tokens and the client ids they stand for, from a file that is read again when it changes.

    A line is `TOKEN CLIENT_ID`; empty lines and those that begin with # say nothing.
    """

    def __init__(self, path: str) -> None:
        """Reads the file.

        Raises:
            ConfigError: It is missing, holds no token, or one that is too short or there twice.
        """
        self._path = Path(path)
        self._signature = self._sign()
        self._clients = self._read()
        self._looked_at = time.monotonic()

    def client_of(self, token: str) -> str | None:
        """The client id of a token; takes the same time whatever token it is."""
        self._refresh()
        digest, found = _digest(token), None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                found = client
        return found

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_INTERVAL_S:
            return
        self._looked_at = now
        try:
            signature = self._sign()
            if signature != self._signature:
                self._signature = signature
                self._clients = self._read()
                logger.info("took %d tokens", len(self._clients))
        except ConfigError as error:
            logger.warning("the tokens on disk are not usable, so the old ones stay: %s", error)

    def _sign(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error}", field="auth_tokens") from None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> list[tuple[bytes, str]]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", field="auth_tokens") from None
        clients: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            # The line itself may hold a secret, so it is not shown.
            if len(words) != 2 or len(words[1]) > _MAX_CLIENT_ID:
                raise ConfigError(f"{self._path}, line {number} is not TOKEN CLIENT_ID", field="auth_tokens")
            if len(words[0]) < _MIN_TOKEN_CHARACTERS:
                reason = f"{self._path}, line {number}: a token has at least {_MIN_TOKEN_CHARACTERS} characters"
                raise ConfigError(reason, field="auth_tokens")
            if clients.setdefault(_digest(words[0]), words[1]) != words[1]:
                raise ConfigError(f"{self._path}, line {number}: the token is another client's", field="auth_tokens")
        if not clients:
            raise ConfigError(f"{self._path} holds no token", field="auth_tokens")
        return list(clients.items())


class Authenticator:
    """Finds out who calls."""

    def __init__(self, *, tokens: TokenFile | None = None, by_certificate: bool = False) -> None:
        """Takes tokens, or the names in clients' certificates; without either everyone is taken."""
        self._tokens = tokens
        self._by_certificate = by_certificate

    @classmethod
    def from_config(cls, config: RouterConfig) -> Authenticator:
        """What the configuration asks for.

        Raises:
            ConfigError: It contradicts itself, or the tokens are not usable.
        """
        if config.auth == "token":
            if not config.auth_tokens:
                raise ConfigError("is empty, and auth is token", field="auth_tokens")
            return cls(tokens=TokenFile(config.auth_tokens))
        if config.auth_tokens:
            raise ConfigError(f"is given, and auth is {config.auth}", field="auth_tokens")
        if config.auth == "mtls" and not (config.tls and config.tls_require_client_cert):
            raise ConfigError("mtls needs tls and tls_require_client_cert", field="auth")
        return cls(by_certificate=config.auth == "mtls")

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Sets `current_caller` for a gRPC call.

        Raises:
            UnauthenticatedError: Nobody knows the caller.
        """
        if method.startswith(_OPEN_METHODS):
            return
        authorization = ""
        if self._tokens is not None:
            for key, value in context.invocation_metadata() or ():
                if key == "authorization":
                    authorization = str(value)
        names: list[str] = []
        if self._by_certificate:
            properties: Mapping[str, Iterable[bytes]] = context.auth_context()
            names = [name.decode() for name in properties.get("x509_common_name", ())]
        current_caller.set(self.identify(authorization, names, context.peer().rpartition(":")[0]))

    def identify(self, authorization: str, certificate_names: Iterable[str], address: str) -> Caller:
        """The caller.

        Args:
            authorization: The header or metadata of that name; empty where there is none.
            certificate_names: Common names of the certificate that was shown and checked.
            address: Where the call comes from.

        Raises:
            UnauthenticatedError: No credentials, or wrong ones.
        """
        if self._tokens is not None:
            scheme, _, token = authorization.partition(" ")
            if not authorization:
                raise UnauthenticatedError("authorization is missing; send `authorization: Bearer TOKEN`")
            if scheme.lower() != "bearer":
                raise UnauthenticatedError("authorization must be `Bearer TOKEN`")
            client = self._tokens.client_of(token.strip())
            if client is None:
                raise UnauthenticatedError("the token is not known here")
            return Caller(client, is_authenticated=True)
        if self._by_certificate:
            name = next(iter(certificate_names), "")
            if not 0 < len(name) <= _MAX_CLIENT_ID:
                raise UnauthenticatedError("a client certificate with a common name is needed")
            return Caller(name, is_authenticated=True)
        return Caller(address)


class AuthenticatedApp:
    """An ASGI application behind the authenticator."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        refuse: Callable[[MidstreamError, Scope, Receive, Send], Awaitable[None]],
    ) -> None:
        """`refuse` answers in place of `app`."""
        self._app = app
        self._authenticator = authenticator
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            values = [value for key, value in scope["headers"] if key == b"authorization"]
            authorization = values[-1].decode("latin-1") if values else ""
            client = scope.get("client")
            try:
                caller = self._authenticator.identify(
                    authorization, scope.get("certificate_names", ()), client[0] if client else ""
                )
            except UnauthenticatedError as error:
                await self._refuse(error, scope, receive, send)
                return
            current_caller.set(caller)
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
