"""Setting up one-shot sums across GPUs, with stand-ins for symmetric memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory as symmetric

from gpu_worker.parallel import communicator
from gpu_worker.parallel.communicator import RankCommunicator
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.symmetric_sums import NUM_BYTES, symmetric_sum

CPU = torch.device("cpu")
RANKS = Ranks(rank=1, world_size=2, tensor_size=2)
GROUP = cast("dist.ProcessGroup", object())


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Stand in for symmetric memory; return a list that receives the memory of another rank and of this rank when it is
    allocated.
    """
    made: list[Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.extend(torch.full((size,), 255, dtype=dtype) for _ in range(2))
        return made[1]

    def rendezvous(memory: Tensor, group: object) -> Any:
        assert group is GROUP
        return SimpleNamespace(buffer_ptrs=[each.data_ptr() for each in made])

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    return made


def test_shared_memory_is_cleared_and_used_for_small_sums(memories: list[Tensor]) -> None:
    made = symmetric_sum(RANKS, GROUP, torch.bfloat16, CPU)
    assert made is not None
    assert not memories[1].any()
    add = made[0]
    assert add._parts.tolist() == [memory.data_ptr() for memory in memories]
    assert (add._signals - add._parts).tolist() == [2 * NUM_BYTES] * 2
    # The memory has one signal, a turn number, for each block of 1,024 elements and each rank.
    assert len(memories[1]) == 2 * NUM_BYTES + NUM_BYTES // 2 // 1024 * 2 * 4
    assert len(add._turns) == NUM_BYTES // 2 // 1024
    assert add.takes(torch.empty(32, 4096, dtype=torch.bfloat16))
    assert not add.takes(torch.empty(33, 4096, dtype=torch.bfloat16))
    assert not add.takes(torch.empty(1, 4096))


@pytest.mark.usefixtures("memories")
@pytest.mark.parametrize("num_agreed", [0, 1])
def test_shared_sums_are_used_only_if_all_ranks_support_them(monkeypatch: pytest.MonkeyPatch, num_agreed: int) -> None:
    """A rank that failed earlier does not join the rendezvous, so the others must not wait for it there."""
    answers, num_met = iter([1] * num_agreed + [0]), 0
    rendezvous = symmetric.rendezvous

    def meet(memory: Tensor, group: Any) -> Any:
        nonlocal num_met
        num_met += 1
        return rendezvous(memory, group)

    monkeypatch.setattr(symmetric, "rendezvous", meet)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: x.fill_(next(answers)))
    assert symmetric_sum(RANKS, GROUP, torch.bfloat16, CPU) is None
    assert num_met == num_agreed


def test_a_rank_without_memory_says_so_before_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(symmetric, "empty", refuse)
    monkeypatch.setattr(symmetric, "rendezvous", lambda *_: pytest.fail("joined the rendezvous"))
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: said.append(int(x)))
    assert symmetric_sum(RANKS, GROUP, torch.bfloat16, CPU) is None
    assert said == [0]


@pytest.mark.usefixtures("memories")
def test_a_gpu_without_peers_leaves_sums_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(symmetric, "rendezvous", refuse)
    assert symmetric_sum(RANKS, GROUP, torch.bfloat16, CPU) is None


class Journal:
    """Stands in for the collective operations of a rank on a GPU, and records them."""

    def __init__(self, patch: pytest.MonkeyPatch, *, has_one_shot: bool) -> None:
        self.calls: list[object] = []
        self.has_one_shot = has_one_shot
        patch.setattr(dist, "init_process_group", lambda backend, **_: self.calls.append(backend))
        patch.setattr(dist, "new_group", lambda ranks, timeout: GROUP)
        patch.setattr(dist, "all_reduce", lambda x, group: self.calls.append(("all-reduce", x.numel())))
        patch.setattr(communicator, "symmetric_sum", self._symmetric_sum)

    def _symmetric_sum(self, *arguments: Any) -> tuple[Any, object] | None:
        self.calls.append(arguments)
        return (self, None) if self.has_one_shot else None

    def takes(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16 and x.nbytes <= NUM_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(("one-shot", x.numel()))
        return x


@pytest.mark.parametrize("has_one_shot", [True, False])
def test_gpus_sum_small_tensors_at_once_and_others_through_nccl(
    monkeypatch: pytest.MonkeyPatch, has_one_shot: bool
) -> None:
    journal, device = Journal(monkeypatch, has_one_shot=has_one_shot), torch.device("cuda:1")
    made = RankCommunicator(RANKS, device, HashStore(), is_ordered=True)
    with FakeTensorMode():
        sizes = [((4, 4096), torch.bfloat16), ((33, 4096), torch.bfloat16), ((1, 8), torch.float32)]
        for size, dtype in [*sizes, sizes[0]]:
            x = torch.empty(size, dtype=dtype, device=device)
            assert made.sum(x) is x
    small = "one-shot" if has_one_shot else "all-reduce"
    assert journal.calls == [
        "nccl",
        (RANKS, GROUP, torch.bfloat16, device),
        (small, 4 * 4096),
        ("all-reduce", 33 * 4096),
        ("all-reduce", 8),
        (small, 4 * 4096),
    ]


def test_sums_of_several_ranks_have_the_order_of_the_ranks_if_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, 1 + 1 + 2048 is 2050 if added from left to right, and 2048 in another order."""
    journal = Journal(monkeypatch, has_one_shot=False)

    def gather(parts: list[Tensor], x: Tensor, group: object) -> None:
        for part, value in zip(parts, (1, 1, 2048), strict=True):
            part.fill_(value)

    monkeypatch.setattr(dist, "all_gather", gather)
    ranks = Ranks(rank=1, world_size=3, tensor_size=3)
    for is_ordered, found in ((True, 2050), (False, 1)):
        made = RankCommunicator(ranks, torch.device("cuda:1"), HashStore(), is_ordered=is_ordered)
        assert made.sum(torch.ones(2, dtype=torch.float16)).tolist() == [found, found]
    assert journal.calls == ["nccl", "nccl", ("all-reduce", 2)]
