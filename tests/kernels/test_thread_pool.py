"""The kernels' thread pool, compiled separately: it is correct under ThreadSanitizer, and sleeps when idle."""

import subprocess
import threading
from pathlib import Path

import pytest
import torch

from kernels.build import SOURCES
from kernels.cpu import PackedLinear, ThreadPool, WeightFormat
from tests.kernels.libraries import library, runnable_builds


@pytest.mark.parametrize("flags", [("-fsanitize=thread", "-O1"), ("-O2",)], ids=["sanitized", "fast"])
def test_each_phase_sees_the_one_before(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = tmp_path / "thread_pool"
    sources = [Path(__file__).with_name("thread_pool_test.cpp"), SOURCES / "thread_pool.cpp"]
    command = ["g++", "-std=c++20", "-pthread", "-g1", *flags, f"-I{SOURCES}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr[-3000:]


def compute_seconds() -> float:
    """Return the CPU time of all kernel threads in this process."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "compute\n"]
    assert tasks
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_threads_without_work_sleep() -> None:
    kernels = library(runnable_builds[0])
    pool = ThreadPool(kernels, 2)
    linear = PackedLinear(kernels, [torch.randn(512, 512)], WeightFormat.F32)
    linear(torch.randn(64, 512), pool)
    before = compute_seconds()
    threading.Event().wait(0.3)
    assert compute_seconds() - before < 0.05
