"""Names of the kinds of worker groups (protos/kind.proto), for people and metrics."""

from __future__ import annotations

import hashlib
from typing import Protocol

# Name of the version of the weights with which the workers were started.
DEFAULT_VERSION = "default"


class AnyKind(Protocol):
    """A kind, as a message or in the scheduler's form."""

    @property
    def model_fingerprint(self) -> str:
        """The identity of the model by samples."""

    @property
    def weights_root(self) -> str:
        """The complete identity of the weights; empty if unknown."""

    @property
    def arithmetic(self) -> str:
        """The digest of the numeric settings."""


def kind_name(kind: AnyKind) -> str:
    """Return eight hexadecimal digits that differ between kinds."""
    parts = (kind.model_fingerprint, kind.weights_root, kind.arithmetic)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]
