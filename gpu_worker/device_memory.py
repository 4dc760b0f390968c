"""Measures how much device memory steps and CUDA graphs need, to size the KV pool.

The allocator returns its cached memory whenever a graph is recorded, so free memory after the warm-up does not show
what steps will need again. Both needs are measured with a small pool and reserved when the real pool is allocated.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import cuda

from gpu_worker.kv.cache import KvCache, free_memory_bytes


def empty_cache(device: torch.device) -> None:
    """Return the allocator's unused memory to a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        cuda.synchronize(device)
        gc.collect()
        cuda.empty_cache()


class WarmUpMemory:
    """Measures memory use while the warm-up's pools exist; does nothing on a CPU.

    Attributes:
        step_bytes: Peak memory that steps take from the allocator, including fragmentation.
        graph_bytes: Memory that recorded graphs take.
    """

    def __init__(self, device: torch.device, pools: Sequence[KvCache]) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._pool_bytes = sum(pool.num_bytes for pool in pools)
        self.step_bytes = self.graph_bytes = 0
        if self._is_cuda:
            empty_cache(device)
            cuda.reset_peak_memory_stats(device)
            self._reserved = cuda.memory_reserved(device)

    def end_steps(self) -> None:
        """Record the peak memory use of the steps that have run so far."""
        if self._is_cuda:
            self.step_bytes = max(self.step_bytes, cuda.max_memory_reserved(device=self._device) - self._reserved)

    def record(self, capture: Callable[[], None]) -> None:
        """Record graphs after the last step, and measure the memory that they use."""
        self.end_steps()
        if not self._is_cuda:
            capture()
            return
        empty_cache(self._device)
        before = free_memory_bytes(self._device)
        capture()
        empty_cache(self._device)
        self.graph_bytes = max(0, before - free_memory_bytes(self._device))

    def free_bytes(self) -> int:
        """Return the memory available for pools once the graphs and the warm-up's own pools have been dropped."""
        if not self._is_cuda:
            return free_memory_bytes(self._device)
        empty_cache(self._device)
        return free_memory_bytes(self._device) + self._pool_bytes - self.step_bytes - self.graph_bytes
