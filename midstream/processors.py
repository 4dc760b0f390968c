"""Determines how many compute threads this process can run without contention."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_ROOT = Path("/")


def num_compute_threads(root: Path = _ROOT, cpus: Collection[int] | None = None) -> int:
    """Return the number of cores that CPU affinity and the cgroup's quota allow this process, at least 1.

    The hardware threads of a core share its arithmetic units, so a core counts once. Slow cores of a hybrid processor
    count too, since the kernels distribute work dynamically.

    Args:
        root: Directory that contains /proc and /sys.
        cpus: Logical processors on which this process may run; None means those in its affinity mask.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min([len(cores), *(int(quota) for quota in _quotas(root))]))


def _siblings(root: Path, cpu: int) -> str:
    """Return the logical processors that share a core with this one."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        if text := _read(folder / name):
            return text
    return str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """Yield the numbers of processors that this process's cgroup and its ancestors allow."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container, the path may be the host's, while only the container's own group is mounted.
        folder = mount / path.strip("/")
        for group in {mount, folder, *(it for it in folder.parents if mount in it.parents)}:
            text = _read(group / "cpu.max") if not controllers else _quota_of_version_1(group)
            quota, _, period = text.partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                yield int(quota) / int(period)


def _quota_of_version_1(group: Path) -> str:
    return f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
