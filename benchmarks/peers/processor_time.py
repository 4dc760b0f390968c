"""CPU time of a peer and of all processes that it started, including detached ones (those of a service).

Other work on the machine prolongs a run but hardly affects its CPU time, so CPU times can be compared on a shared
machine. Uses only the standard library.
"""

from __future__ import annotations

import os
from pathlib import Path

MARK = "BENCHMARK_RUN"  # our settings begin with MIDSTREAM_, and unknown settings are rejected


def mark_processes() -> None:
    """Mark the environment of all processes that this process and its children start from now on."""
    os.environ[MARK] = str(os.getpid())


def processor_seconds() -> float:
    """Return the CPU seconds used so far by this process, its ended children, all marked processes and their children.

    A process that sets its title overwrites its environment, so children are also found through their parents.
    """
    mark = f"{MARK}={os.getpid()}".encode()
    stats: dict[int, list[str]] = {}
    found = {os.getpid()}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                # The name, which precedes the fields, may contain spaces and parentheses.
                stats[int(folder.name)] = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
            except OSError:  # the process has ended, or belongs to another user
                continue
    while others := {pid for pid, fields in stats.items() if int(fields[1]) in found} - found:
        found |= others
    return sum(_seconds(stats[pid]) for pid in found if pid in stats)


def _seconds(stat: list[str]) -> float:
    """Return utime plus stime of a process and of its terminated children."""
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
