"""The kind of a worker group: what decides its results for a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from midstream.kind_names import kind_name


class LostKind(enum.StrEnum):
    """What happens to a request of which no group of its kind is left; the values of the setting `lost_kind`."""

    MOVE = "move"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, slots=True)
class Kind:
    """The weights and the arithmetic of a worker group; the fields are those of WorkerKind in the protocol.

    Attributes:
        weights_root: Empty until the group has hashed its weights completely.
        description: For people; equal kinds may have different ones.
        weights_version: Name of the version of the weights; empty for those with which the workers were started.
    """

    model_fingerprint: str = ""
    weights_root: str = ""
    arithmetic: str = ""
    description: str = field(default="", compare=False)
    weights_version: str = field(default="", compare=False)

    def agrees_with(self, other: Kind) -> bool:
        """Return whether, as far as is known, both give the same tokens for the same request."""
        if self is other:
            return True
        are_equal = self.arithmetic == other.arithmetic and self.model_fingerprint == other.model_fingerprint
        roots = {self.weights_root, other.weights_root} - {""}
        return are_equal and len(roots) <= 1

    @property
    def name(self) -> str:
        """A short digest, for logs and metrics."""
        return kind_name(self)


@dataclass(frozen=True, slots=True)
class EarlierKind:
    """A kind that computed tokens of a request before its current one.

    Attributes:
        ends: For each sequence, the number of its tokens when the next kind took over.
    """

    kind: Kind
    ends: tuple[int, ...]
