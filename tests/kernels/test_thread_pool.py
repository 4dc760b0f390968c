"""The kernels' thread pool, compiled separately: it is correct under ThreadSanitizer, and sleeps when idle."""

import subprocess
import threading
from pathlib import Path

import pytest
import torch

from kernels.build import SOURCES
from kernels.cpu import DecoderDims, Embedding, Library, PackedLinear, ThreadPool, WeightFormat
from kernels.cpu.threads import StepThreads
from tests.kernels.libraries import library, runnable_builds
from tests.kernels.models import random_decoder
from tests.kernels.paged import paged_batch


@pytest.mark.parametrize("flags", [("-fsanitize=thread", "-O1"), ("-O2",)], ids=["sanitized", "fast"])
def test_each_phase_sees_the_one_before(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = tmp_path / "thread_pool"
    sources = [Path(__file__).with_name("thread_pool_test.cpp"), SOURCES / "thread_pool.cpp"]
    command = ["g++", "-std=c++20", "-pthread", "-g1", *flags, f"-I{SOURCES}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=400, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr[-3000:]


def tasks() -> set[Path]:
    """Return the folders of all threads of this process."""
    return set(Path("/proc/self/task").iterdir())


def pool_of_two(kernels: Library) -> tuple[ThreadPool, Path]:
    """Return a new pool and the folder of its second thread; the first is the caller's."""
    before = tasks()
    pool = ThreadPool(kernels, 2)
    (task,) = tasks() - before
    return pool, task


def compute_seconds(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def wait_until_asleep(task: Path) -> None:
    while (task / "stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass


def test_threads_without_work_sleep() -> None:
    kernels = library(runnable_builds[0])
    pool, task = pool_of_two(kernels)
    linear = PackedLinear(kernels, [torch.randn(512, 512)], WeightFormat.F32)
    linear(torch.randn(64, 512), pool)
    seconds = compute_seconds(task)
    threading.Event().wait(0.3)
    assert compute_seconds(task) - seconds < 0.05


def test_a_step_runs_on_the_chosen_number_of_threads_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is so large that two threads have work even for one token."""
    dims = DecoderDims(1024, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=2048, eps=1e-5, scale=0.125)
    decoder, batch = random_decoder(dims, 1), paged_batch([1], [1], block_size=16)
    step = (batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables)
    kernels = library(runnable_builds[0])
    pool, task = pool_of_two(kernels)
    caches = decoder.caches(batch.num_blocks, 16, torch.float32)
    native = decoder.native(runnable_builds[0], caches, pool=pool)
    token_ids, table = torch.zeros(1, dtype=torch.int32), Embedding(torch.randn(8, 1024), WeightFormat.F32, 1024)
    head = PackedLinear(kernels, [torch.randn(50, 1024)], WeightFormat.F32)

    def choose(num_threads: int) -> tuple[float, list[float]]:
        """Run 20 equal steps; return the second thread's computing time in seconds, and each step's highest logit."""
        monkeypatch.setattr(StepThreads, "number", lambda *_: num_threads)
        seconds = compute_seconds(task)
        chosen = [native.choose(token_ids, *step, token_ids, table, torch.ones(1024), head) for _ in range(20)]
        return compute_seconds(task) - seconds, [highest.item() for _, highest in chosen]

    choose(2)
    wait_until_asleep(task)
    seconds_of_one, one = choose(1)
    seconds_of_two, two = choose(2)
    assert seconds_of_one == 0 < seconds_of_two
    assert {*one} == {*two} == {one[0]}
