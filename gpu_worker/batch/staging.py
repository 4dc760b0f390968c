"""Copies small arrays between host and device without waiting for the device.

Both directions use pinned memory. On a CPU the same calls copy immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.step import IntArray

# Maximum number of steps in flight; each has its own pinned buffer.
_NUM_BUFFERS = 2


class PinnedBuffers:
    """Pinned host buffers for copies to the device, used round-robin."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate `size` int32 elements for each possible step in flight."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._tensors = [torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(_NUM_BUFFERS)]
        self._copied = [_event(device) for _ in range(_NUM_BUFFERS)]
        self._next = 0

    @property
    def size(self) -> int:
        """Number of int32 elements in each buffer."""
        return len(self._tensors[0])

    def next(self) -> Tensor:
        """Return the buffer whose copy was started longest ago, after waiting for that copy to complete."""
        self._next = (self._next + 1) % _NUM_BUFFERS
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()
        return self._tensors[self._next]

    def send(self, source: Tensor, target: Tensor) -> None:
        """Start copying a part of the buffer that the last call of `next` returned."""
        target.copy_(source, non_blocking=True)
        event = self._copied[self._next]
        if event is not None:
            event.record()

    def send_arrays(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Start one copy of all arrays, those with 8-byte elements first; return the arrays on the device."""
        words = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
        ends = np.cumsum([len(part) for part in words]).tolist()
        buffer = self.next()[: ends[-1]]
        np.concatenate(words, out=buffer.numpy())
        target = torch.empty(len(buffer), dtype=torch.int32, device=self._device)
        self.send(buffer, target)
        return [
            target[end - len(part) : end].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, part, end in zip(arrays, words, ends, strict=True)
        ]


class Copy:
    """An int32 tensor that is being copied to the host."""

    def __init__(self, values: Tensor, copied: torch.cuda.Event | None) -> None:
        self._values, self._copied = values, copied

    @property
    def is_done(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> IntArray:
        """Wait for the copy and return the values. This is the only call in a decode step that waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: IntArray = self._values.numpy().copy()
        return numbers


class Readback:
    """Pinned host buffers for copies from the device, used round-robin."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Allocate `size` int32 elements for each possible step in flight; more are allocated on demand."""
        self._device = device
        self._tensors = [self._empty(size) for _ in range(_NUM_BUFFERS + 1)]
        self._next = 0

    def start(self, values: Tensor) -> Copy:
        """Start copying the int32 `values`; the result must be read before the third call after this one."""
        self._next = (self._next + 1) % len(self._tensors)
        if len(values) > len(self._tensors[self._next]):
            self._tensors[self._next] = self._empty(2 * len(values))
        target = self._tensors[self._next][: len(values)]
        target.copy_(values, non_blocking=True)
        copied = _event(self._device)
        if copied is not None:
            copied.record()
        return Copy(target, copied)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event on which the host can sleep; None on a CPU, where calls are synchronous."""
    if device.type != "cuda":
        return None
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
