"""Converts a worker group's kind between the core and the protocol."""

from __future__ import annotations

from protos import kind_pb2
from scheduler.core.kind import Kind


def kind_to_proto(kind: Kind) -> kind_pb2.WorkerKind:
    """Return the message."""
    return kind_pb2.WorkerKind(
        model_fingerprint=kind.model_fingerprint,
        weights_root=kind.weights_root,
        arithmetic=kind.arithmetic,
        description=kind.description,
    )


def kind_from_proto(message: kind_pb2.WorkerKind) -> Kind:
    """Build this from the protobuf message."""
    return Kind(message.model_fingerprint, message.weights_root, message.arithmetic, message.description)
