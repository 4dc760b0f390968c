"""LoRA adapters of the PyTorch decoder, in one buffer on the device that is allocated before the KV pool and the CUDA
graphs.

An adapter's pairs are consecutive in the buffer, each with a rank padded by `padded_rank`, so that the order of
summation does not depend on which other adapters are in the batch. An adapter has a slot: a row of a table on the
device that contains the position of each pair. Steps refer to adapters by slot, so recorded graphs work for any
adapter.

Nothing here waits for the device. Copies and moves are queued after the steps launched before, which still see the old
contents of the buffer.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels
from gpu_worker.lora.adapter import Adapter, PackedPairs, expert_shapes, module_shapes, padded_rank
from gpu_worker.lora.inputs import AdapterTokens, AdapterUse
from gpu_worker.models.description import DecoderDescription
from midstream.errors import OverloadedError

# Maximum number of adapters on the device at the same time.
MAX_SLOTS = 1024


class PlacedAdapter:
    """An adapter in the arena; its space is freed once nothing refers to this object."""

    def __init__(self, slot: int, use: AdapterUse = AdapterUse.LINEAR_LAYERS) -> None:
        self.slot, self.use = slot, use


def token_slots(tokens: AdapterTokens[PlacedAdapter]) -> NDArray[np.int32]:
    """Return the slot of each token's adapter; -1 for tokens without one."""
    slots = np.array([adapter.slot for adapter in tokens.adapters] + [-1], dtype=np.int32)
    found: NDArray[np.int32] = slots[tokens.indices.numpy()]
    return found


def adapter_use(tokens: AdapterTokens[PlacedAdapter] | None) -> AdapterUse:
    """Return which matrices the adapters of a step change."""
    if tokens is None:
        return AdapterUse.NOTHING
    uses = {adapter.use for adapter in tokens.adapters}
    return AdapterUse.EXPERTS if AdapterUse.EXPERTS in uses else AdapterUse.LINEAR_LAYERS


class AdapterArena:
    """LoRA adapters on one device."""

    def __init__(
        self, description: DecoderDescription, num_bytes: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the buffer.

        Args:
            description: The part of the model to which adapters apply.
        """
        self._dtype, self._device, self._max_rank = dtype, device, padded_rank(max_rank)
        self._modules = [*module_shapes(description), *expert_shapes(description)]
        self._values = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        num_kinds = description.num_layers * len(self._modules)
        num_slots = MAX_SLOTS if num_bytes else 0
        self._table = torch.zeros(num_slots, num_kinds, 2, dtype=torch.int64, device=device)
        # By slot, in ascending order of start: (start, size, table relative to start).
        self._held: dict[int, tuple[int, int, Tensor]] = {}
        self._free_slots = list(reversed(range(num_slots)))

    def pack(self, adapter: Adapter) -> PackedPairs:
        """Return an adapter's pairs in the layout of the buffer, on the host. Thread-safe."""
        is_pinned = self._device.type == "cuda"
        values = torch.zeros(adapter.device_bytes(1), dtype=self._dtype, pin_memory=is_pinned)
        table, end = torch.zeros(self._table.shape[1:], dtype=torch.int64), 0
        for i, layer in enumerate(adapter.layers):
            for module, pair in layer.items():
                rank, padded, inner, outer = pair.rank, padded_rank(pair.rank), pair.a.shape[-1], pair.b.shape[-2]
                num_experts = len(pair.a) if pair.is_of_experts else 1
                table[i * len(self._modules) + self._modules.index(module)] = torch.tensor([end, padded])
                start, end = end, end + num_experts * padded * (inner + outer)
                packed = values[start:end].view(num_experts, padded * (inner + outer))
                packed[:, : rank * inner] = pair.a.reshape(num_experts, -1)
                b = (pair.b.float() * pair.scale).transpose(-1, -2).reshape(num_experts, -1)
                packed[:, padded * inner : padded * inner + rank * outer] = b
        return PackedPairs(values, table)

    def place(self, adapter: Adapter) -> PlacedAdapter:
        """Start copying an adapter to the device. Raises OverloadedError if the adapters in use leave no space."""
        packed = self.pack(adapter) if adapter.packed is None else adapter.packed
        size = len(packed.values)
        start = self._gap(size)
        if start is None:
            self._compact()
            start = self._gap(size)
        if start is None or not self._free_slots:
            raise OverloadedError("the adapters in use leave no room for another", field="lora.name")
        slot = self._free_slots.pop()
        self._values[start : start + size].copy_(packed.values, non_blocking=True)
        self._held[slot] = (start, size, packed.table)
        self._held = dict(sorted(self._held.items(), key=lambda item: item[1][0]))
        self._send_table(slot)
        use = AdapterUse.EXPERTS if adapter.adapts_routed_experts else AdapterUse.LINEAR_LAYERS
        placed = PlacedAdapter(slot, use)
        weakref.finalize(placed, self._free, slot).atexit = False
        return placed

    def add(self, slots: Tensor, layer: int, module: str, x: Tensor, y: Tensor) -> None:
        """Add the outputs of the adapters in `slots`, int32 [M], to y [M, N], a module's output for x [M, K]."""
        kind = layer * len(self._modules) + self._modules.index(module)
        kernels.add_lora(y, x, self._values, self._table[:, kind], slots, self._max_rank)

    def add_to_experts(self, slots: Tensor, layer: int, module: str, experts: Tensor, x: Tensor, y: Tensor) -> None:
        """Like `add`, for experts: row i of x [P, K] and y [P, N] is for expert experts[i]; a token has P / M rows."""
        kind = layer * len(self._modules) + self._modules.index(module)
        slots = slots.repeat_interleave(len(experts) // len(slots))
        start, rank = self._table[slots.clamp(min=0).long(), kind].unbind(1)
        table = torch.stack((start + experts.long() * rank * (x.shape[1] + y.shape[1]), rank), dim=1)
        rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
        kernels.add_lora(y, x, self._values, table, torch.where(slots < 0, -1, rows), self._max_rank)

    def slots(self, tokens: AdapterTokens[Any]) -> Tensor:
        """Return `token_slots` on the device."""
        return torch.from_numpy(token_slots(tokens)).to(self._device)

    def _free(self, slot: int) -> None:
        del self._held[slot]
        self._free_slots.append(slot)

    def _gap(self, size: int) -> int | None:
        """Return the position of the first gap with space for `size` elements; None if there is none."""
        end = 0
        for start, held, _ in self._held.values():
            if start - end >= size:
                return end
            end = start + held
        return end if len(self._values) - end >= size else None

    def _compact(self) -> None:
        """Move all adapters to the front of the buffer."""
        end = 0
        for slot, (start, size, table) in self._held.items():
            if start > end:
                self._values[end : end + size] = self._values[start : start + size].clone()
                self._held[slot] = (end, size, table)
                self._send_table(slot)
            end += size

    def _send_table(self, slot: int) -> None:
        start, _, table = self._held[slot]
        moved = table + torch.tensor([start, 0])
        if self._device.type == "cuda":
            moved = moved.pin_memory()
        self._table[slot].copy_(moved, non_blocking=True)
