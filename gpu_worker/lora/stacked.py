"""Adapters for the PyTorch decoder: those of one batch, stacked by rank.

Adapters are stored separately and stacked for a batch; the stacks are reused until the adapters in the batch change.
All adapters in a stack have one (padded) rank and change its module, so the order of summation does not depend on
which other adapters are in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from gpu_worker.lora.adapter import Adapter, padded_rank
from gpu_worker.lora.inputs import AdapterTokens


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """An adapter on the device: by (layer, module), a [R, K] and b [N, R] with the scale folded in, R padded."""

    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]]


def place_adapter(adapter: Adapter, dtype: torch.dtype, device: torch.device) -> TorchAdapter:
    """Copy an adapter to the device."""
    pairs = {}
    for i, layer in enumerate(adapter.layers):
        for module, pair in layer.items():
            rank = len(pair.a)
            a = torch.zeros(padded_rank(rank), pair.a.shape[1])
            b = torch.zeros(pair.b.shape[0], padded_rank(rank))
            a[:rank], b[:, :rank] = pair.a, pair.b.float() * pair.scale
            pairs[i, module] = a.to(device, dtype), b.to(device, dtype)
    return TorchAdapter(pairs)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Pairs of one module: a [n, R, K], b [n, N, R]; `of_adapter` maps batch indices, and -1, to stack indices."""

    a: Tensor
    b: Tensor
    scaling: Tensor
    of_adapter: Tensor


class StackedAdapters:
    """The adapters of the current batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: tuple[str, ...] = ()
        self._stacks: dict[tuple[int, str], list[_Stack]] = {}
        self._indices = torch.empty(0, dtype=torch.int32)

    def use(self, tokens: AdapterTokens[TorchAdapter]) -> None:
        """Use the adapters of these tokens from now on."""
        if tokens.keys != self._keys:
            self._keys, self._stacks = tokens.keys, self._stack(tokens.adapters)
        self._indices = tokens.indices.to(self._device).long()

    def add(self, layer: int, module: str, x: Tensor, y: Tensor) -> None:
        """Add the tokens' adapters to y [M, N], the output of a module with input x [M, K]."""
        for stack in self._stacks.get((layer, module), ()):
            kernels.add_lora(y, x, stack.a, stack.b, stack.scaling, stack.of_adapter[self._indices])

    def _stack(self, adapters: tuple[TorchAdapter, ...]) -> dict[tuple[int, str], list[_Stack]]:
        stacks: dict[tuple[int, str], list[_Stack]] = {}
        for key in {key for adapter in adapters for key in adapter.pairs}:
            by_rank: dict[int, list[int]] = {}
            for i, adapter in enumerate(adapters):
                if key in adapter.pairs:
                    by_rank.setdefault(len(adapter.pairs[key][0]), []).append(i)
            stacks[key] = [
                self._one([adapters[i].pairs[key] for i in some], some, len(adapters)) for some in by_rank.values()
            ]
        return stacks

    def _one(self, pairs: list[tuple[Tensor, Tensor]], members: list[int], num_adapters: int) -> _Stack:
        of_adapter = torch.full((num_adapters + 1,), -1, dtype=torch.int32)
        of_adapter[members] = torch.arange(len(members), dtype=torch.int32)
        return _Stack(
            torch.stack([a for a, _ in pairs]),
            torch.stack([b for _, b in pairs]),
            torch.ones(len(pairs), device=self._device),
            of_adapter.to(self._device),
        )
