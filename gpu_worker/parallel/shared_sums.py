"""Sums over the ranks of one host through memory that they share.

Each rank writes its numbers to its own place and says so by a counter; then each adds all places in the order of the
ranks, so that all get the same bits. gloo takes about a millisecond for the same, mostly to wake its threads, and a
step has two sums for each layer.

Places alternate between two sets: a rank begins a sum only when it has finished the last one, so when it has seen all
counters of a sum, nobody reads the other set any more.

Stores are seen in the order in which they were made on x86-64 only; elsewhere the ranks use gloo.
"""

from __future__ import annotations

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

_KEY_BYTES = 16
# The key and the ranks' counters each have a cache line of their own; the numbers follow.
_LINE = 64
_DATA_START = 4096
MAX_RANKS = _DATA_START // _LINE - 1
# Numbers that are added at a time.
PIECE = 1 << 16
# Looks at another rank's counter before its processor may do something else, and after how many of these it may sleep.
_SPINS = 200
_YIELDS = 50
_SLEEP_S = 5e-5


class SharedSums:
    """One rank's end of the memory."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        """Use memory made by `make_memory`.

        Args:
            memory: The memory.
            rank: This rank's number among those that share it.
            size: Number of these ranks.
            timeout_s: Longest wait for another rank.
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
        """Replace x, contiguous float32, by the sum over all ranks, added in their order, and return it.

        Raises:
            UnavailableError: Another rank did not take part in time.
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
            # Other threads of this process, such as the one that notices the death of a rank, need the interpreter.
            time.sleep(0.0 if num_yields < _YIELDS else _SLEEP_S)
            num_yields += 1
            if time.monotonic() > deadline:
                raise UnavailableError(f"rank {other} of the stage did not take part in a sum in time")


def make_memory(size: int) -> tuple[mmap.mmap, int, bytes]:
    """Return memory for `size` ranks, its file descriptor, and a key that is written in it.

    It has no name, so that a killed process leaves nothing behind.
    """
    handle = os.memfd_create("midstream-sums")
    os.ftruncate(handle, _DATA_START + 2 * size * PIECE * 4)
    memory = mmap.mmap(handle, 0)
    key = secrets.token_bytes(_KEY_BYTES)
    memory[:_KEY_BYTES] = key
    return memory, handle, key


def open_memory(pid: int, handle: int, key: bytes) -> mmap.mmap | None:
    """Return the memory of another process of this user; None if that process is not on this host."""
    try:
        with Path(f"/proc/{pid}/fd/{handle}").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    return memory if memory[:_KEY_BYTES] == key else None


def can_share(size: int) -> bool:
    """Return whether this machine's ranks can add through shared memory."""
    return 1 < size <= MAX_RANKS and platform.machine() == "x86_64"


def offer_memory(store: Store, name: str, size: int) -> tuple[mmap.mmap, int]:
    """Make memory and publish it under `name`; return it and its descriptor, to be closed once the others have it."""
    memory, handle, key = make_memory(size)
    store.set(name, f"{os.getpid()} {handle} {key.hex()}")
    return memory, handle


def find_memory(store: Store, name: str) -> mmap.mmap | None:
    """Return the memory published under `name`; None if it is on another host."""
    pid, handle, key = store.get(name).decode().split()
    return open_memory(int(pid), int(handle), bytes.fromhex(key))
