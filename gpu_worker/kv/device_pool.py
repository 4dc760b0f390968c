"""A KV pool in device memory, with copies of single blocks to the host and back.

Copies to the host have their own stream, so they run concurrently with steps. Copies to the device are queued after the
steps already launched, and before those that use the blocks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.kv.block_format import Bytes


class BlockPool(Protocol):
    """The blocks of a KV pool; threads read those with known contents while steps run."""

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """[num_blocks], content hash of each block; 0 means unknown."""

    def read(self, block: int, value: int) -> Bytes | None:
        """Return a copy of a block's contents; None if they do not match this hash."""

    def write(self, block: int, contents: Bytes) -> None:
        """Fill a block with contents returned by `read`; steps launched later see the new contents."""


class DevicePool:
    """Blocks in the memory of a device.

    A hash is recorded once the device has completed the step that filled its block, and cleared before a step that may
    change the block is launched.
    """

    def __init__(self, hashes: NDArray[np.uint64], parts: Sequence[Tensor]) -> None:
        """Wrap a pool.

        Args:
            hashes: [num_blocks], content hash of each block; 0 means unknown.
            parts: Tensors that hold the blocks, each [num_layers, num_blocks, ...]; empty ones are ignored.
        """
        self._hashes = hashes
        self._parts = [part.flatten(2).view(torch.uint8) for part in parts if part.numel()]
        device = self._parts[0].device
        self._is_cuda = device.type == "cuda"
        size = sum(part.shape[0] * part.shape[2] for part in self._parts)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # guards the host buffer, since several threads read blocks

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """[num_blocks], content hash of each block; 0 means unknown."""
        return self._hashes

    def read(self, block: int, value: int) -> Bytes | None:
        """Return a copy of a block's contents; None if they do not match this hash."""
        if int(self._hashes[block]) != value:
            return None
        stream = self._stream
        with self._lock, contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            for part, host in self._slices(block, self._host):
                host.copy_(part, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            contents: Bytes = self._host.numpy().copy()
        # An unchanged hash means that no step that may change the block was launched before the copy was complete.
        return contents if int(self._hashes[block]) == value else None

    @torch.inference_mode()
    def write(self, block: int, contents: Bytes) -> None:
        """Fill a block with contents returned by `read`; steps launched later see the new contents."""
        source = torch.from_numpy(contents)
        if self._is_cuda:
            source = source.pin_memory()  # so that the copy does not wait for steps in flight
        for part, host in self._slices(block, source):
            part.copy_(host, non_blocking=True)

    def _slices(self, block: int, contents: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a block and the bytes of its contents, both [num_layers, bytes of a layer]."""
        start = 0
        for part in self._parts:
            num_layers, _, size = part.shape
            yield part[:, block], contents[start : start + num_layers * size].view(num_layers, size)
            start += num_layers * size
