"""Sums across ranks through shared memory; here the ranks are threads.

tests/gpu_worker/test_parallel_ranks.py and tests/integration/test_parallel_service.py use processes, and kill one of
them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gpu_worker.parallel.shared_sums import (
    MAX_RANKS,
    PIECE,
    SharedSums,
    can_share,
    find_memory,
    make_memory,
    offer_memory,
    open_memory,
)
from midstream.errors import UnavailableError


def memory_for(size: int) -> mmap.mmap:
    memory, handle, _ = make_memory(size)
    os.close(handle)
    return memory


def on_all_ranks(size: int, run: Callable[[SharedSums, int], list[Tensor]]) -> list[list[Tensor]]:
    memory = memory_for(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: run(SharedSums(memory, rank, size, 30.0), rank), range(size)))


@settings(max_examples=10, derandomize=True)
@given(
    size=st.integers(2, 5),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 7, 576, PIECE])), min_size=1, max_size=6),
)
def test_every_rank_gets_the_bits_of_the_sum_in_rank_order(size: int, shapes: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    addends = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(size)]
    found = on_all_ranks(size, lambda sums, rank: [sums.sum(x.clone()) for x in addends[rank]])
    for number, _ in enumerate(shapes):
        expected = addends[0][number] + addends[1][number]
        for rank in range(2, size):
            expected += addends[rank][number]
        assert all(torch.equal(found[rank][number], expected) for rank in range(size))


def test_a_fast_rank_does_not_overwrite_data_that_a_slow_one_reads() -> None:
    counts = torch.arange(300, dtype=torch.float32)

    def run(sums: SharedSums, rank: int) -> list[Tensor]:
        return [sums.sum(torch.full((50,), float(count) * (rank + 1))) for count in counts]

    for results in on_all_ranks(3, run):
        assert torch.equal(torch.stack(results), (6 * counts)[:, None].expand(-1, 50))


def test_waiting_for_a_missing_rank_has_a_time_limit() -> None:
    memory = memory_for(2)
    first, second = (SharedSums(memory, rank, 2, 0.05) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.sum, torch.ones(3))
        assert first.sum(torch.ones(3)).tolist() == [2, 2, 2]
        other.result()
    with pytest.raises(UnavailableError, match="rank 1 of the stage did not take part"):
        first.sum(torch.ones(3))


def test_only_the_memory_with_the_right_key_is_used() -> None:
    memory, handle, key = make_memory(2)
    found = open_memory(os.getpid(), handle, key)
    assert found is not None
    found[5000] = 7
    assert memory[5000] == 7
    # In another container, the same process id and handle may refer to something else.
    assert open_memory(os.getpid(), handle, bytes(len(key))) is None
    os.close(handle)
    assert open_memory(os.getpid(), handle, key) is None


def test_a_rank_without_memory_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    offered = offer_memory(store, "first", 2)
    assert offered is not None
    assert find_memory(store, "first") is not None
    os.close(offered[1])

    def refuse(size: int) -> None:
        raise OSError("out of memory")

    monkeypatch.setattr("gpu_worker.parallel.shared_sums.make_memory", refuse)
    assert offer_memory(store, "second", 2) is None
    assert find_memory(store, "second") is None


def test_supported_machines_and_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [can_share(size) for size in (1, 2, MAX_RANKS, MAX_RANKS + 1)] == [False, True, True, False]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not can_share(2)
