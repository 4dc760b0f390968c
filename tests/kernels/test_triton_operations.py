"""The small kernels in Triton's interpreter, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.models.weights.block_rows import int4_weight
from kernels import Activation, KvScales, block_weight
from kernels import triton as operations
from kernels.cpu import WeightFormat, dequantize_blocks
from kernels.cpu.blocks import random_blocks
from kernels.grouped_linear import weighted_sum as torch_weighted_sum
from tests.kernels import exact

EPSILON = {torch.float32: 1e-6, torch.float16: 1e-3}
dtypes = st.sampled_from(list(EPSILON))
property_test = settings(max_examples=8, derandomize=True)


@property_test
@given(rows=st.integers(1, 9), size=st.integers(1, 300), dtype=dtypes)
def test_norm_with_residual(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((rows, size), (rows, size), (size,)))
    normed, total = operations.add_rms_norm(x, residual, weight, 1e-5)
    assert exact.error(total, x.double() + residual.double()) < EPSILON[dtype]
    assert exact.error(normed, exact.rms_norm(total, weight, 1e-5)) < EPSILON[dtype]


def test_norm_of_heads_inside_a_wider_row() -> None:
    rows, weight = torch.randn(5, 7 * 24), torch.randn(24)
    heads = rows[:, 24 : 4 * 24].view(5, 3, 24)
    assert exact.error(operations.rms_norm(heads, weight, 1e-5), exact.rms_norm(heads, weight, 1e-5)) < 1e-6


@property_test
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 3, 16]),
    is_interleaved=st.booleans(),
    dtype=dtypes,
)
def test_rotary(tokens: int, heads: int, half: int, rest: int, is_interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size = 2 * half + rest
    rows = torch.randn(tokens, (heads + 2) * size).to(dtype)
    q = rows[:, : heads * size].view(tokens, heads, size)
    k = rows[:, heads * size :].view(tokens, 2, size)
    angles = torch.randn(tokens, half)
    turned = operations.apply_rotary(q, k, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
    for out, x in zip(turned, (q, k), strict=True):
        wanted = exact.rotate(x, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
        assert exact.error(out, wanted) < EPSILON[dtype]


@property_test
@given(
    group=st.integers(1, 3),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 3]),
    is_interleaved=st.booleans(),
    has_norm=st.booleans(),
    kind=st.sampled_from([torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn]),
)
def test_the_fused_norm_rotary_and_kv_write(
    group: int, half: int, rest: int, is_interleaved: bool, has_norm: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    dtype, size, slots = kind if kind.itemsize > 1 else torch.float32, 2 * half + rest, [5, -1, 2]
    rows = torch.randn(3, (2 * group + 4) * size).to(dtype).view(3, 2 * group + 4, size)
    q, k, v = torch.split(rows, [2 * group, 2, 2], dim=1)
    norms = [torch.randn(size).to(dtype) if has_norm else None for _ in range(2)]
    angles = torch.randn(3, half)
    caches = torch.zeros(2, 2, 4, 2, size).to(kind)
    scales = KvScales(*torch.zeros(2, 2, 4, 2).unbind()) if kind.itemsize == 1 else None

    def run(some: slice) -> torch.Tensor:
        return operations.rotate_and_store(
            q[some],
            k[some],
            v[some],
            angles.cos()[some],
            angles.sin()[some],
            caches[0],
            caches[1],
            torch.tensor(slots, dtype=torch.int32)[some],
            q_norm=norms[0],
            k_norm=norms[1],
            eps=1e-5,
            is_interleaved=is_interleaved,
            scales=scales,
        )

    def expected(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        normed = x if norm is None else exact.rms_norm(x, norm, 1e-5)
        return exact.rotate(normed, angles.cos(), angles.sin(), is_interleaved=is_interleaved)

    turned = run(slice(None))
    assert exact.error(turned, expected(q, norms[0])) < EPSILON[dtype]
    keys, values = caches.float()
    if scales is not None:
        keys, values = keys * scales.keys[..., None], values * scales.values[..., None]
    for stored, source in ((keys, expected(k, norms[1])), (values, v)):
        near = {torch.int8: 0.02, torch.float8_e4m3fn: 0.08}.get(kind, EPSILON[dtype])
        assert exact.error(stored.flatten(0, 1)[[5, 2]], source[[0, 2]]) < near
        assert not stored.flatten(0, 1)[[0, 1, 3, 4, 6, 7]].any()
    # A row has the same bits when it is computed alone.
    before = caches.clone()
    assert torch.equal(run(slice(2, 3)), turned[2:])
    assert torch.equal(caches.view(torch.uint8), before.view(torch.uint8))


@property_test
@given(rows=st.integers(1, 4), size=st.integers(1, 1500), dtype=dtypes, kind=st.sampled_from(get_args(Activation)))
def test_gated_activation(rows: int, size: int, dtype: torch.dtype, kind: Activation) -> None:
    torch.manual_seed(0)
    gate_up = 4 * torch.randn(rows, 2 * size).to(dtype)
    assert exact.error(operations.activate(gate_up, kind), exact.activate(gate_up, kind)) < EPSILON[dtype]


@property_test
@given(
    tokens=st.integers(1, 40),
    num_repeats=st.integers(1, 3),
    num_experts=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 80), st.integers(1, 140)),
    is_biased=st.booleans(),
    is_batch_invariant=st.booleans(),
)
def test_each_row_has_its_own_matrix(
    tokens: int,
    num_repeats: int,
    num_experts: int,
    sizes: tuple[int, int],
    is_biased: bool,
    is_batch_invariant: bool,
) -> None:
    torch.manual_seed(0)
    (outer, inner), num_rows = sizes, tokens * num_repeats
    x, weight = torch.randn(tokens, inner), torch.randn(num_experts, outer, inner)
    experts = torch.randint(0, num_experts, (num_rows,), dtype=torch.int32)
    bias = torch.randn(num_experts, outer) if is_biased else None
    out = operations.grouped_linear(
        x, weight, experts, bias, num_repeats=num_repeats, is_batch_invariant=is_batch_invariant
    )
    assert exact.error(out, exact.grouped_linear(x, weight, experts, bias, num_repeats)) < 1e-6


def test_rows_of_many_tokens_have_their_own_matrices() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2500, 5), torch.randn(11, 7, 5)
    experts = torch.randint(0, 11, (2500,), dtype=torch.int32)
    experts[experts == 4] = 5  # no row uses expert 4
    out = operations.grouped_linear(x, weight, experts)
    assert exact.error(out, exact.grouped_linear(x, weight, experts, None, 1)) < 1e-6


@pytest.mark.parametrize("num_rows", [6, 200], ids=["few rows", "many rows"])
def test_rows_without_a_matrix_are_zero(num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(num_rows, 5), torch.randn(3, 7, 5), torch.randn(3, 7)
    experts = torch.randint(0, 4, (num_rows,), dtype=torch.int32)
    experts[:2] = torch.tensor([3, 0])
    out, has_matrix = operations.grouped_linear(x, weight, experts, bias, is_partial=True), experts < 3
    wanted = exact.grouped_linear(x[has_matrix], weight, experts[has_matrix], bias, 1)
    assert exact.error(out[has_matrix], wanted) < 1e-6
    assert not out[~has_matrix].any()


@pytest.mark.parametrize("dtype", list(EPSILON))
def test_weighted_sums_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts, weights = torch.randn(3, 5, 1100).to(dtype), torch.rand(3, 5)
    assert torch.equal(operations.weighted_sum(parts, weights), torch_weighted_sum(parts, weights))
    assert torch.equal(operations.weighted_sum(parts, None), torch_weighted_sum(parts, None))


@pytest.mark.usefixtures("dots_row_by_row")
@pytest.mark.parametrize("dtype", list(EPSILON))
def test_the_fused_gate_up_and_activation_of_experts(dtype: torch.dtype) -> None:
    """The result is bit-identical to that of the two separate operations; if batch-invariant, each row is bit-identical
    to the same row computed alone.
    """
    x, weight = torch.randn(30, 40).to(dtype), torch.randn(3, 2 * 37, 40).to(dtype)
    bias, experts = torch.randn(3, 2 * 37).to(dtype), torch.arange(60, dtype=torch.int32) % 3
    product = exact.grouped_linear(x, weight, experts, bias, 2)
    for count in (2, 60):  # few rows for each expert, and many
        run = partial(operations.grouped_linear, x[: count // 2], weight, experts[:count], bias, num_repeats=2)
        out = run(activation="clamped_swiglu")
        assert torch.equal(out, operations.activate(run(), "clamped_swiglu"))
        assert exact.error(out, exact.activate(product[:count], "clamped_swiglu")) < 2 * EPSILON[dtype]
    together = run(activation="silu", is_batch_invariant=True)
    alone = operations.grouped_linear(x[5:6], weight, experts[11:12], bias, activation="silu", is_batch_invariant=True)
    assert torch.equal(alone, together[11:12])


def test_kv_goes_to_its_slots_and_padding_nowhere() -> None:
    rows = torch.randn(4, 5, 24)
    k, v = rows[:, :2], rows[:, 2:4]
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 24).unbind()
    operations.store_kv(k, v, k_cache, v_cache, torch.tensor([5, -1, 0, 11], dtype=torch.int32))
    expected = torch.zeros(2, 12, 2, 24)
    expected[:, [5, 0, 11]] = torch.stack((k, v))[:, [0, 2, 3]]
    assert torch.equal(torch.stack((k_cache, v_cache)).flatten(1, 2), expected)


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.08)])
def test_quantized_kv_is_close_to_the_stored_values(dtype: torch.dtype, error: float) -> None:
    k, v = torch.randn(2, 3, 2, 24).unbind()
    k[1] = 0
    caches = torch.zeros(2, 2, 4, 2, 24).to(dtype)
    scales = KvScales(*torch.zeros(2, 2, 4, 2).unbind())
    operations.store_kv(k, v, caches[0], caches[1], torch.tensor([7, 2, 0], dtype=torch.int32), scales=scales)
    for source, cache, scale in ((k, caches[0], scales.keys), (v, caches[1], scales.values)):
        stored = (cache.float() * scale[..., None]).flatten(0, 1)
        assert exact.error(stored[[7, 2, 0]], source) < error
        assert not stored[[1, 3, 4, 5, 6]].any()


def test_scales_and_quantized_caches_go_together() -> None:
    k, slots = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int32)
    cache = torch.zeros(1, 4, 1, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="needs scales"):
        operations.store_kv(k, k, cache, cache, slots)


@property_test
@given(rows=st.integers(1, 70), inner=st.integers(1, 100), outer=st.integers(1, 70), biased=st.booleans())
def test_linear(rows: int, inner: int, outer: int, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
    bias = torch.randn(outer) if biased else None
    whole = operations.linear(x, weight, bias)
    assert exact.error(whole, exact.linear(x, weight, bias)) < 1e-6
    units, scale = (weight * 40).to(torch.int8), torch.rand(outer)
    out = operations.quantized_linear(x, units, scale, bias)
    assert exact.error(out, exact.linear(x, units * scale[:, None], bias)) < 1e-6


@pytest.mark.parametrize("dtype", list(EPSILON))
@pytest.mark.usefixtures("dots_row_by_row")
@pytest.mark.parametrize("kind", ["f", "int8", "int4", "float8"])
def test_the_fused_gate_up_and_activation(kind: str, dtype: torch.dtype) -> None:
    """The numbers of rows are small and large; batch-invariant results are bit-identical to those of the two separate
    operations and of single rows.
    """
    x, bias = torch.randn(70, 64).to(dtype), torch.randn(2 * 37).to(dtype)
    run: Callable[..., torch.Tensor]
    if kind == "f":
        values = torch.randn(2 * 37, 64).to(dtype)
        product = operations.linear(x, values, bias)
        run = partial(operations.gated_linear, weight=values, activation="silu", bias=bias)
    elif kind == "int8":
        weight, scale = torch.randint(-127, 128, (2 * 37, 64), dtype=torch.int8), torch.rand(2 * 37) / 127
        values = weight * scale[:, None]
        product = operations.quantized_linear(x, weight, scale, bias, is_batch_invariant=True)
        run = partial(operations.gated_linear, weight=weight, activation="silu", bias=bias, scale=scale)
    else:
        weight_format = {"int4": WeightFormat.INT4, "float8": WeightFormat.FP8}[kind]
        rows = random_blocks(weight_format, 2 * 37, 64)
        blocks = block_weight(rows, weight_format, 64)
        assert blocks is not None
        values = dequantize_blocks(rows, weight_format, 64).to(dtype)
        product = operations.block_linear(x, blocks, bias, is_batch_invariant=True)
        run = partial(operations.block_linear, weight=blocks, activation="silu", bias=bias)
    wanted = exact.activate(exact.linear(x, values, bias), "silu")
    for count in (3, 40, 70):
        # Gate and up values are rounded to the type of x in between.
        assert exact.error(run(x[:count]), wanted[:count]) < 2 * EPSILON[dtype]
    together = run(x, is_batch_invariant=True)
    assert torch.equal(together, operations.activate(product, "silu"))
    assert torch.equal(run(x[5:6], is_batch_invariant=True), together[5:6])


@pytest.mark.usefixtures("dots_row_by_row")
@property_test
@given(rows=st.integers(1, 40), rank=st.integers(1, 40), dtype=dtypes, seed=st.integers(0, 9))
def test_each_row_has_its_own_adapter(rows: int, rank: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    inner, outer = 70, 50
    x, y = torch.randn(rows, inner).to(dtype), torch.randn(rows, outer).to(dtype)
    pairs = exact.lora_pairs([rank, 0, 8, 20], inner, outer, dtype)
    values, table = exact.lora_arena(pairs)
    slots = torch.randint(-1, 4, (rows,), dtype=torch.int32)
    before, alone = y.clone(), y[-1:].clone()
    operations.add_lora(y, x, values, table, slots, 40)
    assert exact.error(y, exact.lora(before, x, pairs, slots)) < EPSILON[dtype]
    assert torch.equal(y[slots < 0], before[slots < 0])
    operations.add_lora(alone, x[-1:], values, table, slots[-1:], 40)
    assert torch.equal(alone, y[-1:])


@pytest.mark.parametrize("weight_format", [item for item in WeightFormat if item.has_blocks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_are_unpacked(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = random_blocks(weight_format, 37, 256)
    weight = block_weight(rows, weight_format, 256)
    assert weight is not None
    values = dequantize_blocks(rows, weight_format, 256)
    torch.testing.assert_close(weight.dense(), values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(operations.unpack(weight, dtype), values.to(dtype), rtol=EPSILON[dtype], atol=1e-6)
    x, bias = torch.randn(19, 256).to(dtype), torch.randn(37).to(dtype)
    out = operations.block_linear(x, weight, bias)
    assert exact.error(out, exact.linear(x, values.to(dtype), bias)) < EPSILON[dtype]
    alone = operations.block_linear(x[3:4], weight, bias, is_batch_invariant=True)
    assert torch.equal(alone, operations.block_linear(x, weight, bias, is_batch_invariant=True)[3:4])


def test_a_gpus_own_conversion_of_float8_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = block_weight(random_blocks(WeightFormat.FP8, 37, 64), WeightFormat.FP8, 64)
    x = torch.randn(3, 64)
    assert weight is not None
    out = operations.block_linear(x, weight)
    monkeypatch.setitem(operations.block_linear.__globals__, "capability", lambda _: 89)
    assert torch.equal(operations.block_linear(x, weight), out)


def test_scales_that_columns_share_are_held_once() -> None:
    scale = torch.rand(5, 2).half()
    rows = int4_weight(torch.randint(0, 16, (5, 256), dtype=torch.uint8), scale, torch.full((5, 2), 8)).source
    weight = block_weight(rows, WeightFormat.INT4, 256)
    assert weight is not None
    assert (weight.group, weight.scale.shape, weight.scale.dtype) == (128, (5, 2), torch.float16)
