"""Inputs of a forward pass that belong to adapters and virtual tokens."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")


class AdapterUse(enum.Enum):
    """The matrices that the LoRA adapters of a step change; each case needs its own graph."""

    NOTHING = enum.auto()
    LINEAR_LAYERS = enum.auto()
    # The matrices of a mixture's experts, and possibly other linear layers.
    EXPERTS = enum.auto()


@dataclass(frozen=True, slots=True)
class AdapterTokens(Generic[P]):
    """The adapters used by the tokens of a step.

    Attributes:
        keys: Identifiers of the adapters, in ascending order.
        adapters: Placed adapters, as `Decoder.place_adapter` returns them.
        indices: int32 [M], on the CPU; the index of each token's adapter in `adapters`, -1 if it has none.
    """

    keys: tuple[str, ...]
    adapters: tuple[P, ...]
    indices: Tensor


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """Embeddings, on the CPU, that replace those of some token ids."""

    places: Tensor
    values: Tensor
