"""A paged cache in int8 or float8, in plain PyTorch, with one scale per head and token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest value of each type of quantized cache.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of the keys and of the values in a quantized cache, each float32 [num_blocks, block_size, Hk]."""

    keys: Tensor
    values: Tensor


def store_quantized_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, scales: KvScales
) -> None:
    """Quantize row i of k and v [M, Hk, D] per head, and write it to slot slot_mapping[i] of caches and `scales`."""
    slots = slot_mapping.long()
    for source, cache, scale in ((k, k_cache, scales.keys), (v, v_cache, scales.values)):
        wide = source.float()
        step = wide.abs().amax(dim=-1) / LARGEST[cache.dtype]
        wide = wide / torch.where(step == 0, 1.0, step)[..., None]
        units = (wide + 0.5).floor() if cache.dtype == torch.int8 else wide
        cache.flatten(0, 1)[slots] = units.to(cache.dtype)
        scale.flatten(0, 1)[slots] = step


def dequantized(cache: Tensor, scales: Tensor) -> Tensor:
    """Return the whole cache of keys or values as float32."""
    return cache.float() * scales[..., None]
