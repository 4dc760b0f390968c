"""Write keys and values into the paged cache, quantizing them if the cache is quantized."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized_kv import LARGEST, KvScales


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, scales: KvScales | None = None
) -> None:
    """Write row i of k and v [M, Hk, D] to slot slot_mapping[i] of the caches [num_blocks, block_size, Hk, D].

    A slot is block * block_size + offset; rows with a negative slot (padding) are not written. In an int8 or
    float8_e4m3fn cache, each head of each token is divided by its own scale, which is its largest magnitude divided by
    the type's maximum and is stored in `scales`.
    """
    num_tokens, num_heads, head_dim = k.shape
    largest = LARGEST.get(k_cache.dtype)
    if (largest is None) != (scales is None):
        raise ValueError(f"a cache of {k_cache.dtype} {'takes no' if largest is None else 'needs'} scales")
    k_scale, v_scale = (scales.keys, scales.values) if scales else (k, v)
    for source, cache in ((k, k_cache), (v, v_cache)):
        if source.stride(2) != 1 or cache.stride(3) != 1:
            raise ValueError("the last dimension is not contiguous")
    _store[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        k_scale.stride(0),
        k_scale.stride(1),
        BLOCK_SIZE=k_cache.shape[1],
        NUM_HEADS=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        LARGEST=largest or 0.0,
        IS_INTEGER=k_cache.dtype == torch.int8,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    scale_stride_block,
    scale_stride_token,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_element = (heads[:, None] < NUM_HEADS) & (dims[None, :] < HEAD_DIM)
    k = tl.load(
        k_ptr + token * k_stride_token + heads[:, None] * k_stride_head + dims[None, :], mask=is_element, other=0.0
    )
    v = tl.load(
        v_ptr + token * v_stride_token + heads[:, None] * v_stride_head + dims[None, :], mask=is_element, other=0.0
    )
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    target = block * cache_stride_block + offset * cache_stride_token + heads[:, None] * cache_stride_head
    target += dims[None, :]
    if LARGEST > 0.0:
        scale_target = block * scale_stride_block + offset * scale_stride_token + heads
        k, k_scale = _quantize(k.to(tl.float32), LARGEST, IS_INTEGER)
        v, v_scale = _quantize(v.to(tl.float32), LARGEST, IS_INTEGER)
        tl.store(k_scale_ptr + scale_target, k_scale, mask=heads < NUM_HEADS)
        tl.store(v_scale_ptr + scale_target, v_scale, mask=heads < NUM_HEADS)
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=is_element)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _quantize(x, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr):
    """x [H, D] over the scale of its row, and the scales [H]."""
    scale = tl.max(tl.abs(x), 1) / LARGEST
    x = x / tl.where(scale == 0.0, 1.0, scale)[:, None]
    if IS_INTEGER:
        x = tl.floor(x + 0.5)
    return x, scale
