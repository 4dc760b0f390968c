"""Converts a worker group's kind between the core and the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from protos import kind_pb2
from scheduler.core.kind import EarlierKind, Kind


def kind_to_proto(kind: Kind) -> kind_pb2.WorkerKind:
    """Return the message, which must not be changed."""
    return _message(kind.model_fingerprint, kind.weights_root, kind.arithmetic, kind.description, kind.weights_version)


@lru_cache(maxsize=64)  # each request has a kind, and most have the same one
def _message(fingerprint: str, root: str, arithmetic: str, description: str, version: str) -> kind_pb2.WorkerKind:
    return kind_pb2.WorkerKind(
        model_fingerprint=fingerprint,
        weights_root=root,
        arithmetic=arithmetic,
        description=description,
        weights_version=version,
    )


def kind_from_proto(message: kind_pb2.WorkerKind) -> Kind:
    """Build this from the protobuf message."""
    return Kind(
        message.model_fingerprint,
        message.weights_root,
        message.arithmetic,
        message.description,
        message.weights_version,
    )


def earlier_to_proto(earlier: Iterable[EarlierKind]) -> list[kind_pb2.EarlierKind]:
    """Return the messages for a request's earlier kinds."""
    return [kind_pb2.EarlierKind(kind=kind_to_proto(item.kind), ends=item.ends) for item in earlier]


def earlier_from_proto(messages: Iterable[kind_pb2.EarlierKind]) -> tuple[EarlierKind, ...]:
    """Return a request's earlier kinds."""
    return tuple(EarlierKind(kind_from_proto(item.kind), tuple(item.ends)) for item in messages)
