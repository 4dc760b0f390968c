"""Steps and all-reduces of a worker group of two tensor-parallel ranks, each with its own GPU.

This process is rank 0, and it starts rank 1. A machine with one GPU cannot measure this. Without a GPU, two ranks on
CPUs run at tiny sizes over gloo, only to test that they run.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.gpu.model import TOKENS_PER_BLOCK, random_decoder, random_folder
from benchmarks.gpu.report import Report
from benchmarks.gpu.steps import Bench, Sizes, limit_s, settings_of, sizes
from benchmarks.gpu.timing import graph_seconds
from gpu_worker.models.loader import LoadedModel, use_device
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of
from midstream.config import WorkerConfig

if TYPE_CHECKING:
    from gpu_worker.parallel.communicator import RankCommunicator
    from gpu_worker.parallel.group import RankGroup

_HOST = "127.0.0.1"
_NUM_RANKS = 2
# Sizes of all-reduces, in rows of the hidden size: a decode step, the largest one-shot all-reduce of an 8B model, and a
# larger one.
_SUM_ROWS = (1, 32, 64)
_REPEATS = 20
_END_S = 20.0


def measure_ranks(report: Report) -> None:
    """Measure all-reduces of two ranks, and their decode steps relative to the limit of two devices."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        report.note("two tensor-parallel ranks", "not measured: they need two GPUs, and this machine has one")
        return
    with socket.create_server((_HOST, 0)) as server:
        port = server.getsockname()[1]
    # A process that uses CUDA cannot be forked; on a CPU, forking saves the time of importing everything again.
    context = multiprocessing.get_context("spawn") if num_gpus else multiprocessing.get_context("fork")
    other = context.Process(target=_run_rank_1, args=(port,), daemon=True)
    other.start()
    size, config = sizes(), _config()
    group, model = _join(size, config, 0, port)
    for num_bytes, ours_s, library_s in _sum_seconds(group.communicator, size):
        name = f"sum of {num_bytes} bytes over two ranks"
        report.note(name, f"{ours_s * 1e6:.1f} µs in a step, {library_s * 1e6:.1f} µs by {dist.get_backend()}")
    is_shared = group.communicator._one_shot is not None or group.communicator._shared is not None
    report.note("small sums of two ranks", "through shared memory" if is_shared else f"by {dist.get_backend()}")
    _measure_steps(report, size, config, group, model)
    other.join(_END_S)


def _measure_steps(report: Report, size: Sizes, config: WorkerConfig, group: RankGroup, model: LoadedModel) -> None:
    from gpu_worker.model_runner import ModelRunner

    runner = ModelRunner(config, random_folder(size.config), model, group.leader)
    bench = Bench(size, config.max_batch_size, config.max_sequence_length, runner)
    for batch_size in _batches(size):
        bench.start(batch_size, size.context)
        took = bench.decode_seconds()
        # Each rank has half of the matrices and half of the KV heads.
        least_s = limit_s(report, size, batch_size, batch_size * (size.context + size.num_steps)) / _NUM_RANKS
        name = f"fraction of the limit: greedy decode on two ranks, batch {batch_size}, context {size.context}"
        report.share(name, least_s / took, None, f" ({took * 1e3:.2f} ms)")
        bench.start(batch_size, size.context)
        in_turn = bench.in_turn_seconds()
        name = f"overhead of finishing each step before the next: two ranks, batch {batch_size}"
        report.surplus(name, in_turn / took - 1, None, f" ({in_turn * 1e3:.2f} ms)")
    runner.close()
    group.stop(exit_code=0)


def _run_rank_1(port: int) -> None:
    from gpu_worker.parallel.follower import RankExecutor
    from protos import ranks_pb2

    size, config = sizes(), _config()
    group, model = _join(size, config, 1, port)
    _sum_seconds(group.communicator, size)
    executor = RankExecutor(config, random_folder(size.config), group, model)
    while not (command := ranks_pb2.RankCommand.FromString(group.receive())).HasField("stop"):
        executor.execute(command)
    executor.close()
    group.close()


def _batches(size: Sizes) -> list[int]:
    return sorted({min(size.batches), sorted(size.batches)[-2]})


def _config() -> WorkerConfig:
    """Return the settings of both ranks."""
    size = sizes()
    settings = settings_of(size, max(_batches(size)), size.context + 2 * size.num_steps)
    return WorkerConfig(
        device=size.device.type,
        tensor_parallel=_NUM_RANKS,
        tokens_per_block=TOKENS_PER_BLOCK,
        run_ahead="on",
        **settings,
    )


def _join(size: Sizes, config: WorkerConfig, rank: int, port: int) -> tuple[RankGroup, LoadedModel]:
    """Join the group as this rank, and create its shard of the model."""
    from gpu_worker.parallel.group import RankGroup

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(_NUM_RANKS),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }
    ranks = Ranks.from_environment(config, os.environ)
    device = use_device(config, ranks)
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    group = RankGroup(config, random_folder(size.config), ranks, device)
    shard = shard_of(size.description, ranks)
    decoder = random_decoder(size.config, device, size.dtype, shard, group.communicator)
    return group, LoadedModel(size.description, decoder, device, size.dtype, size.dtype, divided=shard)


@torch.inference_mode()
def _sum_seconds(communicator: RankCommunicator, size: Sizes) -> list[tuple[int, float, float]]:
    """Return the size in bytes of each all-reduce, its time as performed in a step, and its time with
    torch.distributed. Both ranks must call this at the same time.
    """
    measure = graph_seconds if communicator.device.type == "cuda" else _wall_seconds
    found = []
    for rows in _SUM_ROWS:
        x = torch.zeros(rows, size.description.hidden_size, dtype=size.dtype, device=communicator.device)
        ours_s, library_s = (
            measure(functools.partial(run, x), _REPEATS) for run in (communicator.sum, dist.all_reduce)
        )
        found.append((x.nbytes, ours_s, library_s))
    return found


def _wall_seconds(run: Callable[[], object], repeats: int) -> float:
    walls = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        walls.append(time.perf_counter() - started)
    return statistics.median(walls)
