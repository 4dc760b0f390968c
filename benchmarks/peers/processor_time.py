"""Processor time of a peer with all processes that it started, also those that have left it (a service's).

Other work on the machine makes a run longer, but hardly changes how long the processor worked for it: where nobody can
have the machine alone, this is what can be compared. Needs the standard library alone.
"""

from __future__ import annotations

import os
from pathlib import Path

MARK = "BENCHMARK_RUN"  # settings of ours begin with MIDSTREAM_, and an unknown one is refused


def mark_processes() -> None:
    """Lets every process that this one starts from now on, and theirs, carry a mark in its environment."""
    os.environ[MARK] = str(os.getpid())


def processor_seconds() -> float:
    """Seconds used so far by this process, its children that ended, and all that carry its mark."""
    times = os.times()
    used = times.user + times.system + times.children_user + times.children_system
    mark = f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    used += _seconds((folder / "stat").read_text(encoding="utf-8"))
            except OSError:  # it has ended, or is somebody else's
                continue
    return used


def _seconds(stat: str) -> float:
    """utime, stime and those of the children that ended; the name before them may hold spaces and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
