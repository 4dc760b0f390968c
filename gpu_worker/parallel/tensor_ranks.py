"""What a decoder asks of the ranks that compute the other parts of its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorRanks(Protocol):
    """The tensor ranks of one stage. All of them make the same calls in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; may be x itself, changed. Same bits for a row whatever is beside it."""

    def join(self, x: Tensor) -> Tensor:
        """On the first rank all ranks' x [N, K] side by side, [N, size * K]; on others [N, 0]."""


class OneRank:
    """Nobody else."""

    def sum(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x


ONE_RANK = OneRank()
