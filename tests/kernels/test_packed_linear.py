import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import InputFormat, PackedLinear, WeightFormat, dequantize_blocks
from kernels.cpu.blocks import random_blocks, round_to_int16
from tests.kernels.libraries import each_build, library, runnable_builds, threads

MOST_HALF = 32767 - 255  # the largest level of 16-bit inputs, except with INT16 weights

GGUF_TYPES = {
    WeightFormat.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    WeightFormat.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}


def quantized(weight: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return a weight in the form that PackedLinear takes, and the float values that it represents."""
    if weight_format.has_blocks and weight_format not in GGUF_TYPES:
        rows = random_blocks(weight_format, *weight.shape)
        return rows, dequantize_blocks(rows, weight_format, weight.shape[1])
    if weight_format in GGUF_TYPES:
        blocks = gguf.quants.quantize(weight.numpy(), GGUF_TYPES[weight_format])
        floats = gguf.quants.dequantize(blocks, GGUF_TYPES[weight_format])
        return torch.from_numpy(blocks), torch.from_numpy(floats)
    if weight_format == WeightFormat.BF16:
        return weight, weight.bfloat16().float()
    if weight_format == WeightFormat.INT16:
        return weight, round_to_int16(weight)
    if weight_format == WeightFormat.INT8:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return weight, (weight / scales).round() * scales
    return weight, weight


def rounded(x: Tensor, most: int) -> Tensor:
    """Round each value to a multiple of the largest value in its block of 32, divided by `most`."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # `most / largest` would compute `largest.reciprocal() * most`, which rounds twice.
    levels = (blocks * torch.where(largest > 0, torch.full_like(largest, most) / largest, 0)).round()
    return (levels * (largest / most)).flatten(1)[:, : x.shape[1]]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(runnable_builds),
    weight_format=st.sampled_from(list(WeightFormat)),
    num_rows=st.integers(1, 40),
    num_inputs=st.integers(1, 700),
    num_outputs=st.integers(1, 150),
    has_bias=st.booleans(),
    input_format=st.sampled_from(list(InputFormat)),
    seed=st.integers(0, 2**30),
)
def test_any_shape_and_format_equals_the_reference(
    name: str,
    weight_format: WeightFormat,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    has_bias: bool,
    input_format: InputFormat,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    block = 256 if weight_format == WeightFormat.Q4_K else 32
    if weight_format.has_blocks:
        num_inputs = -(-num_inputs // block) * block
    source, weight = quantized(torch.randn(num_outputs, num_inputs), weight_format)
    bias = torch.randn(num_outputs) if has_bias else None
    x = torch.randn(num_rows, num_inputs)
    packed = PackedLinear(library(name), [source], weight_format, bias, input_format=input_format)
    out = packed(x, threads(name))
    if packed.rounds_input:
        most_half = 32767 - 8191 if weight_format == WeightFormat.INT16 else MOST_HALF
        x = rounded(x, 127 if input_format == InputFormat.INT8 else most_half)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Each of the num_inputs terms is rounded once, and so is each partial sum.
    bound = 1e-6 * (x.abs().double() @ weight.abs().double().T) + 1e-6
    assert bool(((out - expected).abs() <= bound).all())


@each_build
@pytest.mark.parametrize("input_format", list(InputFormat))
@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_rows_do_not_depend_on_batch_or_threads(
    name: str, weight_format: WeightFormat, input_format: InputFormat
) -> None:
    # Emulated tiles are slow, so the matrices are smaller.
    num_blocks, num_outputs, num_all = (9, 100, 60) if name == "tiles" else (33, 200, 260)
    num_inputs = num_blocks // 8 * 256 if weight_format == WeightFormat.Q4_K else num_blocks * 32
    weight, x = torch.randn(num_outputs, num_inputs), torch.randn(num_all, num_inputs)
    # The largest levels of weights and inputs, which one method for many rows adds to each other.
    weight[:, 5] *= 50
    x[12], x[13] = 1.0, -1.0
    source, _ = quantized(weight, weight_format)
    packed = PackedLinear(library(name), [source], weight_format, input_format=input_format)
    whole = packed(x, threads(name))
    for num_rows in range(1, 20):
        for begin in (11, num_all - num_rows):
            rows = slice(begin, begin + num_rows)
            assert torch.equal(packed(x[rows], threads(name, 1 + num_rows % 3)), whole[rows])


@pytest.mark.parametrize(("name", "with_tiles"), [("pair", "tiles"), ("avx512", "amx")])
@pytest.mark.parametrize("input_format", [InputFormat.INT8, InputFormat.INT16])
@pytest.mark.parametrize("weight_format", [WeightFormat.Q4_1, WeightFormat.INT4, WeightFormat.Q4_K, WeightFormat.MXFP4])
def test_products_of_tiles_have_the_same_bits(
    name: str, with_tiles: str, weight_format: WeightFormat, input_format: InputFormat
) -> None:
    if with_tiles not in runnable_builds:
        pytest.skip("this processor has no AMX")
    source, _ = quantized(torch.randn(200, 1024), weight_format)
    # All inputs of rows 3 and 4 have the largest level, and there are more rows than one pass over the weights
    # processes.
    x = torch.randn(260, 1024) * torch.logspace(-6, 6, 260)[:, None]
    x[3], x[4] = 1.0, -1.0
    x[5, ::2] = 0.0
    outputs = [
        PackedLinear(library(it), [source], weight_format, input_format=input_format)(x, threads(it))
        for it in (name, with_tiles)
    ]
    assert torch.equal(*outputs)


@each_build
def test_parts_are_stacked(name: str) -> None:
    first, second, x = torch.randn(5, 64), torch.randn(3, 64), torch.randn(2, 64)
    stacked = PackedLinear(library(name), [first, second], WeightFormat.F32)(x, threads(name))
    torch.testing.assert_close(stacked, torch.cat((x @ first.T, x @ second.T), dim=1))


@each_build
@pytest.mark.parametrize("input_format", list(InputFormat))
def test_a_nan_stays_in_its_row(name: str, input_format: InputFormat) -> None:
    x = torch.randn(9, 64)
    source, _ = quantized(torch.randn(11, 64), WeightFormat.Q4_1)
    packed = PackedLinear(library(name), [source], WeightFormat.Q4_1, input_format=input_format)
    clean = packed(x, threads(name))
    x[4, 3] = torch.nan
    out = packed(x, threads(name))
    assert bool(out[4].isnan().all())
    assert torch.equal(out[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


@each_build
def test_the_highest_sums_of_tiles_are_exact(name: str) -> None:
    """All MXFP4 codes and all inputs have the largest value; even then, the sums of bfloat16 products remain below
    2^24.
    """
    rows = torch.full((70, 34), 0x77, dtype=torch.uint8)
    rows[:, ::17] = 127
    packed = PackedLinear(library(name), [rows], WeightFormat.MXFP4, input_format=InputFormat.INT16)
    x = torch.full((20, 64), MOST_HALF / 32768)
    assert torch.equal(packed(x, threads(name)), torch.full((20, 70), 64 * 6 * MOST_HALF / 32768))


@each_build
@pytest.mark.parametrize("num_rows", [1, 4, 50])
def test_the_largest_sums_of_int16_weights_do_not_overflow(name: str, num_rows: int) -> None:
    """Weights of 32 levels of 2,046 get close to the largest possible sum; all inputs have the largest value."""
    packed = PackedLinear(
        library(name), [torch.full((70, 64), 2046 / 2048)], WeightFormat.INT16, input_format=InputFormat.INT16
    )
    out = packed(torch.full((num_rows, 64), -1.0), threads(name))
    torch.testing.assert_close(out, torch.full((num_rows, 70), -64 * 2046 / 2048), rtol=1e-6, atol=0)


def test_int16_keeps_bfloat16_weights_of_one_magnitude() -> None:
    weight = (torch.rand(50, 100) + 1).bfloat16().float() * torch.tensor([1.0, -(2.0**-100)])[torch.randint(2, (50, 1))]
    assert torch.equal(round_to_int16(weight), weight)


@each_build
@pytest.mark.parametrize("input_format", list(InputFormat))
def test_layers_that_follow_and_columns_in_another_order(name: str, input_format: InputFormat) -> None:
    orders = [torch.randperm(96), None, torch.randperm(96)]
    formats = [WeightFormat.INT4, WeightFormat.Q8_0, WeightFormat.F32]
    sizes, bias, x = (70, 5, 131), torch.randn(70), torch.randn(19, 96)
    parts = [quantized(torch.randn(size, 96), item) for size, item in zip(sizes, formats, strict=True)]

    def layer(i: int, order: torch.Tensor | None, its_bias: torch.Tensor | None) -> PackedLinear:
        source = parts[i][0]
        return PackedLinear(library(name), [source], formats[i], its_bias, input_format=input_format, input_order=order)

    whole = layer(0, orders[0], bias)
    whole.followed_by(layer(1, orders[1], None).followed_by(layer(2, orders[2], None)))
    columns = [x if order is None else x[:, order].contiguous() for order in orders]
    single = [layer(i, None, None if i else bias)(columns[i], threads(name)) for i in range(3)]
    assert torch.equal(whole(x, threads(name)), torch.cat(single, dim=1))
    assert torch.equal(whole(x[3:4], threads(name, 1)), torch.cat(single, dim=1)[3:4])


@each_build
def test_rows_of_bytes_with_their_scales(name: str) -> None:
    """The sums exclude columns beyond the last full block."""
    levels, scales = torch.randint(-128, 128, (70, 52), dtype=torch.int8), torch.rand(70, 1)
    padded = torch.nn.functional.pad(levels, (0, 12), value=77).view(torch.uint8)
    rows = torch.cat((padded, scales.view(torch.uint8)), dim=1)
    packed = PackedLinear(library(name), [rows], WeightFormat.INT8, num_inputs=52)
    x = torch.randn(7, 52)
    torch.testing.assert_close(packed(x, threads(name)), x @ (levels * scales).T, rtol=1e-5, atol=1e-3)


def test_wrong_input_is_refused() -> None:
    name = runnable_builds[0]
    packed = PackedLinear(library(name), [torch.randn(11, 37)], WeightFormat.F32)
    with pytest.raises(ValueError, match=r"expected contiguous float32 \[M, 37\]"):
        packed(torch.randn(2, 36), threads(name))
    with pytest.raises(ValueError, match="expected uint8 rows of blocks"):
        PackedLinear(library(name), [torch.randn(2, 32)], WeightFormat.Q4_1)
    with pytest.raises(ValueError, match="not made of Q8_0 blocks"):
        PackedLinear(library(name), [torch.zeros(2, 35, dtype=torch.uint8)], WeightFormat.Q8_0)
