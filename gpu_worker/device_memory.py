"""How much of a device's memory the KV pool may take: what steps and CUDA graphs need is measured first.

The allocator hands its cached memory back whenever a graph is recorded, so what is free after a warm-up says nothing
of what steps will need again. Both are measured over a small pool, and kept free when the real one is taken.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import cuda

from gpu_worker.kv.cache import KvCache, free_memory_bytes


class WarmUpMemory:
    """Measures from when the pools of the warm-up are there until they are dropped. On a CPU it measures nothing.

    Attributes:
        step_bytes: That the allocator took at most for steps, fragmentation included.
        graph_bytes: That recorded graphs take.
    """

    def __init__(self, device: torch.device, pools: Sequence[KvCache]) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._pool_bytes = sum(pool.keys.nbytes + pool.values.nbytes for pool in pools)
        self.step_bytes = self.graph_bytes = 0
        if self._is_cuda:
            _empty_cache(device)
            cuda.reset_peak_memory_stats(device)
            self._reserved = cuda.memory_reserved(device)

    def end_steps(self) -> None:
        """Take note of what the steps since the beginning needed."""
        if self._is_cuda:
            self.step_bytes = max(self.step_bytes, cuda.max_memory_reserved(device=self._device) - self._reserved)

    def record(self, capture: Callable[[], None]) -> None:
        """Record graphs after the last step."""
        self.end_steps()
        if not self._is_cuda:
            capture()
            return
        _empty_cache(self._device)
        before = free_memory_bytes(self._device)
        capture()
        _empty_cache(self._device)
        self.graph_bytes = max(0, before - free_memory_bytes(self._device))

    def free_bytes(self) -> int:
        """Return what pools may take, once the graphs are dropped: the warm-up's own pools give theirs back."""
        if not self._is_cuda:
            return free_memory_bytes(self._device)
        _empty_cache(self._device)
        return free_memory_bytes(self._device) + self._pool_bytes - self.step_bytes - self.graph_bytes


def _empty_cache(device: torch.device) -> None:
    cuda.synchronize(device)
    gc.collect()
    cuda.empty_cache()
