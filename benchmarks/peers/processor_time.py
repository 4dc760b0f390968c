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
    """Seconds used so far by this process, its children that ended, all that carry its mark, and all of theirs.

    A process that gives itself a title writes over its environment, so that children are found by their parents too.
    """
    mark = f"{MARK}={os.getpid()}".encode()
    stats: dict[int, list[str]] = {}
    found = {os.getpid()}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                # The name before the fields may hold spaces and parentheses.
                stats[int(folder.name)] = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:  # it has ended, or is somebody else's
                continue
    while others := {pid for pid, fields in stats.items() if int(fields[1]) in found} - found:
        found |= others
    return sum(_seconds(stats[pid]) for pid in found if pid in stats)


def _seconds(stat: list[str]) -> float:
    """utime, stime and those of the children that ended."""
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
