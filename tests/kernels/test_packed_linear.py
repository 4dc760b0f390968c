import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import InputFormat, PackedLinear, WeightFormat
from tests.kernels.libraries import each_build, library, runnable_builds, threads

GGUF_TYPES = {
    WeightFormat.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    WeightFormat.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}


def quantized(weight: Tensor, weight_format: WeightFormat) -> tuple[Tensor, Tensor]:
    """What PackedLinear takes, and the floats that it stands for."""
    if weight_format in GGUF_TYPES:
        blocks = gguf.quants.quantize(weight.numpy(), GGUF_TYPES[weight_format])
        floats = gguf.quants.dequantize(blocks, GGUF_TYPES[weight_format])
        return torch.from_numpy(blocks), torch.from_numpy(floats)
    if weight_format == WeightFormat.BF16:
        return weight, weight.bfloat16().float()
    if weight_format == WeightFormat.INT8:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return weight, (weight / scales).round() * scales
    return weight, weight


def rounded(x: Tensor, most: int) -> Tensor:
    """Blocks of 32 numbers, each rounded to a multiple of 1/most of its largest."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # A number divided by a tensor would be a product with its reciprocal, which is rounded once more.
    levels = (blocks * torch.where(largest > 0, torch.full_like(largest, most) / largest, 0)).round()
    return (levels * (largest / most)).flatten(1)[:, : x.shape[1]]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
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
    if weight_format.is_gguf:
        num_inputs = -(-num_inputs // 32) * 32
    source, weight = quantized(torch.randn(num_outputs, num_inputs), weight_format)
    bias = torch.randn(num_outputs) if has_bias else None
    x = torch.randn(num_rows, num_inputs)
    packed = PackedLinear(library(name), [source], weight_format, bias, input_format=input_format)
    out = packed(x, threads(name))
    if packed.rounds_input:
        x = rounded(x, 127 if input_format == InputFormat.INT8 else 32767)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Each of num_inputs terms, and each partial sum, is rounded once.
    bound = 1e-6 * (x.abs().double() @ weight.abs().double().T) + 1e-6
    assert bool(((out - expected).abs() <= bound).all())


@each_build
@pytest.mark.parametrize("input_format", list(InputFormat))
@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_rows_do_not_depend_on_batch_or_threads(
    name: str, weight_format: WeightFormat, input_format: InputFormat
) -> None:
    source, _ = quantized(torch.randn(200, 1056), weight_format)
    packed = PackedLinear(library(name), [source], weight_format, input_format=input_format)
    x = torch.randn(260, 1056)
    whole = packed(x, threads(name))
    for num_rows in range(1, 20):
        for begin in (0, 11, 260 - num_rows):
            rows = slice(begin, begin + num_rows)
            assert torch.equal(packed(x[rows], threads(name, 1 + num_rows % 3)), whole[rows])


@pytest.mark.parametrize(("name", "with_tiles"), [("pair", "tiles"), ("avx512", "amx")])
@pytest.mark.parametrize("input_format", [InputFormat.INT8, InputFormat.INT16])
def test_products_of_tiles_have_the_same_bits(name: str, with_tiles: str, input_format: InputFormat) -> None:
    if with_tiles not in runnable_builds:
        pytest.skip("this processor has no AMX")
    source, _ = quantized(torch.randn(200, 1056), WeightFormat.Q4_1)
    # Sums as large as they get, and more rows than pass over the weights at once.
    x = torch.randn(260, 1056) * torch.logspace(-6, 6, 260)[:, None]
    x[3], x[4] = 1.0, -1.0
    x[5, ::2] = 0.0
    outputs = [
        PackedLinear(library(it), [source], WeightFormat.Q4_1, input_format=input_format)(x, threads(it))
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


def test_wrong_input_is_refused() -> None:
    name = runnable_builds[0]
    packed = PackedLinear(library(name), [torch.randn(11, 37)], WeightFormat.F32)
    with pytest.raises(ValueError, match=r"expected contiguous float32 \[M, 37\]"):
        packed(torch.randn(2, 36), threads(name))
    with pytest.raises(ValueError, match="expected uint8 rows of GGUF blocks"):
        PackedLinear(library(name), [torch.randn(2, 32)], WeightFormat.Q4_1)
    with pytest.raises(ValueError, match="not made of Q8_0 blocks"):
        PackedLinear(library(name), [torch.zeros(2, 35, dtype=torch.uint8)], WeightFormat.Q8_0)
