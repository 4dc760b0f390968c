"""Graphs with collective operations are destroyed before the communicator of their ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

import kernels
from benchmarks.gpu.model import TINY, random_decoder, random_runner
from gpu_worker import cuda_graphs, limits
from gpu_worker.cuda_graphs import GraphDecoder
from gpu_worker.kv.cache import KvCache
from gpu_worker.models.families import describe
from gpu_worker.parallel import follower
from gpu_worker.parallel.group import RankGroup
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.sampling import draws, sampler
from gpu_worker.scheduler_link.link import Stopped
from gpu_worker.worker import Worker
from midstream.config import WorkerConfig
from midstream.model.folder import ModelFolder
from protos import ranks_pb2

CPU = torch.device("cpu")


class Graph:
    """A graph that contains operations of a communicator. It is part of a reference cycle, so only the garbage
    collector frees it.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self._run, self._self = run, self

    def replay(self) -> None:
        self._run()


class Communicator:
    """A stand-in for NCCL's communicator. NCCL hangs on exit while graphs with its operations exist; the stand-in
    raises an error instead, and also if the device might still use such graphs.
    """

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.num_recorded, self.is_idle, self.has_ended = 0, False, False

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        graph = Graph(run)
        self.graphs.add(graph)
        self.num_recorded += 1
        return graph.replay

    def wait_for_device(self, _: torch.device) -> None:
        self.is_idle = not self.graphs

    def destroy(self) -> None:
        assert not self.graphs, f"{len(self.graphs)} graphs still exist"
        assert self.is_idle, "the device may still use a graph"
        self.has_ended = True


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    made = Communicator()
    monkeypatch.setattr(limits, "recorder_for", lambda device: lambda: made.record)
    monkeypatch.setattr(cuda_graphs, "_wait_for", made.wait_for_device)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


def test_rank_0_releases_the_graphs_of_steps_and_draws(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "can_sample", lambda logits: True)
    for module in (draws, sampler):
        monkeypatch.setattr(module, "draw", lambda logits, *_, **__: logits.argmax(dim=1).int())
    decoder = random_decoder(TINY, CPU, torch.float32)
    runner = random_runner(TINY, decoder, CPU, runs_ahead=True, max_batch_size=2, max_num_tokens=8, max_kv_tokens=64)
    # There are two batch sizes, each with a graph for steps and two for draws, recorded in the warm-up and afterwards.
    assert communicator.num_recorded == 2 * 2 * 3
    with pytest.raises(AssertionError, match="graphs still exist"):
        communicator.destroy()
    worker: Any = object.__new__(Worker)
    worker._runner, worker._group = runner, Mock(stop=lambda exit_code: communicator.destroy())
    worker._link = worker._http = worker._loop = worker._notices = Mock()
    worker._sleep_level = 0
    worker._tracer, worker._hasher, worker._serve = None, None, lambda: Stopped(0, "it has drained")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("signal.set_wakeup_fd", lambda *_, **__: None)
    assert worker.run() == 0
    assert communicator.has_ended


class FakeGroup:
    """The group of a follower: rank 0 allocates a pool, records graphs, and ends."""

    def __init__(self, communicator: Communicator) -> None:
        self.ranks = Ranks(rank=1, world_size=2, tensor_size=2)
        self.communicator = self.monitor = SimpleNamespace(ranks=self.ranks, share_tokens=None)
        self.close = communicator.destroy
        self._commands: Iterator[ranks_pb2.RankCommand] = iter(
            (
                ranks_pb2.RankCommand(use_cache=ranks_pb2.UseCache(num_blocks=4)),
                ranks_pb2.RankCommand(record_graphs=ranks_pb2.RecordGraphs()),
                ranks_pb2.RankCommand(stop=ranks_pb2.StopRank(exit_code=3)),
            )
        )

    def receive(self) -> bytes:
        return next(self._commands).SerializeToString()


def test_a_follower_releases_its_graphs(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    description, decoder = describe(TINY), random_decoder(TINY, CPU, torch.float32)
    config = WorkerConfig(device="cpu", max_batch_size=2, max_num_tokens=8)
    graphs = GraphDecoder(
        decoder, CPU, max_batch_size=2, max_num_tokens=8, max_blocks=4, make_recorder=lambda: communicator.record
    )
    # The follower treats its own device as a GPU.
    model = SimpleNamespace(
        decoder=decoder,
        device=SimpleNamespace(type="cuda"),
        description=description,
        part=description,
        kv_dtype=torch.float32,
        is_encoder=False,
    )
    monkeypatch.setattr(follower, "load_model", lambda *_: model)
    monkeypatch.setattr(follower, "graph_decoder", lambda *_, share: graphs)
    monkeypatch.setattr(follower, "KvCache", lambda d, n, size, dtype, device: KvCache(d, n, size, dtype, CPU))
    monkeypatch.setattr(follower, "WarmUpMemory", lambda *_: SimpleNamespace(record=lambda capture: capture()))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    folder = cast("ModelFolder", SimpleNamespace(max_sequence_length=64))
    group = cast("RankGroup", FakeGroup(communicator))
    assert follower.follow(config, folder, group) == 3
    assert communicator.num_recorded == 2
    assert communicator.has_ended
