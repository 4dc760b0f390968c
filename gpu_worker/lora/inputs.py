"""What a forward pass is told of adapters and virtual tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AdapterTokens(Generic[P]):
    """The adapters of a step's tokens.

    Attributes:
        keys: What tells the adapters apart, in ascending order.
        adapters: What the model made of them.
        indices: int32 [M], on the CPU; each token's place in `adapters`, -1 for none.
    """

    keys: tuple[str, ...]
    adapters: tuple[P, ...]
    indices: Tensor


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """Embeddings that stand where token ids do, on the CPU.

    Attributes:
        places: int64 [E]; indices into the M tokens.
        values: float32 [E, hidden_size].
    """

    places: Tensor
    values: Tensor
