"""Placement of adapters in preallocated memory, and their use by graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.model import random_decoder
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.lora.adapter import Adapter, LoraPair
from gpu_worker.lora.arena import AdapterArena, PlacedAdapter
from gpu_worker.lora.inputs import AdapterTokens
from gpu_worker.models.families import describe
from midstream.errors import OverloadedError
from tests.gpu_worker.test_cuda_path import BLOCK, LENGTH, NUM_BLOCKS, TINY, TOKENS, step_inputs

CPU = torch.device("cpu")
HIDDEN = TINY["hidden_size"]
ONE_PAIR = 8 * 2 * HIDDEN  # elements of a pair of matrices with ranks up to 8, for the attention output layer


def adapter(value: float, rank: int, *, layer: int = 0) -> Adapter:
    """Return an adapter that adds value * rank * sum(x) to the attention output of one layer."""
    pair = LoraPair(torch.full((rank, HIDDEN), value), torch.ones(HIDDEN, rank), 1.0)
    return Adapter("", f"{value}", tuple({"o": pair} if i == layer else {} for i in range(2)))


def tokens(*placed: PlacedAdapter | None) -> AdapterTokens[PlacedAdapter]:
    """Return one token for each adapter."""
    used = tuple(dict.fromkeys(item for item in placed if item is not None))
    indices = [-1 if item is None else used.index(item) for item in placed]
    return AdapterTokens(tuple(map(str, range(len(used)))), used, torch.tensor(indices, dtype=torch.int32))


def added(arena: AdapterArena, *placed: PlacedAdapter | None, layer: int = 0) -> list[float]:
    y = torch.zeros(len(placed), HIDDEN)
    arena.add(arena.slots(tokens(*placed)), layer, "o", torch.ones(len(placed), HIDDEN) / HIDDEN, y)
    assert (y == y[:, :1]).all()
    return y[:, 0].tolist()


def test_adapters_are_compacted_if_free_space_is_fragmented() -> None:
    arena = AdapterArena(describe(TINY), 4 * ONE_PAIR * 4, 16, torch.float32, CPU)
    first, second, third, fourth = (arena.place(adapter(value, 2)) for value in (1.0, 2.0, 3.0, 4.0))
    assert added(arena, third, None, first, fourth) == pytest.approx([6, 0, 2, 8])
    assert added(arena, third, layer=1) == [0.0]
    with pytest.raises(OverloadedError):
        arena.place(adapter(5.0, 2))
    del first, third
    wide = arena.place(adapter(5.0, 16))  # as large as the two removed adapters together
    assert added(arena, wide, second, fourth) == pytest.approx([80, 4, 8])


def replays(run: Callable[[], object]) -> Callable[[], None]:
    def replay() -> None:
        run()

    return replay


def test_graphs_run_with_adapters() -> None:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    decoder.reserve_adapters(2 * ONE_PAIR * 4, 8)
    num_recorded = 0

    def record(run: Callable[[], object]) -> Callable[[], None]:
        nonlocal num_recorded
        num_recorded += 1
        return replays(run)

    graphs = GraphDecoder(
        decoder,
        CPU,
        max_batch_size=4,
        max_num_tokens=96,
        max_blocks=NUM_BLOCKS,
        make_recorder=lambda: record,
        takes_adapters=True,
    )
    graphs.use_cache(KvCache(describe(TINY), 3 * NUM_BLOCKS, BLOCK, torch.float32, CPU))
    one, other = (decoder.place_adapter(adapter(value, 3)) for value in (0.5, -0.25))
    graphs.forward(step_inputs(TOKENS[:, :-1], 0))
    inputs = step_inputs(TOKENS[:, -1:], LENGTH - 1)
    adapted = replace(inputs, adapters=tokens(other, None, one))
    plain, eager = graphs.forward(inputs), graphs.forward(adapted)
    graphs.capture()
    # There are batches of 1, 2 and 4 rows and mixed steps of 32 and 64 tokens, each with and without adapters.
    assert num_recorded == 10
    torch.testing.assert_close(graphs.forward(adapted), eager, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graphs.forward(inputs), plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(eager[1], plain[1])
    assert not torch.allclose(eager[0], plain[0], atol=1e-3)
