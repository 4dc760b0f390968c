"""LoRA adapters in the layout of the CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from torch import Tensor

from kernels.cpu.dims import DecoderDims
from kernels.cpu.library import LoraLayerStruct, LoraPairStruct


class PackedLora:
    """A LoRA adapter for all layers."""

    def __init__(self, dims: DecoderDims, layers: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> None:
        """Pack each layer's pairs (a [R, K]; b [N, R], multiplied by the adapter's scale) for q, k, v, o, gate, up and
        down.

        Raises ValueError for wrong shapes.
        """
        self.dims, self.num_layers = dims, len(layers)
        self._held: list[Tensor] = []  # the kernels hold pointers to them
        self.structs = (LoraLayerStruct * len(layers))()
        shapes = lora_shapes(dims)
        for struct, pairs in zip(self.structs, layers, strict=True):
            for name, (a, b) in pairs.items():
                num_inputs, num_outputs = shapes[name]
                if a.shape != (a.shape[0], num_inputs) or b.shape != (num_outputs, a.shape[0]):
                    raise ValueError(
                        f"{name} is {list(a.shape)} and {list(b.shape)}: expected [R, {num_inputs}], [{num_outputs}, R]"
                    )
                down, up = a.float().contiguous(), b.float().t().contiguous()
                self._held += [down, up]
                setattr(struct, name, LoraPairStruct(down.data_ptr(), up.data_ptr(), down.shape[0]))


def lora_shapes(dims: DecoderDims) -> dict[str, tuple[int, int]]:
    """Return the input and output sizes of each linear layer that an adapter may modify."""
    q_size, kv_size = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    return {
        "q": (dims.hidden_size, q_size),
        "k": (dims.hidden_size, kv_size),
        "v": (dims.hidden_size, kv_size),
        "o": (q_size, dims.hidden_size),
        "gate": (dims.hidden_size, dims.ffn_size),
        "up": (dims.hidden_size, dims.ffn_size),
        "down": (dims.ffn_size, dims.hidden_size),
    }


def adapter_pointers(
    adapters: Sequence[PackedLora | None] | None, num_sequences: int, dims: DecoderDims, num_layers: int
) -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the array for MidstreamBatch.adapters; raise ValueError if an adapter does not match the decoder."""
    if adapters is None:
        return None
    if len(adapters) != num_sequences:
        raise ValueError(f"{len(adapters)} adapters for {num_sequences} sequences; there must be one for each sequence")
    if any(item is not None and (item.dims, item.num_layers) != (dims, num_layers) for item in adapters):
        raise ValueError("an adapter belongs to another decoder")
    pointers = (None if item is None else ctypes.addressof(item.structs) for item in adapters)
    return (ctypes.c_void_p * num_sequences)(*pointers)
