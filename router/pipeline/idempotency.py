"""Idempotency keys: a call that is sent again with its key attaches to what the first one started.

The key makes the request's id, and Submit is idempotent on that. The request is detached, as its client may come back
after its connection broke, and it is kept for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator

from midstream.errors import AlreadyExistsError, InvalidArgumentError
from protos import generation_pb2 as pb

HEADER = "idempotency-key"
_FIELD = "Idempotency-Key"
_MAX_KEY = 255
_KEEP_S = 24 * 3600


def check_key(key: str | None) -> str:
    """Return a key as it came; empty for none.

    Raises:
        InvalidArgumentError: It is empty or too long.
    """
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise InvalidArgumentError(f"must be 1 to {_MAX_KEY} characters", field=_FIELD)
    return key or ""


def key_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the key in a gRPC call's metadata; empty for none; errors as in `check_key`."""
    values = [str(value) for name, value in metadata if name == HEADER]
    return check_key(values[-1] if values else None)


def request_id_of(key: str, call: str) -> str:
    """Return the id of the request that a key stands for; `call` tells apart one key at several methods."""
    return hashlib.blake2b(f"{call}\0{key}".encode(), digest_size=16).hexdigest()


def make_repeatable(request: pb.GenerateRequest, request_id: str) -> None:
    """Make a request that is found again by its key.

    Raises:
        InvalidArgumentError: It has an id of its own.
    """
    check_no_id(request.request_id)
    request.request_id = request_id
    keep(request)


def check_no_id(request_id: str) -> None:
    """Raise InvalidArgumentError where a request has an id of its own."""
    if request_id:
        raise InvalidArgumentError(f"must not be set together with {_FIELD}", field="request_id")


def keep(request: pb.GenerateRequest) -> None:
    """Let a request go on when its client leaves, and keep it when it has ended."""
    request.detached = True
    request.keep_s = max(request.keep_s, _KEEP_S)


@contextlib.contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Say of a request id that is taken that the key is: not to be tried again.

    Raises:
        InvalidArgumentError: The key belongs to another request.
    """
    try:
        yield
    except AlreadyExistsError:
        if not key:
            raise
        raise InvalidArgumentError("was used with another request", field=_FIELD) from None
