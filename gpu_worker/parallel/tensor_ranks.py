"""The interface through which a decoder communicates with the other ranks that share its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TensorRanks(Protocol):
    """The tensor ranks of one stage. All of them must make the same calls in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, possibly in place. The bits of a row do not depend on other rows."""

    def join(self, x: Tensor) -> Tensor:
        """Gather x [N, K] from all ranks into [N, size * K] on rank 0; return [N, 0] on the other ranks."""


class OneRank:
    """The interface for a single rank."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        return x


ONE_RANK = OneRank()
