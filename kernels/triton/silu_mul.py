"""The gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [M, 2F], gate first -> [M, F]; computed in float32, rounded once."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        raise ValueError("the last dimension is not contiguous")
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    _silu_mul[grid](gate_up, out, gate_up.stride(0), size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
    return out


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    source = gate_up_ptr + row * stride + columns
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=is_column
    )
