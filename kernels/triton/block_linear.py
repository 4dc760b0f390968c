"""The linear layer for blocks of quantized weights, unpacked in registers; and a kernel that only unpacks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation
from kernels.block_weight import KINDS, BlockWeight
from kernels.triton.dependent_launch import begin, capability, options
from kernels.triton.linear import MANY_GATED_ROWS, MANY_ROWS, Launch, write_tile

# Measured on an H100.
_FEW_ROWS = Launch(16, 32, 256, 4, 4)
_SOME_ROWS = Launch(64, 32, 128, 4, 4)
_SOME_GATED_ROWS = Launch(64, 64, 128, 4, 3)
# Minimum compute capability at which larger tiles spill no registers.
_LARGE_TILES_CAPABILITY = 90
# Number of rows and columns that a program unpacks.
_UNPACKED_ROWS, _UNPACKED_COLUMNS = 8, 512
# Minimum compute capability at which a GPU has an instruction to convert float8 numbers.
_FLOAT8_CAPABILITY = 89


def block_linear(
    x: Tensor,
    weight: BlockWeight,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], bias [N] -> [M, N]; weights are rounded to x's type before they are used.

    With an activation, return `activate` of that result, like `gated_linear`. Tile sizes are chosen for M, unless the
    result must be batch-invariant.
    """
    num_rows, inner = x.shape
    if x.stride(1) != 1 or inner != weight.num_columns:
        raise ValueError(f"x is {list(x.shape)}: expected [M, {weight.num_columns}] with contiguous rows")
    launch = _launch_for(num_rows, x.device, is_gated=activation is not None, is_batch_invariant=is_batch_invariant)
    outer = weight.codes.shape[0] // (1 if activation is None else 2)
    out = torch.empty(num_rows, outer, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, launch.block_m), triton.cdiv(outer, launch.block_n))
    _block_linear[grid](
        x,
        weight.codes,
        weight.scale,
        weight.scale if weight.minimum is None else weight.minimum,
        x if bias is None else bias,
        out,
        num_rows,
        outer,
        inner,
        x.stride(0),
        weight.codes.shape[1],
        weight.scale.shape[1],
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        KIND=KINDS.index(weight.kind),
        GROUP=weight.group,
        HAS_MINIMUM=weight.minimum is not None,
        HAS_BIAS=bias is not None,
        HAS_FLOAT8=_converts_float8(weight),
        ACTIVATION=activation or "",
        LIMIT=SWIGLU_LIMIT,
        SLOPE=SWIGLU_SLOPE,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=launch.num_warps,
        num_stages=launch.num_stages if x.element_size() <= 2 else 2,
        enable_fp_fusion=True,
        **options(x.device),
    )
    return out


def unpack(weight: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Return the weights [N, K], rounded to `dtype`."""
    num_rows, num_columns = weight.codes.shape[0], weight.num_columns
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.codes.device)
    _unpack[triton.cdiv(num_rows, _UNPACKED_ROWS), triton.cdiv(num_columns, _UNPACKED_COLUMNS)](
        weight.codes,
        weight.scale,
        weight.scale if weight.minimum is None else weight.minimum,
        out,
        num_rows,
        num_columns,
        weight.codes.shape[1],
        weight.scale.shape[1],
        BLOCK_N=_UNPACKED_ROWS,
        BLOCK_K=_UNPACKED_COLUMNS,
        KIND=KINDS.index(weight.kind),
        GROUP=weight.group,
        HAS_MINIMUM=weight.minimum is not None,
        HAS_FLOAT8=_converts_float8(weight),
        enable_fp_fusion=True,
        **options(out.device),
    )
    return out


def _converts_float8(weight: BlockWeight) -> bool:
    return weight.kind == "float8" and capability(weight.codes.device) >= _FLOAT8_CAPABILITY


def _launch_for(num_rows: int, device: torch.device, *, is_gated: bool, is_batch_invariant: bool) -> Launch:
    if is_batch_invariant:
        return _SOME_ROWS
    if num_rows <= _FEW_ROWS.block_m:
        return _FEW_ROWS
    if 0 < capability(device) < _LARGE_TILES_CAPABILITY:
        return _SOME_ROWS
    if num_rows <= _SOME_ROWS.block_m:
        return _SOME_GATED_ROWS if is_gated else _SOME_ROWS
    return MANY_GATED_ROWS if is_gated else MANY_ROWS


@triton.jit
def _levels(codes, KIND: tl.constexpr, HAS_FLOAT8: tl.constexpr):
    """Return what codes stand for before they are scaled; KIND is a place in KINDS.

    Bytes are the low part of a float whose exponent is 23, so a logical operation and a subtraction convert them; a
    GPU's instruction for this has a quarter of their rate. With int4 that instruction was faster in measurements.
    """
    if HAS_FLOAT8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = codes.to(tl.int32)
    if KIND == 1:  # E2M1, doubled: a float's exponent counts 127 more, and the minimum changes subnormal ones alone
        value = (((codes & 7) << 22) + (127 << 23)).to(tl.float32, bitcast=True)
        value = tl.minimum(value, 2.0 * value - 2.0)
        return tl.where(codes > 7, -value, value)
    if KIND == 3:
        return ((codes & 255) ^ (0x4B000000 | 128)).to(tl.float32, bitcast=True) - 8388736.0
    if KIND == 4:  # E4M3: a float's exponent counts 120 more
        value = (((codes & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.minimum(value, 2.0 * value - 0.015625)
        return tl.where(codes > 127, -value, value)
    if KIND == 2:
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return codes.to(tl.float32)


@triton.jit
def _spread(rows, is_row, first, num_groups, NUM: tl.constexpr, EACH: tl.constexpr):
    """Return the values of NUM groups of each row from the `first` on, each EACH times: [rows, NUM * EACH]."""
    groups = first + tl.arange(0, NUM)
    values = tl.load(rows + groups[None, :], mask=is_row & (groups < num_groups)[None, :], other=0.0)
    values = tl.broadcast_to(values[:, :, None], [values.shape[0], NUM, EACH])
    return tl.reshape(values, [values.shape[0], NUM * EACH]).to(tl.float32)


@triton.jit
def _read(
    code_rows,
    scale_rows,
    minimum_rows,
    is_row,
    start,
    row_bytes,
    num_groups,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):
    """Return codes, scales and minimums, if any, of BLOCK_K columns from `start` on, given pointers to their rows."""
    PACKED: tl.constexpr = 2 if KIND <= 1 else 1
    NUM_BYTES: tl.constexpr = BLOCK_K // PACKED
    # A load of each element's scale from a computed place could not overlap with earlier products.
    NUM: tl.constexpr = max(BLOCK_K // GROUP, 1)
    places = start // PACKED + tl.arange(0, NUM_BYTES)
    codes = tl.load(code_rows + places[None, :], mask=is_row & (places < row_bytes)[None, :], other=0)
    scale = _spread(scale_rows, is_row, start // GROUP, num_groups, NUM, NUM_BYTES // NUM)
    minimum = scale
    if HAS_MINIMUM:
        minimum = _spread(minimum_rows, is_row, start // GROUP, num_groups, NUM, NUM_BYTES // NUM)
    return codes, scale, minimum


@triton.jit
def _part(
    codes,
    scale,
    minimum,
    start,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
):
    """Return the weights, in float32, and their columns; four-bit codes have two parts, others one."""
    if KIND <= 1:  # of 32 weights, byte i has weights i and i + 16
        steps = tl.arange(0, BLOCK_K // 2)
        columns = start + steps // 16 * 32 + steps % 16 + PART * 16
        levels = _levels((codes >> (PART * 4)) & 15, KIND, HAS_FLOAT8)
    else:
        columns = start + tl.arange(0, BLOCK_K)
        levels = _levels(codes, KIND, HAS_FLOAT8)
    weight = levels * scale
    if HAS_MINIMUM:
        weight += minimum
    return weight, columns


@triton.jit
def _unpack(
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    out_ptr,
    num_rows,
    num_columns,
    row_bytes,
    num_groups,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    start = tl.program_id(1) * BLOCK_K
    codes, scale, minimum = _read(
        codes_ptr + rows * row_bytes,
        scale_ptr + rows * num_groups,
        minimum_ptr + rows * num_groups,
        rows < num_rows,
        start,
        row_bytes,
        num_groups,
        BLOCK_K,
        KIND,
        GROUP,
        HAS_MINIMUM,
    )
    for part in tl.static_range(2 if KIND <= 1 else 1):
        weight, columns = _part(codes, scale, minimum, start, part, BLOCK_K, KIND, HAS_MINIMUM, HAS_FLOAT8)
        mask = (rows < num_rows) & (columns < num_columns)[None, :]
        tl.store(out_ptr + rows * num_columns + columns[None, :], weight.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_products(
    acc,
    x_rows,
    code_rows,
    scale_rows,
    minimum_rows,
    start,
    inner,
    row_bytes,
    num_groups,
    is_row,
    is_channel,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to `acc` the products of the columns from `start` on, given pointers to the begin of each row."""
    codes, scale, minimum = _read(
        code_rows,
        scale_rows,
        minimum_rows,
        is_channel,
        start,
        row_bytes,
        num_groups,
        BLOCK_K,
        KIND,
        GROUP,
        HAS_MINIMUM,
    )
    for part in tl.static_range(2 if KIND <= 1 else 1):
        weight, columns = _part(codes, scale, minimum, start, part, BLOCK_K, KIND, HAS_MINIMUM, HAS_FLOAT8)
        x = tl.load(x_rows + columns[None, :], mask=is_row & (columns < inner)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _block_linear(
    x_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outer,
    inner,
    x_stride,
    row_bytes,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FLOAT8: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid and order of gates and ups: as of `_linear`."""
    begin(IS_DEPENDENT)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_channel = rows < num_rows, channels < outer
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    code_rows = codes_ptr + channels.to(tl.int64)[:, None] * row_bytes
    group_rows = channels.to(tl.int64)[:, None] * num_groups
    up_codes = tl.cast(outer, tl.int64) * row_bytes
    up_groups = tl.cast(outer, tl.int64) * num_groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        acc = _add_products(
            acc,
            x_rows,
            code_rows,
            scale_ptr + group_rows,
            minimum_ptr + group_rows,
            start,
            inner,
            row_bytes,
            num_groups,
            is_row[:, None],
            is_channel[:, None],
            BLOCK_K,
            KIND,
            GROUP,
            HAS_MINIMUM,
            HAS_FLOAT8,
            PRECISION,
        )
        if ACTIVATION != "":
            up = _add_products(
                up,
                x_rows,
                code_rows + up_codes,
                scale_ptr + group_rows + up_groups,
                minimum_ptr + group_rows + up_groups,
                start,
                inner,
                row_bytes,
                num_groups,
                is_row[:, None],
                is_channel[:, None],
                BLOCK_K,
                KIND,
                GROUP,
                HAS_MINIMUM,
                HAS_FLOAT8,
                PRECISION,
            )
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "":
            up += tl.load(bias_ptr + outer + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    write_tile(acc, up, out_ptr, rows, outer, is_row, is_channel, BLOCK_N, ACTIVATION, LIMIT, SLOPE)
