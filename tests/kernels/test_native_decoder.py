import dataclasses

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear, rms_norm
from kernels.cpu import DecoderDims, Embedding, PackedLinear, WeightFormat, draw, empty_draws, supports
from tests.kernels.libraries import each_build, library, runnable_builds, threads
from tests.kernels.models import in_kernel_order, random_decoder
from tests.kernels.paged import PagedBatch, paged_batch

DIMS = DecoderDims(hidden_size=72, num_heads=6, num_kv_heads=2, head_dim=24, ffn_size=100, eps=1e-5, scale=24**-0.5)
DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = [torch.int16, torch.int8]


def step(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables


@st.composite
def all_dims(draw: st.DrawFn) -> DecoderDims:
    head_dim = 8 * draw(st.integers(1, 17))
    num_kv_heads = draw(st.integers(1, 3))
    return DecoderDims(
        # The norm of one or two values close to 0 would amplify rounding errors.
        hidden_size=draw(st.integers(4, 90)),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=draw(st.integers(1, 150)),
        eps=1e-5,
        scale=head_dim**-0.5,
    )


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(runnable_builds),
    dims=all_dims(),
    cache_dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 5, 16, 64]),
    lengths=st.lists(st.tuples(st.integers(1, 130), st.integers(0, 70)), min_size=1, max_size=5),
    flags=st.tuples(st.booleans(), st.booleans()),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 2**30),
)
def test_any_step_equals_the_reference(
    name: str,
    dims: DecoderDims,
    cache_dtype: torch.dtype,
    block_size: int,
    lengths: list[tuple[int, int]],
    flags: tuple[bool, bool],
    window: int | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    decoder = random_decoder(dims, 2, *flags, window=window)
    query_lens, before = [q for q, _ in lengths], [b for _, b in lengths]
    batch = paged_batch([q + b for q, b in lengths], query_lens, block_size)
    expected_caches = decoder.caches(batch.num_blocks, block_size, cache_dtype)
    for i, count in enumerate(before):
        positions = torch.arange(count)
        blocks = batch.block_tables[i, positions // block_size].long()
        shape = (*expected_caches.shape[:2], count, *expected_caches.shape[4:])
        expected_caches[:, :, blocks, positions % block_size] = torch.randn(shape).to(cache_dtype)
    caches = in_kernel_order(expected_caches)
    hidden = torch.randn(sum(query_lens), dims.hidden_size)
    expected = decoder.reference(hidden, batch, expected_caches)
    decoder.native(name, caches).forward_layers(hidden, *step(batch))
    # A value halfway between two bfloat16 values may be rounded to either, which affects the second layer.
    tolerance = 2e-4 if cache_dtype == torch.float32 else 3e-2
    torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, in_kernel_order(expected_caches), rtol=tolerance, atol=tolerance, equal_nan=True)


@each_build
@pytest.mark.parametrize("cache_dtype", DTYPES + INTEGERS)
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_does_not_depend_on_batch_chunks_or_threads(
    name: str, cache_dtype: torch.dtype, window: int | None
) -> None:
    decoder = random_decoder(DIMS, 2, window=window)
    lengths = [150, 9, 77]
    whole = paged_batch(lengths, lengths, block_size=16)
    hidden = torch.randn(sum(lengths), DIMS.hidden_size)
    together, together_caches = hidden.clone(), decoder.caches(whole.num_blocks, 16, cache_dtype)
    decoder.native(name, together_caches).forward_layers(together, *step(whole))

    apart, caches = hidden.clone(), decoder.caches(whole.num_blocks, 16, cache_dtype)
    native = decoder.native(name, caches, num_threads=3)
    done, chunks = [0, 0, 0], [1, 30, 2, 17, 1, 64]
    for turn in range(200):
        # Each step has a different mix of sequences and chunk sizes, including decodes.
        taken = [min(chunks[(turn + i) % 6] if (turn + i) % 4 else 0, lengths[i] - done[i]) for i in range(3)]
        busy = [i for i in range(3) if taken[i]]
        if done == lengths:
            break
        if not busy:
            continue
        rows = torch.cat([torch.arange(done[i], done[i] + taken[i]) + whole.query_starts[i] for i in busy])
        part = dataclasses.replace(
            whole,
            query_starts=torch.tensor([0, *(taken[i] for i in busy)]).cumsum(0).int(),
            context_lens=torch.tensor([done[i] + taken[i] for i in busy]).int(),
            block_tables=whole.block_tables[busy].contiguous(),
            slot_mapping=whole.slot_mapping[rows],
            positions=whole.positions[rows],
        )
        some = apart[rows]
        native.forward_layers(some, *step(part))
        apart[rows] = some
        done = [d + t for d, t in zip(done, taken, strict=True)]
    assert done == lengths
    assert torch.equal(apart, together)
    if cache_dtype.is_floating_point:
        caches, together_caches = caches.nan_to_num(7), together_caches.nan_to_num(7)
    assert torch.equal(caches, together_caches)


@each_build
@pytest.mark.parametrize(("cache_dtype", "most"), [(torch.int16, 32767), (torch.int8, 127)])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("window", [None, 20])
def test_an_integer_cache_holds_each_head_of_a_token_with_its_scale(
    name: str, cache_dtype: torch.dtype, most: int, block_size: int, window: int | None
) -> None:
    decoder = random_decoder(DIMS, 1, window=window)
    batch = paged_batch([70, 3, 34], [70, 3, 34], block_size)
    exact, caches = (decoder.caches(batch.num_blocks, block_size, dtype) for dtype in (torch.float32, cache_dtype))
    hidden = torch.randn(107, DIMS.hidden_size)
    expected = decoder.reference(hidden, batch, exact)
    decoder.native(name, caches).forward_layers(hidden, *step(batch))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=10 / most)

    written = batch.slot_mapping.long()
    for stored, floats, is_value in ((caches[0, 0], exact[0, 0], False), (caches[0, 1], exact[0, 1], True)):
        regions = stored.reshape(batch.num_blocks, DIMS.num_kv_heads, -1)
        num_levels = DIMS.head_dim * block_size
        shape = (block_size, DIMS.head_dim) if is_value else (DIMS.head_dim, block_size)
        levels = torch.unflatten(regions[..., :num_levels], -1, shape).float()
        levels = (levels if is_value else levels.transpose(2, 3)).transpose(1, 2).flatten(0, 1)[written]
        scales = regions[..., num_levels:].contiguous().view(torch.float32).transpose(1, 2).flatten(0, 1)[written]
        heads = floats.flatten(0, 1)[written]
        torch.testing.assert_close(scales, heads.abs().amax(dim=-1) / most, rtol=1e-4, atol=0)
        torch.testing.assert_close(levels * scales[..., None], heads, rtol=0, atol=0.51 * float(scales.max()) + 1e-4)


@each_build
def test_a_nan_in_an_integer_cache_stays_in_its_sequence(name: str) -> None:
    decoder = random_decoder(DIMS, 1)
    batch = paged_batch([4, 4], [4, 4], block_size=16)
    hidden = torch.randn(8, DIMS.hidden_size)
    hidden[1, 0] = torch.nan
    decoder.native(name, decoder.caches(batch.num_blocks, 16, torch.int16)).forward_layers(hidden, *step(batch))
    assert bool(hidden[1:4].isnan().all())
    assert bool(hidden[4:].isfinite().all())


@each_build
def test_layers_can_run_in_parts(name: str) -> None:
    decoder = random_decoder(DIMS, 3)
    batch = paged_batch([20], [20], block_size=16)
    whole = torch.randn(20, DIMS.hidden_size)
    parts = whole.clone()
    native = decoder.native(name, decoder.caches(batch.num_blocks, 16, torch.float32))
    native.forward_layers(whole, *step(batch))
    native.forward_layers(parts, *step(batch), last_layer=1)
    native.forward_layers(parts, *step(batch), first_layer=1)
    assert torch.equal(parts, whole)


@each_build
def test_logits_are_the_head_of_the_final_norm(name: str) -> None:
    native = random_decoder(DIMS, 1).native(name, random_decoder(DIMS, 1).caches(1, 16, torch.float32))
    hidden, norm, weight = torch.randn(5, 72), torch.randn(72), torch.randn(333, 72)
    head = PackedLinear(library(name), [weight], WeightFormat.F32)
    logits = native.logits(hidden, norm, head)
    torch.testing.assert_close(logits, linear(rms_norm(hidden, norm, 1e-5), weight), rtol=1e-4, atol=1e-4)
    assert torch.equal(native.logits(hidden[3:4].clone(), norm, head), logits[3:4])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("positions", 5000, "a position is out of range"),
        ("slot_mapping", 16 * 3, "a slot is out of range"),
        ("slot_mapping", -1, "a slot is out of range"),
        ("block_tables", 99, "a block is out of range"),
        ("context_lens", 17, "a context is longer than its block table"),
        ("context_lens", 3, "a sequence has more queries than context"),
        ("query_starts", 1, "query_starts does not cover the tokens"),
    ],
)
def test_an_index_out_of_range_is_refused_before_anything_is_written(field: str, value: int, message: str) -> None:
    name = runnable_builds[0]
    decoder = random_decoder(DIMS, 1)
    batch = paged_batch([4], [4], block_size=16)
    getattr(batch, field).view(-1)[0] = value
    caches = decoder.caches(batch.num_blocks, 16, torch.float32)
    native = decoder.native(name, caches)
    hidden = torch.randn(4, DIMS.hidden_size)
    before = hidden.clone()
    with pytest.raises(ValueError, match=message):
        native.forward_layers(hidden, *step(batch))
    assert torch.equal(hidden, before)
    assert bool(caches.isnan().all())


def test_wrong_tensors_are_named() -> None:
    decoder = random_decoder(DIMS, 1)
    batch = paged_batch([4], [4], block_size=16)
    native = decoder.native(runnable_builds[0], decoder.caches(batch.num_blocks, 16, torch.float32))
    with pytest.raises(ValueError, match="hidden is"):
        native.forward_layers(torch.randn(4, 71), *step(batch))
    broken = dataclasses.replace(batch, slot_mapping=batch.slot_mapping.long())
    with pytest.raises(ValueError, match="slot_mapping is"):
        native.forward_layers(torch.randn(4, 72), *step(broken))


def test_unsupported_head_sizes_are_reported() -> None:
    assert supports(DIMS) is None
    assert "head size 20" in str(supports(dataclasses.replace(DIMS, head_dim=20)))
    assert "head size 264" in str(supports(dataclasses.replace(DIMS, head_dim=264)))


def embeddings(weight_format: WeightFormat, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return an embedding table in the format of the kernels, and its float32 values."""
    values = torch.randn(num_rows, width)
    if weight_format == WeightFormat.F32:
        return values, values
    if weight_format == WeightFormat.BF16:
        return values.bfloat16(), values.bfloat16().float()
    kind = {WeightFormat.Q4_1: gguf.GGMLQuantizationType.Q4_1, WeightFormat.Q8_0: gguf.GGMLQuantizationType.Q8_0}
    values[0, :32] *= 1e-6  # the scale is a subnormal half-precision number
    blocks = gguf.quants.quantize(values.numpy(), kind[weight_format])
    return torch.from_numpy(blocks), torch.from_numpy(gguf.quants.dequantize(blocks, kind[weight_format]))


WIDE = dataclasses.replace(DIMS, hidden_size=96)


@each_build
@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q4_1, WeightFormat.Q8_0])
def test_a_choice_in_one_call_equals_the_choice_in_parts(name: str, weight_format: WeightFormat) -> None:
    decoder = random_decoder(WIDE, 2)
    batch = paged_batch([20, 1, 30], [20, 1, 30], block_size=16)
    table, values = embeddings(weight_format, 50, 96)
    token_ids, sampled = torch.randint(0, 50, (51,), dtype=torch.int32), torch.tensor([50, 3, 20], dtype=torch.int32)
    norm, head = torch.randn(96), PackedLinear(library(name), [torch.randn(333, 96)], WeightFormat.F32)

    caches = [decoder.caches(batch.num_blocks, 16, torch.int16) for _ in range(2)]
    parts, whole = decoder.native(name, caches[0]), decoder.native(name, caches[1], num_threads=3)
    hidden = values[token_ids].clone()
    parts.forward_layers(hidden, *step(batch))
    logits = parts.logits(hidden[sampled], norm, head)
    best, highest = whole.choose(token_ids, *step(batch), sampled, Embedding(table, weight_format, 96), norm, head)
    assert best.tolist() == logits.argmax(dim=1).tolist()
    assert torch.equal(highest, logits.amax(dim=1))
    assert torch.equal(caches[0], caches[1])

    draws = empty_draws(3)
    draws[:] = [(seed, temperature, 0.9, 0.0, 40, 0, 7) for seed, temperature in ((1, 1.0), (2, 0.0), (3, 2.0))]
    arguments = (token_ids, *step(batch), sampled, Embedding(table, weight_format, 96), norm, head)
    drawn, highest = whole.choose(*arguments, draws=draws)
    expected = draw(threads(name), logits, np.arange(3, dtype=np.int32), draws)
    assert torch.equal(drawn, expected[0])
    assert torch.equal(highest, expected[1])
    assert drawn[1] == best[1]


NAN, INF = float("nan"), float("inf")


@each_build
@pytest.mark.parametrize(
    ("logits", "best"),
    [
        ([0.5], 0),
        ([-3.0, -2.0, -2.0], 1),
        ([*[1.0] * 20, 7.0, *[2.0] * 30, 7.0], 20),
        ([*[-INF] * 40, -1e30, *[-INF] * 7], 40),
        ([*[1.0] * 40, 3.0], 40),
        ([*[1.0] * 5, NAN, *[9.0] * 40], 5),
        ([*[1.0] * 36, 2.0, NAN], 37),
        ([*[1.0] * 5, INF, *[9.0] * 40, INF], 5),
    ],
)
def test_the_first_of_the_highest_logits_is_chosen_and_nan_counts_as_higher(
    name: str, logits: list[float], best: int
) -> None:
    decoder = random_decoder(WIDE, 1)
    batch = paged_batch([2], [2], block_size=16)
    native = decoder.native(name, decoder.caches(batch.num_blocks, 16, torch.float32))
    head = PackedLinear(library(name), [torch.zeros(len(logits), 96)], WeightFormat.F32, torch.tensor(logits))
    table = Embedding(torch.randn(2, 96), WeightFormat.F32, 96)
    ids = torch.tensor([0, 1], dtype=torch.int32)
    chosen, highest = native.choose(ids, *step(batch), ids[1:].clone(), table, torch.ones(96), head)
    assert chosen.tolist() == [best]
    torch.testing.assert_close(highest, torch.tensor([logits[best]]), equal_nan=True)


@pytest.mark.parametrize(
    ("ids", "sampled", "message"),
    [([0, 2], [1], "a token is out of range"), ([-1, 0], [1], "a token"), ([0, 1], [2], "a sampled token is out")],
)
def test_a_choice_for_an_index_out_of_range_is_refused(ids: list[int], sampled: list[int], message: str) -> None:
    name = runnable_builds[0]
    decoder = random_decoder(WIDE, 1)
    batch = paged_batch([2], [2], block_size=16)
    caches = decoder.caches(batch.num_blocks, 16, torch.float32)
    head = PackedLinear(library(name), [torch.zeros(3, 96)], WeightFormat.F32)
    table = Embedding(torch.randn(2, 96), WeightFormat.F32, 96)
    with pytest.raises(ValueError, match=message):
        decoder.native(name, caches).choose(
            torch.tensor(ids).int(), *step(batch), torch.tensor(sampled).int(), table, torch.ones(96), head
        )
    assert bool(caches.isnan().all())
