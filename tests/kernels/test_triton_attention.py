"""The attention kernels in Triton's interpreter, which shows correctness but not speed.

16-bit types are float16 here, since the interpreter cannot multiply bfloat16 matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from kernels import KvScales
from kernels import triton as operations
from kernels.triton import attention
from tests.kernels import exact
from tests.kernels.paged import PagedBatch, paged_batch

EPSILON = {torch.float32: 1e-6, torch.float16: 2e-3}


def random_cache(
    batch: PagedBatch, block_size: int, num_kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a random cache, with NaN in slots that no sequence uses."""
    caches = torch.full((2, batch.num_blocks, block_size, num_kv_heads, dim), torch.nan, dtype=dtype)
    for i, length in enumerate(batch.context_lens.tolist()):
        positions = torch.arange(length)
        blocks = batch.block_tables[i, positions // block_size].long()
        caches[:, blocks, positions % block_size] = torch.randn(2, length, num_kv_heads, dim).to(dtype)
    return caches[0], caches[1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PagedBatch,
    window: int | None = None,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    splits: int | None = None,
) -> Tensor:
    tables, scale = (batch.block_tables, batch.query_starts, batch.context_lens), q.shape[-1] ** -0.5
    return operations.paged_attention(
        q,
        k,
        v,
        *tables,
        scale,
        window,
        softcap,
        sinks=sinks,
        chunk=chunk,
        num_shares=splits,
        num_tile_splits=splits,
    )


@settings(max_examples=20, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 7]),
    num_kv_heads=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 24, 80]),
    block_size=st.sampled_from([4, 16, 12]),
    window=st.sampled_from([None, 1, 20]),
    chunk=st.sampled_from([None, 1, 20]),
    has_sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    splits=st.sampled_from([None, 1, 3, 4]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_attention_equals_float64(
    lengths: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
    has_sinks: bool,
    softcap: float,
    splits: int | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    batch = paged_batch([c for c, _ in lengths], [min(c, q) for c, q in lengths], block_size)
    k, v = random_cache(batch, block_size, num_kv_heads, dim, dtype)
    q = torch.randn(int(batch.query_starts[-1]), num_kv_heads * group, dim).to(dtype)
    sinks = torch.randn(q.shape[1]) if has_sinks else None
    window = None if chunk else window
    out = attend(q, k, v, batch, window, softcap, sinks=sinks, chunk=chunk, splits=splits)
    wanted = exact.attention(q, k, v, batch, dim**-0.5, window, softcap, sinks, chunk)
    assert exact.error(out, wanted) < EPSILON[dtype]


def test_heads_of_256_and_queries_inside_a_wider_row() -> None:
    batch = paged_batch([40, 33], [1, 5], 16)
    k, v = random_cache(batch, 16, 1, 256, torch.float32)
    rows = torch.randn(6, 4 * 256)
    q = rows[:, : 2 * 256].view(6, 2, 256)
    assert exact.error(attend(q, k, v, batch), exact.attention(q, k, v, batch, 1 / 16)) < EPSILON[torch.float32]


def test_larger_heads_are_refused() -> None:
    batch = paged_batch([3], [1], 4)
    with pytest.raises(ValueError, match="head size 264"):
        attend(torch.zeros(1, 1, 264), torch.zeros(9, 4, 1, 264), torch.zeros(9, 4, 1, 264), batch)


@pytest.mark.parametrize(("splits", "is_batch_invariant"), [(1, False), (3, False), (1, True)])
def test_padding_rows_give_zeros(monkeypatch: pytest.MonkeyPatch, splits: int, is_batch_invariant: bool) -> None:
    batch = paged_batch([30], [1], 4)
    k, v = random_cache(batch, 4, 2, 16, torch.float32)
    q = torch.randn(3, 4, 16)
    tables = torch.cat((batch.block_tables, torch.zeros(2, batch.block_tables.shape[1], dtype=torch.int32)))
    starts, lens = torch.arange(4, dtype=torch.int32), torch.tensor([30, 0, 0], dtype=torch.int32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))
    out = operations.paged_attention(
        q, k, v, tables, starts, lens, 0.25, num_shares=splits, is_batch_invariant=is_batch_invariant
    )
    assert exact.error(out[:1], exact.attention(q[:1], k, v, batch, 0.25)) < EPSILON[torch.float32]
    assert not out[1:].any()


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (90, False)])
def test_programs_go_to_the_longest_sequences_and_any_may_join(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_sinks: bool
) -> None:
    """The sequences have 7, 1 and 1 tiles of 32 keys, and there is one chunk of two queries. With 4 programs in
    addition to one per query, each takes up to 3 tiles.

    With a window, the last 90 of 200 keys are in 4 tiles, so each program takes up to 2 tiles.
    """
    batch = paged_batch([200, 3, 9, 30], [1, 1, 2, 1], 16)
    k, v = random_cache(batch, 16, 2, 16, torch.float32)
    q, sinks = torch.randn(5, 4, 16), torch.randn(4) if has_sinks else None
    empty, states = torch.empty, []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if args[1:] == (2,):
            states.append(made.fill_(-7))
        return made

    monkeypatch.setattr(torch, "empty", watched)
    out = attend(q, k, v, batch, window, sinks=sinks, splits=4)
    assert exact.error(out, exact.attention(q, k, v, batch, 0.25, window, sinks=sinks)) < EPSILON[torch.float32]
    # The first sequence has three programs, or two with a window; the programs of the other sequences write their
    # results directly.
    is_written = (states[0].view(4 + 4, 2, 2, 2) != -7).flatten(1).any(1)
    num_programs = 2 if window else 3
    assert is_written.tolist() == [True] * num_programs + [False] * (8 - num_programs)

    set_index = InterpreterBuilder.set_grid_idx

    def backwards(self: InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_index(self, self.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    assert torch.equal(attend(q, k, v, batch, window, sinks=sinks, splits=4), out)
    assert not attention._arrivals(q.device).any()


def test_single_queries_and_their_splits_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, launched = paged_batch([200, 3], [1, 1], 16), []
    k, v = random_cache(batch, 16, 2, 16, torch.float32)

    def note(function: InterpretedFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        launched.append((function.__name__, grid))
        return lambda *args, **kwargs: None

    monkeypatch.setattr(InterpretedFunction, "__getitem__", note)
    attend(torch.randn(2, 4, 16), k, v, batch, splits=4)
    assert launched == [("decode", (2 + 4, 2))]


def test_a_device_is_filled_with_programs_for_all_kv_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, launched = paged_batch([200, 3], [1, 1], 16), []
    k, v = random_cache(batch, 16, 2, 16, torch.float32)
    monkeypatch.setattr(attention, "num_processors", lambda device: 5)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda _, grid: lambda *_, **__: launched.append(grid))
    attend(torch.randn(2, 4, 16), k, v, batch)
    assert launched == [(2 + 8, 2)]  # 3 programs per processor are 15, rounded up to 8 for each of the 2 KV heads


def test_a_sequence_of_more_splits_than_are_joined_at_a_time() -> None:
    """The sequence has 70 tiles of 32 keys, one for each program."""
    batch = paged_batch([70 * 32], [1], 16)
    k, v = random_cache(batch, 16, 1, 16, torch.float32)
    q = torch.randn(1, 2, 16)
    out = attend(q, k, v, batch, splits=70)
    assert exact.error(out, exact.attention(q, k, v, batch, 0.25)) < EPSILON[torch.float32]


def test_more_sequences_than_a_program_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are read 16 at a time here, since the interpreter is slow. Each sequence has one or three tiles of 32
    keys.
    """
    monkeypatch.setattr(attention, "_SEQUENCES_AT_ONCE", 16)
    lengths = [70 if i % 9 == 0 else 1 + i % 30 for i in range(35)]
    batch = paged_batch(lengths, [1] * 35, 16)
    k, v = random_cache(batch, 16, 1, 16, torch.float32)
    q = torch.randn(35, 1, 16)
    out = attend(q, k, v, batch, splits=6)
    assert exact.error(out, exact.attention(q, k, v, batch, 0.25)) < EPSILON[torch.float32]


@pytest.mark.parametrize("splits", [1, 4])
def test_sequences_without_queries_and_padding_tokens_change_nothing(splits: int) -> None:
    """As in a recorded step, there are as many sequences as tokens: the first has three tokens, the second has one, and
    the others have none. The last token is padding.
    """
    batch = paged_batch([70, 9], [3, 1], 16)
    k, v = random_cache(batch, 16, 1, 16, torch.float32)
    q = torch.randn(5, 2, 16)
    tables = torch.nn.functional.pad(batch.block_tables, (0, 0, 0, 3))
    starts = torch.tensor([0, 3, 4, 4, 4, 4], dtype=torch.int32)
    lens = torch.tensor([70, 9, 0, 0, 0], dtype=torch.int32)
    out = operations.paged_attention(
        q, k, v, tables, starts, lens, 0.25, num_shares=splits, num_tile_splits=splits, max_queries=5
    )
    assert exact.error(out[:4], exact.attention(q[:4], k, v, batch, 0.25)) < EPSILON[torch.float32]


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "context", "is_batch_invariant", "grid"),
    [
        (50, 1, 16000, False, (2, 8, 16)),
        (64, 8, 16000, False, (10, 8, 8)),  # a recorded step with up to 8 sequences
        (32, 8, 16000, False, (9, 8, 9)),  # a recorded step that verifies drafts
        (64, 8, 128, False, (10, 8, 2)),  # at most one split per tile of keys
        (64, 8, 32, False, (10, 8, 1)),
        (128, 64, 16000, False, (68, 8, 1)),  # the tiles of up to 64 sequences already occupy the device
        (512, 1, 16000, False, (17, 8, 2)),
        (513, 1, 16000, False, (17, 8, 1)),
        (50, 1, 16000, True, (4, 8, 1)),
    ],
)
def test_tiles_of_few_queries_are_split_to_fill_the_device(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_rows: int,
    context: int,
    is_batch_invariant: bool,
    grid: tuple[int, int, int],
) -> None:
    """There are 8 KV heads and 132 processors; a tile holds 32 queries, or 16 if batch-invariant."""

    class Launches:
        def __init__(self) -> None:
            self.grids: list[tuple[int, ...]] = []

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            self.grids.append(grid)
            return lambda *_, **__: None

    launches = {name: Launches() for name in ("attend", "combine", "decode")}
    for name, fake in launches.items():
        monkeypatch.setattr(attention, name, fake)
    monkeypatch.setattr(attention, "num_processors", lambda device: 132)
    cache = torch.zeros(1, 16, 8, 128, dtype=torch.float16)
    operations.paged_attention(
        torch.zeros(num_tokens, 32, 128, dtype=torch.float16),
        cache,
        cache,
        torch.zeros(num_rows, context // 16, dtype=torch.int32),
        torch.zeros(num_rows + 1, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        1.0,
        is_batch_invariant=is_batch_invariant,
        max_queries=num_tokens,
    )
    assert launches["attend"].grids[-1] == grid
    # The splits are combined by one program per token and head.
    combined = [(num_tokens, 32)] if grid[2] > 1 else []
    assert [one for one in launches["combine"].grids if one[0] == num_tokens] == combined


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_attention_over_a_quantized_cache(dtype: torch.dtype) -> None:
    lengths, dim = [37, 5, 20], 24
    whole = paged_batch(lengths, lengths, 4)
    k, v = torch.randn(2, sum(lengths), 2, dim).unbind()
    k_cache, v_cache = torch.zeros(2, whole.num_blocks, 4, 2, dim).to(dtype).unbind()
    scales = KvScales(*torch.zeros(2, whole.num_blocks, 4, 2).unbind())
    operations.store_kv(k, v, k_cache, v_cache, whole.slot_mapping, scales=scales)
    batch = PagedBatch(
        query_starts=torch.tensor([0, 1, 6, 7], dtype=torch.int32),
        context_lens=whole.context_lens,
        block_tables=whole.block_tables,
        slot_mapping=whole.slot_mapping,
        positions=whole.positions,
        num_blocks=whole.num_blocks,
    )
    q = torch.randn(7, 4, dim)
    tables = (batch.block_tables, batch.query_starts, batch.context_lens)
    out = operations.paged_attention(q, k_cache, v_cache, *tables, 0.2, scales=scales)
    keys, values = k_cache.float() * scales.keys[..., None], v_cache.float() * scales.values[..., None]
    assert exact.error(out, exact.attention(q, keys, values, batch, 0.2)) < EPSILON[torch.float32]


@pytest.mark.parametrize(("longest", "keys"), [(100, 512), (16384, 512), (16385, 1024), (131072, 4096)])
def test_segments_of_the_longest_sequence_are_at_most_32(longest: int, keys: int) -> None:
    assert operations.segment_keys_for(longest) == keys


def test_batch_invariant_decoding_leaves_empty_splits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch([70, 9], [1, 1], 16)
    k, v = random_cache(batch, 16, 1, 16, torch.float32)
    q = torch.randn(3, 2, 16)
    # The third row is padding. Tables are 8 segments wide; the first row fills two segments and the second row one.
    tables = torch.nn.functional.pad(batch.block_tables, (0, 32 - batch.block_tables.shape[1], 0, 1))
    starts, lens = torch.arange(4, dtype=torch.int32), torch.tensor([70, 9, 0], dtype=torch.int32)
    empty = torch.empty
    made: list[Tensor] = []

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1].fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)
    out = operations.paged_attention(q, k, v, tables, starts, lens, 0.25, is_batch_invariant=True, segment_keys=64)
    assert exact.error(out[:2], exact.attention(q[:2], k, v, batch, 0.25)) < EPSILON[torch.float32]
    assert not out[2].any()
    state = made[2]
    assert (~state.isnan().any(dim=-1)).sum(dim=-1).tolist() == [[2, 2], [1, 1], [0, 0]]


@pytest.mark.usefixtures("dots_row_by_row")
@pytest.mark.parametrize("window", [None, 50])
def test_batch_invariant_bits_depend_on_the_query_alone(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    # There are enough processors to split the keys of few queries, which must not happen here.
    monkeypatch.setattr(attention, "num_processors", lambda device: 132)
    lengths, dim, scale = [150, 9], 16, 0.25
    whole = paged_batch(lengths, lengths, 16)
    k, v = random_cache(whole, 16, 1, dim, torch.float32)
    q = torch.randn(sum(lengths), 3, dim)

    # Three segments are sufficient, and keep the test fast.
    def attend_invariantly(rows: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
        return operations.paged_attention(
            rows, k, v, tables, starts, lens, scale, window, is_batch_invariant=True, segment_keys=64
        )

    def run(i: int, begin: int, end: int, spare_blocks: int) -> Tensor:
        first = int(whole.query_starts[i])
        table = torch.nn.functional.pad(whole.block_tables[i : i + 1], (0, spare_blocks))
        starts, lens = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        rows = q[first + begin : first + end]
        return attend_invariantly(rows, table, starts, lens)

    together = attend_invariantly(q, whole.block_tables, whole.query_starts, whole.context_lens)
    assert exact.error(together, exact.attention(q, k, v, whole, scale, window)) < EPSILON[torch.float32]
    for i, begin, end, spare_blocks in [
        (0, 149, 150, 0),
        (0, 149, 150, 9),
        (0, 130, 150, 0),
        (0, 63, 64, 4),
        (1, 2, 9, 0),
    ]:
        first = int(whole.query_starts[i])
        assert torch.equal(run(i, begin, end, spare_blocks), together[first + begin : first + end])
