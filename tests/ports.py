"""Loopback ports for processes that tests start and restart."""

from __future__ import annotations

import os
import random

from midstream.cli.topology import is_free_port

# The ports are below 32,768, where the kernel's ports for outgoing connections begin: an outgoing connection might take
# such a port before a process listens on it, or while the process restarts. Each process of a test run has its own
# range.
_SLICE = 1_000
_FIRST = 20_000 + _SLICE * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12)
_next = random.randrange(_SLICE)


def free_port() -> int:
    """Return a port that nothing listens on and that this process has not returned recently."""
    global _next
    for _ in range(_SLICE):
        _next = (_next + 1) % _SLICE
        if is_free_port(_FIRST + _next):
            return _FIRST + _next
    raise RuntimeError(f"all ports from {_FIRST} to {_FIRST + _SLICE - 1} are in use")


def free_ports(count: int) -> list[int]:
    """Return several ports, each as from `free_port`."""
    return [free_port() for _ in range(count)]
