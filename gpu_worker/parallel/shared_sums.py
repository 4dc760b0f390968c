"""Sums over the ranks of one host through memory that they share.

Each rank writes its numbers to its own buffer and then increments a counter. Once all counters have been incremented,
every rank adds all buffers in the order of the ranks, so that all ranks get the same bits. gloo takes about a
millisecond for such a sum, mostly to wake its threads, and a step has two sums per layer.

Each rank alternates between two buffers. It begins a sum only when it has finished the previous one; once it has seen
all counters of a sum, no rank reads the other set of buffers any more.

This requires that stores become visible in program order, which only x86-64 guarantees; on other processors the ranks
use gloo.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import secrets
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from midstream.errors import UnavailableError

logger = logging.getLogger(__name__)

_KEY_BYTES = 16
# The key and the counter of each rank each have their own cache line; the numbers follow.
_LINE = 64
_DATA_START = 4096
MAX_RANKS = _DATA_START // _LINE - 1
# How many numbers are added in one operation.
PIECE = 1 << 16
# How often a rank polls another rank's counter before it yields its processor, and how often it yields before it
# sleeps.
_SPINS = 200
_YIELDS = 50
_SLEEP_S = 5e-5


class SharedSums:
    """One rank's access to the shared memory."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        """Use memory made by `make_memory`.

        Args:
            timeout_s: Maximum time to wait for another rank.
        """
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(size) if other != rank]
        counters = memoryview(memory)[_LINE:_DATA_START].cast("Q")
        self._counters = counters[:: _LINE // counters.itemsize]
        count = 2 * size * PIECE
        numbers = torch.frombuffer(memory, dtype=torch.float32, offset=_DATA_START, count=count)
        self._places = numbers.view(2, size, PIECE)
        self._turn = 0

    def sum(self, x: Tensor) -> Tensor:
        """Replace x, contiguous float32, by the sum over all ranks, added in rank order, and return x. Raises
        UnavailableError if another rank did not take part in time.
        """
        for piece in torch.split(x.view(-1), PIECE):
            self._sum(piece)
        return x

    def _sum(self, x: Tensor) -> None:
        self._turn += 1
        places = self._places[self._turn % 2, :, : len(x)]
        places[self._rank].copy_(x)
        self._counters[self._rank] = self._turn
        for other in self._others:
            if self._counters[other] < self._turn:
                self._wait(other)
        torch.add(places[0], places[1], out=x)
        for part in places[2:]:
            x += part

    def _wait(self, other: int) -> None:
        counters, turn = self._counters, self._turn
        deadline = time.monotonic() + self._timeout_s
        num_yields = 0
        while True:
            for _ in range(_SPINS):
                if counters[other] >= turn:
                    return
            # Other threads of this process need the interpreter, for example the one that detects the death of a rank.
            time.sleep(0.0 if num_yields < _YIELDS else _SLEEP_S)
            num_yields += 1
            if time.monotonic() > deadline:
                raise UnavailableError(f"rank {other} of the stage did not take part in a sum in time")


def make_memory(size: int) -> tuple[mmap.mmap, int, bytes]:
    """Return memory for `size` ranks, its file descriptor, and a key that is stored in it.

    The memory has no name, so that a killed process leaves nothing behind.
    """
    handle = os.memfd_create("midstream-sums")
    os.ftruncate(handle, _DATA_START + 2 * size * PIECE * 4)
    memory = mmap.mmap(handle, 0)
    key = secrets.token_bytes(_KEY_BYTES)
    memory[:_KEY_BYTES] = key
    return memory, handle, key


def open_memory(pid: int, handle: int, key: bytes) -> mmap.mmap | None:
    """Open the memory of another process of this user; return None if that process is not on this host."""
    try:
        with Path(f"/proc/{pid}/fd/{handle}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    return memory if memory[:_KEY_BYTES] == key else None


def can_share(size: int) -> bool:
    """Return whether the ranks of this machine can sum through shared memory."""
    return 1 < size <= MAX_RANKS and platform.machine() == "x86_64"


def offer_memory(store: Store, name: str, size: int) -> tuple[mmap.mmap, int] | None:
    """Create memory and publish it under `name`; return it and its descriptor, which is closed once the others
    have it. Return None, and tell the others, if there is no memory.
    """
    try:
        memory, handle, key = make_memory(size)
    except OSError as error:
        logger.warning("shared memory for sums cannot be allocated: %s", error)
        store.set(name, "none")
        return None
    store.set(name, f"{os.getpid()} {handle} {key.hex()}")
    return memory, handle


def find_memory(store: Store, name: str) -> mmap.mmap | None:
    """Return the memory published under `name`; None if there is none, or if it is on another host."""
    offer = store.get(name).decode()
    if offer == "none":
        return None
    pid, handle, key = offer.split()
    return open_memory(int(pid), int(handle), bytes.fromhex(key))
