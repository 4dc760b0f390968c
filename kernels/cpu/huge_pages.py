"""Memory for weights on huge pages, if the system provides them.

A step reads every weight once, in order. With 4 KiB pages the processor's prefetching stops at each page boundary, and
each page costs a page table walk. Most matrices are smaller than a huge page, so several of them share a chunk.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 16 * _HUGE_PAGE
# Smaller tensors are allocated separately: otherwise one of them could keep a whole chunk allocated.
_LEAST_BYTES = 64 << 10
_ALIGNMENT = 64
_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # the rest of the newest chunk


def empty_bytes(num_bytes: int) -> Tensor:
    """Return uninitialized uint8 memory of this size. A chunk is freed with the last tensor in it."""
    global _free
    if num_bytes < _LEAST_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if size > len(_free):
            chunk = _new_chunk(max(size, _CHUNK_BYTES))
            if size >= _CHUNK_BYTES:
                return chunk[:num_bytes]
            _free = chunk
        taken, _free = _free[:num_bytes], _free[size:]
        return taken


def _new_chunk(num_bytes: int) -> Tensor:
    whole = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # This is only a hint: without huge pages the memory has ordinary pages.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % _HUGE_PAGE
    return chunk[start : start + whole]
