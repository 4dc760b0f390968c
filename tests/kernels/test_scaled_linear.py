"""Products of float8 matrices with inputs rounded to float8, compared with float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
from kernels import BlockWeight, block_weight, dispatch
from kernels import triton as operations
from kernels.cpu import WeightFormat
from kernels.cpu.blocks import random_blocks
from kernels.scaled_linear import can_scale, quantize_rows, scaled_linear
from tests.kernels import exact


def float8_weight(num_rows: int, num_columns: int) -> BlockWeight:
    """Return a random matrix with one scale per row."""
    rows = random_blocks(WeightFormat.FP8, num_rows, num_columns).view(num_rows, -1, 36)
    rows[:, :, :4] = rows[:, :1, :4].clone()
    weight = block_weight(rows.flatten(1), WeightFormat.FP8, num_columns)
    assert weight is not None
    assert weight.row_scale is not None
    return weight


def test_rows_are_rounded_by_hand() -> None:
    # The scales are 1, 2 and 0. 17 is halfway between 16 and 18, and is rounded to 16, whose mantissa is even.
    x = torch.tensor([[448.0, -17.0, 0.0625], [-896.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    units, scale = quantize_rows(x)
    assert units.tolist() == [[448.0, -16.0, 0.0625], [-448.0, 1.5, 0.0], [0.0, 0.0, 0.0]]
    assert scale.tolist() == [[1.0], [2.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_rounds_as_the_reference(dtype: torch.dtype) -> None:
    """Values that are powers of two after rounding are not compared, because the interpreter loses the carry when it
    rounds up to one.
    """
    x = torch.randn(7, 300).to(dtype)[:, 10:211]
    x[2] = 0
    (found, scale), (wanted, wanted_scale) = operations.quantize_rows(x), quantize_rows(x)
    assert torch.equal(scale, wanted_scale)
    codes, wanted_codes = found.view(torch.uint8), wanted.view(torch.uint8)
    is_compared = wanted_codes & 7 != 0
    assert is_compared.sum() > 1000
    assert torch.equal(codes[is_compared], wanted_codes[is_compared])
    assert not codes[2].any()


def test_products_equal_float64_except_for_the_rounding_of_inputs() -> None:
    weight = float8_weight(48, 96)
    x, bias = torch.randn(9, 96).bfloat16(), torch.randn(48).bfloat16()
    out = scaled_linear(x, weight, bias)
    units, scale = quantize_rows(x)
    rounded = units.double() * scale
    assert exact.error(out, exact.linear(rounded, weight.dense(), bias)) < 4e-3  # rounded to bfloat16 twice
    # With three mantissa bits, the error is at most 1/16 of the element, or of the smallest normal number, 2^-6 times
    # the scale, if that is larger.
    assert ((rounded - x.double()).abs() <= torch.maximum(x.double().abs(), scale / 64) / 16).all()
    assert exact.error(out, exact.linear(x, weight.dense(), bias)) < 0.04


def test_a_gpu_accepts_the_layout_of_the_matrices() -> None:
    """PyTorch checks the arguments itself; tensors without values stand in for those of a GPU."""
    weight = float8_weight(48, 96)
    with FakeTensorMode():
        codes = torch.empty(48, 96, dtype=torch.uint8, device="cuda")
        on_gpu = replace(weight, codes=codes, row_scale=torch.empty(48, device="cuda"))
        out = scaled_linear(torch.empty(5, 96, dtype=torch.bfloat16, device="cuda"), on_gpu)
    assert (out.shape, out.device.type, out.dtype) == ((5, 48), "cuda", torch.bfloat16)


def test_float8_products_check_types_and_shapes() -> None:
    x = torch.zeros(1, 96).bfloat16()
    assert can_scale(x, float8_weight(48, 96))
    assert not can_scale(x.float(), float8_weight(48, 96))
    assert not can_scale(x, float8_weight(40, 96))
    assert not can_scale(torch.zeros(1, 100).bfloat16(), float8_weight(48, 100))
    grouped = block_weight(random_blocks(WeightFormat.FP8, 48, 96), WeightFormat.FP8, 96)
    assert grouped is not None
    assert not can_scale(x, grouped)


def test_the_setting_chooses_between_float8_products_and_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    weight, x = float8_weight(48, 96), torch.randn(3, 96).bfloat16()
    launched: list[Tensor] = []

    def multiply(x: Tensor, *_: object, **__: object) -> Tensor:
        launched.append(x)
        return x[:, :48]

    # `multiply` replaces the kernel, which the interpreter cannot run in bfloat16.
    monkeypatch.setattr(operations, "block_linear", multiply)
    monkeypatch.setattr(operations, "quantize_rows", quantize_rows)
    kernels.block_linear(x, weight)
    assert len(launched) == 1
    monkeypatch.setattr(dispatch, "_has_float8_inputs", True)
    assert torch.equal(kernels.block_linear(x, weight), scaled_linear(x, weight))
    gated = kernels.block_linear(x, weight, activation="relu")
    assert torch.equal(gated, operations.activate(scaled_linear(x, weight), "relu"))
    assert len(launched) == 1
    kernels.block_linear(x.float(), weight)
    assert len(launched) == 2


def test_blocks_are_unpacked_once_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "_MAX_PACKED_ROWS", 4)
    weight, x = float8_weight(48, 96), torch.randn(5, 96).half()
    dense = torch.nn.functional.linear(x, weight.dense().half())
    launched: list[int] = []

    def multiply(x: Tensor, *_: object, **__: object) -> Tensor:
        launched.append(len(x))
        return dense[: len(x)]

    monkeypatch.setattr(operations, "block_linear", multiply)
    assert torch.equal(kernels.block_linear(x, weight), dense)
    assert torch.equal(kernels.block_linear(x, weight, activation="relu"), operations.activate(dense, "relu"))
    assert launched == []
    kernels.block_linear(x[:4], weight)
    monkeypatch.setattr(dispatch, "_is_batch_invariant", True)
    kernels.block_linear(x, weight)
    assert launched == [4, 5]


def test_int8_weights_are_unpacked_once_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", operations, raising=False)
    monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "_MAX_PACKED_ROWS", 4)
    weight, scale = torch.randint(-127, 128, (48, 96), dtype=torch.int8), torch.rand(48) / 127
    x, bias = torch.randn(5, 96).half(), torch.randn(48).half()
    product = kernels.linear(x, (weight * scale[:, None]).half(), bias)
    assert torch.equal(kernels.quantized_linear(x, weight, scale, bias), product)
    gated = kernels.gated_linear(x, weight, "relu", bias, scale)
    assert torch.equal(gated, operations.activate(product, "relu"))
    few = kernels.quantized_linear(x[:4], weight, scale, bias)
    assert torch.equal(few, operations.quantized_linear(x[:4], weight, scale, bias))
