"""Authentication of callers by bearer token or client certificate.

Every gRPC call passes `admit`, and every HTTP request `AuthenticatedApp`, before any other processing. An authenticated
caller's name becomes the client id of its requests, regardless of what they set, and part of their internal request
ids, so that only an admin can resume, abort or probe another caller's requests. Roles determine what a caller may do
(permissions.py). Health checks and pages, which contain no data, need no credentials.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midstream.config import RouterConfig
from midstream.errors import (
    ConfigError,
    InvalidArgumentError,
    MidstreamError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from midstream.security.file_signature import Signature, signature_of
from midstream.security.host_header import is_loopback
from midstream.security.peer_names import PeerCertificate
from router.permissions import ALL_ROLES, DEFAULT_ROLES, Role, name_roles, parse_roles, roles_for_method, roles_for_path

logger = logging.getLogger(__name__)

_OPEN_METHODS = "/grpc.health.v1.Health/"
# Pages contain no data; they fetch data with the user's token.
_OPEN_PATHS = frozenset({"/health", "/live", "/v2/health/live", "/v2/health/ready", "/dashboard", "/", "/docs"})
_OPEN_PREFIXES = ("/dashboard/static/", "/static/")
_MIN_TOKEN_CHARACTERS = 16
_LOOK_INTERVAL_S = 1.0
_MAX_CLIENT_ID = 128
# A request's internal id, as it appears in logs.
_INNER_ID = re.compile(r".*@[0-9a-f]{16}", re.DOTALL)

_EntryT = TypeVar("_EntryT")


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a client; 0 means no limit. They are enforced in router/pipeline/quotas.py.

    Attributes:
        priority: Maximum priority of its requests; None means no limit.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    Attributes:
        name: The client id of an authenticated caller, otherwise the address of its connection.
        is_authenticated: Whether a token or a certificate identifies the caller.
    """

    name: str = ""
    is_authenticated: bool = False
    roles: frozenset[Role] = ALL_ROLES
    quota: Quota = Quota()

    @property
    def owner(self) -> str:
        """Name under which the caller's documents are stored; empty if authentication is off."""
        return self.name if self.is_authenticated else ""

    def scope(self, request_id: str) -> str:
        """Return a request's internal id, which is unique to the caller if the caller is authenticated.

        An admin refers to other callers' requests by their internal ids, which the logs and the status show. Nobody
        else can refer to a request by its internal id.
        """
        is_internal = _INNER_ID.fullmatch(request_id) is not None
        if Role.ADMIN in self.roles if is_internal else not self.is_authenticated:
            return request_id
        return f"{request_id}@{self._digest()}"

    def owns(self, request_id: str) -> bool:
        """Return whether an internal id belongs to a request of this caller, which must be authenticated."""
        return request_id.endswith(f"@{self._digest()}")

    def salt(self, cache_salt: str) -> str:
        """Return the cache salt that separates an authenticated caller's prefixes from those of all other callers."""
        if self.is_authenticated or _INNER_ID.fullmatch(cache_salt):  # could equal the salt of an authenticated caller
            return f"{cache_salt}@{self._digest()}"
        return cache_salt

    def require(self, roles: frozenset[Role]) -> None:
        """Raise PermissionDeniedError unless the caller has one of `roles`."""
        if self.roles.isdisjoint(roles):
            who = self.name if self.is_authenticated else "a caller without credentials"
            raise PermissionDeniedError(f"{who} must have the role {name_roles(roles)}")

    def _digest(self) -> str:
        return hashlib.blake2b(self.owner.encode(), digest_size=8).hexdigest()


NO_CERTIFICATE = PeerCertificate()
# The caller outside of any call, which is not authenticated.
_NOBODY = Caller()
current_caller: ContextVar[Caller] = ContextVar("current_caller", default=_NOBODY)


_QUOTAS = tuple(item.name for item in fields(Quota))
_MAX_QUOTA, _MAX_PRIORITY = 10**11, 100


class _WatchedFile(ABC, Generic[_EntryT]):
    """The entries of a file that is reloaded when it changes; an invalid change is logged and ignored."""

    field: str

    def __init__(self, path: str) -> None:
        """Read the file. Raises ConfigError if the file is missing, or a line is invalid."""
        self._path = Path(path)
        self._signature = self._sign()
        self._entries = self._read()
        self._looked_at = time.monotonic()

    def entries(self) -> dict[bytes, _EntryT]:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            try:
                signature = self._sign()
                if signature != self._signature:
                    self._signature = signature
                    self._entries = self._read()
                    logger.info("loaded %d entries from %s", len(self._entries), self._path)
            except ConfigError as error:
                logger.warning("%s is invalid; keeping its previous contents: %s", self._path, error)
        return self._entries

    @abstractmethod
    def _parse(self, words: list[str]) -> tuple[bytes, _EntryT]:
        """Return the key and value on a line; raise InvalidArgumentError without the line, which may hold a secret."""

    def _sign(self) -> Signature:
        try:
            return signature_of(self._path.stat())
        except OSError as error:
            raise ConfigError(f"cannot be read: {error}", field=self.field) from None

    def _read(self) -> dict[bytes, _EntryT]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError):
                self._signature = ()  # try again, since the failure may be due only to too many open files
            raise ConfigError(f"cannot be read: {error}", field=self.field) from None
        entries: dict[bytes, _EntryT] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                key, entry = self._parse(words)
                if entries.setdefault(key, entry) != entry:
                    raise InvalidArgumentError("conflicts with an earlier line")
            except InvalidArgumentError as error:
                raise ConfigError(f"{self._path}, line {number}: {error.message}", field=self.field) from None
        if not entries:
            raise ConfigError(f"{self._path} has no entry", field=self.field)
        return entries


_Grant = tuple[frozenset[Role], Quota]


class TokenFile(_WatchedFile[tuple[str, _Grant]]):
    """Bearer tokens with their client ids, roles and quotas.

    A line is `TOKEN CLIENT_ID [ROLE,...] [NAME=NUMBER ...]`, where TOKEN may be `sha256:` followed by the hexadecimal
    digest of the token. The default roles are generate and observe. Empty lines and lines that begin with # are
    skipped.
    """

    field = "auth_tokens"

    def caller_of(self, token: str) -> Caller | None:
        """Return the caller with this token; tokens are compared in constant time."""
        digest, found = _digest(token), None
        for known, entry in self.entries().items():
            if hmac.compare_digest(known, digest):
                found = entry
        return None if found is None else Caller(found[0], True, *found[1])

    def client(self, name: str) -> Caller | None:
        """Return a client by name, with the roles and quota of its first token; None if it has no token."""
        grants = [grant for known, grant in self.entries().values() if known == name]
        return Caller(name, True, *grants[0]) if grants else None

    def _parse(self, words: list[str]) -> tuple[bytes, tuple[str, _Grant]]:
        if len(words) < 2 or len(words[1]) > _MAX_CLIENT_ID:
            raise InvalidArgumentError("expected TOKEN CLIENT_ID [ROLE,...] [NAME=NUMBER ...]")
        return _token_digest(words[0]), (words[1], _grant(words[2:]))


class RoleFile(_WatchedFile[_Grant]):
    """Roles and quotas of clients authenticated by certificate. A line is `CLIENT_ID [ROLE,...] [NAME=NUMBER ...]`."""

    field = "auth_roles"

    def grant_of(self, client: str) -> _Grant:
        """Return a client's roles and quota; generate and observe, without a quota, if the file does not list it."""
        return self.entries().get(client.encode(), (DEFAULT_ROLES, Quota()))

    def _parse(self, words: list[str]) -> tuple[bytes, _Grant]:
        if len(words) < 2:
            raise InvalidArgumentError("expected CLIENT_ID [ROLE,...] [NAME=NUMBER ...]")
        return words[0].encode(), _grant(words[1:])


def _token_digest(word: str) -> bytes:
    kind, colon, digest = word.partition(":")
    if colon and kind == "sha256":
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise InvalidArgumentError("sha256: must be followed by 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if len(word) < _MIN_TOKEN_CHARACTERS:
        raise InvalidArgumentError(f"a token must have at least {_MIN_TOKEN_CHARACTERS} characters")
    return _digest(word)


def _grant(words: list[str]) -> _Grant:
    """Parse the roles and quota that follow the client id on a line."""
    roles = DEFAULT_ROLES
    if words and "=" not in words[0]:
        roles, words = parse_roles(words[0], ""), words[1:]
    values: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        low = -_MAX_PRIORITY if name == "priority" else 1
        high = _MAX_PRIORITY if name == "priority" else _MAX_QUOTA
        if name not in _QUOTAS or name in values:
            raise InvalidArgumentError(f"quotas must be among {', '.join(_QUOTAS)}, each at most once")
        if not re.fullmatch(r"-?[0-9]{1,12}", value) or not low <= int(value) <= high:
            raise InvalidArgumentError(f"{name} must be in {low}..{high}")
        values[name] = int(value)
    return roles, Quota(**values)


class Authenticator:
    """Authenticates callers."""

    def __init__(
        self,
        *,
        tokens: TokenFile | None = None,
        by_certificate: bool = False,
        roles: RoleFile | None = None,
        anonymous_roles: frozenset[Role] | None = None,
    ) -> None:
        """Authenticate callers by token or by certificate name; if neither is configured, all callers are accepted.

        Args:
            by_certificate: Whether to authenticate by client certificate.
            anonymous_roles: Roles of callers without credentials; by default all roles if authentication is off,
                otherwise none.
        """
        self._tokens = tokens
        self._by_certificate = by_certificate
        self._roles = roles
        is_open = tokens is None and not by_certificate
        self._anonymous_roles = (ALL_ROLES if is_open else frozenset()) if anonymous_roles is None else anonymous_roles

    @classmethod
    def from_config(cls, config: RouterConfig) -> Authenticator:
        """Return the configured authenticator. Raises ConfigError if settings conflict, or a file is not usable."""
        if config.auth_tokens and config.auth != "token":
            raise ConfigError(f"is set, but auth is {config.auth}", field="auth_tokens")
        if config.auth_roles and config.auth != "mtls":
            raise ConfigError(f"is set, but auth is {config.auth}", field="auth_roles")
        if config.auth == "token" and not config.auth_tokens:
            raise ConfigError("must be set when auth is token", field="auth_tokens")
        if config.auth == "mtls" and not (config.tls and config.tls_require_client_cert):
            raise ConfigError("mtls requires tls and tls_require_client_cert", field="auth")
        return cls(
            tokens=TokenFile(config.auth_tokens) if config.auth == "token" else None,
            by_certificate=config.auth == "mtls",
            roles=RoleFile(config.auth_roles) if config.auth_roles else None,
            anonymous_roles=_anonymous_roles(config),
        )

    def admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Set `current_caller` for a gRPC call. Raises UnauthenticatedError if the caller is unknown, or
        PermissionDeniedError if the caller lacks the roles that the method requires.
        """
        address = context.peer().rpartition(":")[0]
        if method.startswith(_OPEN_METHODS):
            current_caller.set(Caller(address, roles=frozenset()))
            return
        authorization = ""
        if self._tokens is not None:
            for key, value in context.invocation_metadata() or ():
                if key == "authorization":
                    authorization = str(value)
        certificate = PeerCertificate.of_call(context) if self._by_certificate else NO_CERTIFICATE
        current_caller.set(self.identify(authorization, certificate, address, roles_for_method(method)))

    def identify(
        self, authorization: str, certificate: PeerCertificate, address: str, roles: frozenset[Role]
    ) -> Caller:
        """Return the caller.

        Args:
            authorization: Value of the header or metadata entry of that name; empty if there is none.
            roles: The caller must have at least one of these roles.

        Raises:
            UnauthenticatedError: Credentials are missing or wrong.
            PermissionDeniedError: The caller has none of the roles.
        """
        caller = self._known(authorization, certificate, address, roles)
        caller.require(roles)
        return caller

    def owner(self, name: str) -> Caller | None:
        """Return the client that owns a stored document, such as a batch; None if the client is no longer known."""
        if not name:
            return Caller()
        if self._tokens is not None:
            return self._tokens.client(name)
        roles, quota = self._roles.grant_of(name) if self._roles is not None else (DEFAULT_ROLES, Quota())
        return Caller(name, True, roles, quota)

    def _known(self, authorization: str, certificate: PeerCertificate, address: str, roles: frozenset[Role]) -> Caller:
        is_anonymous_enough = not self._anonymous_roles.isdisjoint(roles)
        if self._tokens is not None and (authorization or not is_anonymous_enough):
            scheme, _, token = authorization.partition(" ")
            if not authorization:
                raise UnauthenticatedError(
                    "authorization is missing; send `authorization: Bearer KEY`. Midstream's clients and commands send "
                    "the key in MIDSTREAM_API_KEY, and commands also that in a file, --token-file FILE"
                )
            if scheme.lower() != "bearer":
                raise UnauthenticatedError("authorization must be `Bearer KEY`")
            caller = self._tokens.caller_of(token.strip())
            if caller is None:
                raise UnauthenticatedError("unknown API key or token; check it, or ask the operator for one")
            return caller
        name = next(iter(certificate.common_names), "") if self._by_certificate else ""
        if self._by_certificate and (name or not is_anonymous_enough):
            if certificate.is_of_a_part:
                raise UnauthenticatedError(
                    "the certificate belongs to a service; a client must use its own certificate"
                )
            if not 0 < len(name) <= _MAX_CLIENT_ID:
                raise UnauthenticatedError("a client certificate with a common name is required")
            roles, quota = self._roles.grant_of(name) if self._roles is not None else (DEFAULT_ROLES, Quota())
            return Caller(name, True, roles, quota)
        return Caller(address, roles=self._anonymous_roles)


class AuthenticatedApp:
    """ASGI middleware that authenticates requests."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        refuse: Callable[[MidstreamError, Scope, Receive, Send], Awaitable[None]],
        quota_headers: Callable[[Caller], dict[str, str]] = lambda _: {},
    ) -> None:
        """Wrap an application.

        Args:
            refuse: Sends the error response to a rejected request.
            quota_headers: Returns the headers with the remaining quota of a caller.
        """
        self._app = app
        self._quota_headers = quota_headers
        self._authenticator = authenticator
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the request and pass it to the application."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            values = [value for key, value in scope["headers"] if key == b"authorization"]
            authorization = values[-1].decode("latin-1") if values else ""
            if not values:
                # Anthropic's clients send the API key in this header.
                keys = [value for key, value in scope["headers"] if key == b"x-api-key"]
                authorization = f"Bearer {keys[-1].decode('latin-1')}" if keys else ""
            client = scope.get("client")
            try:
                caller = self._authenticator.identify(
                    authorization,
                    scope.get("certificate", NO_CERTIFICATE),
                    client[0] if client else "",
                    roles_for_path(scope["path"]),
                )
            except (UnauthenticatedError, PermissionDeniedError) as error:
                await self._refuse(error, scope, receive, send)
                return
            current_caller.set(caller)
            if caller.quota != Quota():
                send = self._with_quota(caller, send)
        await self._app(scope, receive, send)

    def _with_quota(self, caller: Caller, send: Send) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in self._quota_headers(caller).items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return send_with_headers


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES)


def _anonymous_roles(config: RouterConfig) -> frozenset[Role] | None:
    if not config.anonymous_roles:
        return None if config.auth != "none" or is_loopback(config.host) else DEFAULT_ROLES
    roles = parse_roles(config.anonymous_roles, "anonymous_roles")
    # An anonymous caller could otherwise choose the request id of an authenticated caller.
    if config.auth != "none" and not roles <= {Role.OBSERVE}:
        raise ConfigError(f"must be observe or unset when auth is {config.auth}", field="anonymous_roles")
    return roles


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
