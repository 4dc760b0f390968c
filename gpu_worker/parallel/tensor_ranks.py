"""The interface through which a decoder uses the other ranks of its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorRanks(Protocol):
    """The tensor ranks of one stage. All of them must make the same calls in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, perhaps in place. A row's bits do not depend on other rows."""

    def join(self, x: Tensor) -> Tensor:
        """Return all ranks' x [N, K] concatenated, [N, size * K], on the first rank; [N, 0] on the others."""


class OneRank:
    """A single rank."""

    def sum(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x

    def join(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x


ONE_RANK = OneRank()
