"""Norm of query and key heads, rotary embedding, and the write into the paged cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized_kv import LARGEST, KvScales
from kernels.triton.dependent_launch import begin, options


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    is_interleaved: bool = False,
    scales: KvScales | None = None,
) -> Tensor:
    """Apply `rms_norm` and `apply_rotary` to q and k; return q, and write k and v to the cache like `store_kv`.

    Args:
        q: [M, Hq, D].
        k: [M, Hk, D].
        v: [M, Hk, D].
        cos: [M, R/2], R at most D.
        sin: Like cos.
        k_cache: [num_blocks, block_size, Hk, D].
        v_cache: Like k_cache, with the same strides.
        slot_mapping: [M]; a negative slot (padding) is not written.
        q_norm: [D]; None means no norm.
        k_norm: Like q_norm; set both or neither.
        is_interleaved: As in `apply_rotary`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    largest = LARGEST.get(k_cache.dtype)
    if (largest is None) != (scales is None):
        raise ValueError(f"a cache of {k_cache.dtype} {'takes no' if largest is None else 'needs'} scales")
    if any(x.stride(-1) != 1 for x in (q, k, v, k_cache, v_cache)):
        raise ValueError("the last dimension is not contiguous")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("set both q_norm and k_norm, or neither")
    k_scale, v_scale = (scales.keys, scales.values) if scales else (k, v)
    group, half = num_heads // num_kv_heads, cos.shape[1]
    rest = head_dim - 2 * half
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _rotate_and_store[(num_tokens, num_kv_heads)](
        q,
        k,
        v,
        cos.contiguous(),
        sin.contiguous(),
        q_norm if q_norm is not None else q,
        k_norm if k_norm is not None else k,
        out,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        k_scale.stride(0),
        k_scale.stride(1),
        eps,
        BLOCK_SIZE=k_cache.shape[1],
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        REST=rest,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)),
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_NORM=q_norm is not None,
        IS_INTERLEAVED=is_interleaved,
        LARGEST=largest or 0.0,
        IS_INTEGER=k_cache.dtype == torch.int8,
        num_warps=4,
        enable_fp_fusion=False,
        **options(q.device),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    scale_stride_block,
    scale_stride_token,
    eps,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: (tokens, KV heads); a program takes the KV head and the query heads of its group."""
    begin(IS_DEPENDENT)
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    SPACING: tl.constexpr = 2 if IS_INTERLEAVED else 1
    PARTNER: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    pairs = tl.arange(0, BLOCK_HALF)
    others = 2 * HALF + tl.arange(0, BLOCK_REST)
    is_pair = pairs < HALF
    is_other = others < HEAD_DIM
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)

    rows = tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP + rows
    first, second, rest = _turned(
        q_ptr + token * q_stride_token + heads[:, None] * q_stride_head,
        (rows < GROUP)[:, None],
        q_norm_ptr,
        cos,
        sin,
        eps,
        HALF,
        BLOCK_HALF,
        REST,
        BLOCK_REST,
        HAS_NORM,
        IS_INTERLEAVED,
    )
    target = out_ptr + (token * tl.num_programs(1) * GROUP + heads)[:, None] * HEAD_DIM
    is_element = (rows < GROUP)[:, None] & is_pair[None, :]
    tl.store(target + pairs[None, :] * SPACING, first, mask=is_element)
    tl.store(target + pairs[None, :] * SPACING + PARTNER, second, mask=is_element)
    if REST > 0:
        tl.store(target + others[None, :], rest, mask=(rows < GROUP)[:, None] & is_other[None, :])

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    one = tl.arange(0, 1)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    place = block * cache_stride_block + offset * cache_stride_token + kv_head * cache_stride_head
    scale_place = block * scale_stride_block + offset * scale_stride_token + kv_head
    first, second, rest = _turned(
        k_ptr + token * k_stride_token + (kv_head + one)[:, None] * k_stride_head,
        (one == 0)[:, None],
        k_norm_ptr,
        cos,
        sin,
        eps,
        HALF,
        BLOCK_HALF,
        REST,
        BLOCK_REST,
        HAS_NORM,
        IS_INTERLEAVED,
    )
    if LARGEST > 0.0:
        # What is quantized is the key as a cache of floats keeps it.
        first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        highest = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
        highest = tl.maximum(highest, tl.max(tl.abs(rest)))
        scale = highest / LARGEST
        tl.store(k_scale_ptr + scale_place, scale)
        first = _units(first, scale, IS_INTEGER)
        second = _units(second, scale, IS_INTEGER)
        rest = _units(rest, scale, IS_INTEGER)
    element = k_cache_ptr.dtype.element_ty
    target = k_cache_ptr + place + pairs[None, :] * SPACING
    tl.store(target, first.to(element), mask=is_pair[None, :])
    tl.store(target + PARTNER, second.to(element), mask=is_pair[None, :])
    if REST > 0:
        tl.store(k_cache_ptr + place + others[None, :], rest.to(element), mask=is_other[None, :])

    dims = tl.arange(0, BLOCK_D)
    v = tl.load(v_ptr + token * v_stride_token + kv_head * v_stride_head + dims, mask=dims < HEAD_DIM, other=0.0)
    if LARGEST > 0.0:
        v = v.to(tl.float32)
        scale = tl.max(tl.abs(v), 0) / LARGEST
        tl.store(v_scale_ptr + scale_place, scale)
        v = _units(v, scale, IS_INTEGER)
    tl.store(v_cache_ptr + place + dims, v.to(element), mask=dims < HEAD_DIM)


@triton.jit
def _turned(
    head_ptrs,
    is_head,
    weight_ptr,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    """Return heads at head_ptrs [H, 1], normed and turned: first and second of each pair, and the rest of each head.

    They are rounded after the norm and after the turn, to the heads' type.
    """
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    SPACING: tl.constexpr = 2 if IS_INTERLEAVED else 1
    PARTNER: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    pairs = tl.arange(0, BLOCK_HALF)
    others = 2 * HALF + tl.arange(0, BLOCK_REST)
    is_pair = pairs < HALF
    is_other = others < HEAD_DIM
    first = tl.load(head_ptrs + pairs[None, :] * SPACING, mask=is_head & is_pair[None, :], other=0.0)
    second = tl.load(head_ptrs + pairs[None, :] * SPACING + PARTNER, mask=is_head & is_pair[None, :], other=0.0)
    rest = tl.load(head_ptrs + others[None, :], mask=is_head & is_other[None, :], other=0.0)
    element = first.dtype
    if HAS_NORM:
        squares = tl.sum(_square(first), 1) + tl.sum(_square(second), 1) + tl.sum(_square(rest), 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weight_ptr + pairs * SPACING, mask=is_pair, other=0.0)
        second_weight = tl.load(weight_ptr + pairs * SPACING + PARTNER, mask=is_pair, other=0.0)
        rest_weight = tl.load(weight_ptr + others, mask=is_other, other=0.0)
        first = _scaled(first, inverse, first_weight)
        second = _scaled(second, inverse, second_weight)
        rest = _scaled(rest, inverse, rest_weight)
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_first = a * cos[None, :] - b * sin[None, :]
    turned_second = b * cos[None, :] + a * sin[None, :]
    return turned_first.to(element), turned_second.to(element), rest


@triton.jit
def _square(x):
    x = x.to(tl.float32)
    return x * x


@triton.jit
def _scaled(x, inverse, weight):
    normed = (x.to(tl.float32) * inverse).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def _units(x, scale, IS_INTEGER: tl.constexpr):
    x = x / tl.where(scale == 0.0, 1.0, scale)
    if IS_INTEGER:
        x = tl.floor(x + 0.5)
    return x
