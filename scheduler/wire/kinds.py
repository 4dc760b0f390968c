"""Converts a worker group's kind between the core and the protocol."""

from __future__ import annotations

from protos import kind_pb2
from scheduler.core.kind import Kind

_FIELDS = ("model_fingerprint", "weights_root", "arithmetic", "description")


def kind_to_proto(kind: Kind) -> kind_pb2.WorkerKind:
    """Return the message."""
    return kind_pb2.WorkerKind(**{name: getattr(kind, name) for name in _FIELDS})


def kind_from_proto(message: kind_pb2.WorkerKind) -> Kind:
    """Build this from the protobuf message."""
    return Kind(*(getattr(message, name) for name in _FIELDS))
