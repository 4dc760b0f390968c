"""Idempotency keys: a call that is repeated with the same key attaches to the request that the first call started.

The request's id is derived from the key, and Submit is idempotent on the id. The request is detached, since its client
may reconnect after its connection broke, and its output is kept for a day.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from midstream.errors import AlreadyExistsError, InvalidArgumentError
from protos import generation_pb2 as pb
from router.pipeline.background import current_background

HEADER = "idempotency-key"
_FIELD = "Idempotency-Key"
_WITH_KEY = f"must not be set together with {_FIELD}"
_MAX_KEY = 255
_KEEP_S = 24 * 3600


def check_key(key: str | None) -> str:
    """Return the key; empty if there is none. Raises InvalidArgumentError if it is empty or too long."""
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise InvalidArgumentError(f"must be 1 to {_MAX_KEY} characters", field=_FIELD)
    return key or ""


def key_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the idempotency key in a call's metadata; empty if there is none. Raises the errors of `check_key`."""
    values = [str(value) for name, value in metadata if name == HEADER]
    return check_key(values[-1] if values else None)


def request_id_of(key: str, call: str) -> str:
    """Return the request id for a key; `call` names the method, so that methods do not share keys."""
    return hashlib.blake2b(f"{call}\0{key}".encode(), digest_size=16).hexdigest()


def make_repeatable(request: pb.GenerateRequest, request_id: str) -> None:
    """Derive a request's id from its key. Raises InvalidArgumentError if the request already has an id."""
    check_no_id(request.request_id)
    request.request_id = request_id
    keep(request)


def check_no_id(request_id: str) -> None:
    """Raise InvalidArgumentError if a request already has an id."""
    if request_id:
        is_line = current_background.get() is not None
        reason = "must not be set in a line of a batch; use custom_id" if is_line else _WITH_KEY
        raise InvalidArgumentError(reason, field="request_id")


def keep(request: pb.GenerateRequest) -> None:
    """Detach a request from its client, and keep its output after it has ended."""
    request.detached = True
    request.keep_s = max(request.keep_s, _KEEP_S)


class naming_key:  # noqa: N801 (a context, like contextlib.suppress)
    """Convert a request-id conflict into an error that names the idempotency key and is not retried. Raises
    InvalidArgumentError if the key belongs to another request.
    """

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._key and isinstance(error, AlreadyExistsError):
            raise InvalidArgumentError("was used with another request", field=_FIELD) from None
