"""The gated activations of feed-forward networks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.triton.dependent_launch import begin, options

_BLOCK = 1024


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up for x [M, 2F], gate first -> [M, F]; computed in float32, rounded once."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    if x.stride(1) != 1:
        raise ValueError("the last dimension is not contiguous")
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    _activate[grid](
        x,
        out,
        x.stride(0),
        size,
        KIND=activation,
        LIMIT=SWIGLU_LIMIT,
        SLOPE=SWIGLU_SLOPE,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
        **options(x.device),
    )
    return out


@triton.jit
def _activate(
    x_ptr,
    out_ptr,
    stride,
    size,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    source = x_ptr + row * stride + columns
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + size, mask=is_column, other=0.0)
    out = gated(gate, up, KIND, LIMIT, SLOPE)
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """Return activation(gate) * up in float32."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        doubled = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
        gate = gate * tl.sigmoid(tl.maximum(doubled, -80.0))
    elif KIND == "relu":
        gate = tl.maximum(gate, 0.0)
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0)
        gate = gate * gate
    else:
        gate = tl.minimum(gate, LIMIT)
        gate = gate * tl.sigmoid(gate * SLOPE)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
    return gate * up
