"""Timing on a GPU, and the two limits that measurements are compared with."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_WARM_UPS = 3
# The launch of a graph takes longer than a small kernel.
_CALLS_IN_GRAPH = 5


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median device time of `run`, measured with events around each call."""
    for _ in range(_WARM_UPS):
        run()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]  # type: ignore[no-untyped-call]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    return statistics.median(milliseconds) / 1e3


def graph_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median device time of `run` as `seconds` does, but with several calls captured in a CUDA graph; needed
    for kernels that take less time than their launch.
    """
    for _ in range(_WARM_UPS):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_IN_GRAPH):
            run()
    return seconds(graph.replay, repeats) / _CALLS_IN_GRAPH


def copy_bandwidth() -> float:
    """Return the number of bytes per second that a large copy on the device reads and writes."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    """Return the floating-point operations per second of a large bf16 matrix product of random numbers."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out))
