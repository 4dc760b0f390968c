"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R elements of each head: q [M, Hq, D], k [M, Hk, D], cos and sin [M, R/2].

    The pairs are (i, i + R/2), or with is_interleaved (2i, 2i + 1). R is at most D.
    """
    num_tokens, num_heads, head_dim = q.shape
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("the last dimension is not contiguous")
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _rotate[(num_tokens,)](
        q,
        k,
        cos.contiguous(),
        sin.contiguous(),
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        NUM_Q=num_heads,
        NUM_K=k.shape[1],
        BLOCK_Q=triton.next_power_of_2(num_heads),
        BLOCK_K=triton.next_power_of_2(k.shape[1]),
        HALF=cos.shape[1],
        BLOCK_HALF=triton.next_power_of_2(cos.shape[1]),
        REST=head_dim - 2 * cos.shape[1],
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * cos.shape[1])),
        IS_INTERLEAVED=is_interleaved,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return q_out, k_out


@triton.jit
def _rotate(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    _turn(
        q_ptr + token * q_stride_token,
        q_stride_head,
        q_out_ptr + token * NUM_Q * (2 * HALF + REST),
        cos,
        sin,
        dims,
        NUM_Q,
        BLOCK_Q,
        HALF,
        REST,
        BLOCK_REST,
        IS_INTERLEAVED,
    )
    _turn(
        k_ptr + token * k_stride_token,
        k_stride_head,
        k_out_ptr + token * NUM_K * (2 * HALF + REST),
        cos,
        sin,
        dims,
        NUM_K,
        BLOCK_K,
        HALF,
        REST,
        BLOCK_REST,
        IS_INTERLEAVED,
    )


@triton.jit
def _turn(
    x_ptr,
    stride_head,
    out_ptr,
    cos,
    sin,
    dims,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    SPACING: tl.constexpr = 2 if IS_INTERLEAVED else 1
    PARTNER: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    heads = tl.arange(0, BLOCK_H)
    is_element = (heads[:, None] < NUM_HEADS) & (dims[None, :] < HALF)
    source = x_ptr + heads[:, None] * stride_head + dims[None, :] * SPACING
    first = tl.load(source, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(source + PARTNER, mask=is_element, other=0.0).to(tl.float32)
    target = out_ptr + heads[:, None] * HEAD_DIM + dims[None, :] * SPACING
    element = out_ptr.dtype.element_ty
    tl.store(target, (first * cos[None, :] - second * sin[None, :]).to(element), mask=is_element)
    tl.store(target + PARTNER, (second * cos[None, :] + first * sin[None, :]).to(element), mask=is_element)
    if REST > 0:
        others = 2 * HALF + tl.arange(0, BLOCK_REST)
        is_other = (heads[:, None] < NUM_HEADS) & (others[None, :] < HEAD_DIM)
        x = tl.load(x_ptr + heads[:, None] * stride_head + others[None, :], mask=is_other, other=0.0)
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + others[None, :], x, mask=is_other)
