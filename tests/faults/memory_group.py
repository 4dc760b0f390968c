"""A memory control group, in which the kernel's out-of-memory killer ends a process."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_END_S = 10.0
_numbers = itertools.count()


class MemoryGroup:
    """A group of version 1 or 2."""

    def __init__(self, folder: Path, limit: str, usage: str) -> None:
        self._folder, self._limit, self._usage = folder, folder / limit, folder / usage

    def enter(self, pid: int) -> None:
        """Move a process into the group; memory that it has already is not counted."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def squeeze(self) -> None:
        """Forbid the group more memory than it has."""
        with contextlib.suppress(OSError):
            # With version 2, this ends the process. Version 1 only frees the memory that holds files, and refuses.
            self._limit.write_text(str(int(self._usage.read_text()) // 2))
        with contextlib.suppress(OSError):  # the process may have got more since
            self._limit.write_text(self._usage.read_text())


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Create a group; skip the test if that is not possible. At the end, its processes must have ended, and
    their children must do so soon.
    """
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in entries if "memory" in controllers.split(",")), None)
    if own is not None:
        parent, limit, usage = _ROOT / "memory" / own.lstrip("/"), "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        path = next((path for _, controllers, path in entries if not controllers), "/")
        parent, limit, usage = _ROOT / path.lstrip("/"), "memory.max", "memory.current"
    folder = parent / f"midstream-{os.getpid()}-{next(_numbers)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made: {error}")
    try:
        if not (folder / limit).exists():
            pytest.skip("the memory controller is not available to control groups of this process")
        yield MemoryGroup(folder, limit, usage)
    finally:
        deadline = time.monotonic() + _END_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        folder.rmdir()
