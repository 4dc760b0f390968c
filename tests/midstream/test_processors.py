import os
from pathlib import Path

import pytest

from midstream.processors import num_compute_threads


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="ascii")
    return root


def siblings(*lists: str) -> dict[str, str]:
    """Return the topology files of processors 0, 1, ... with these sibling lists."""
    return {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": text for i, text in enumerate(lists)}


SMT = siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")


@pytest.mark.parametrize(
    ("files", "cpus", "expected"),
    [
        ({}, range(3), 3),
        (SMT, range(8), 4),
        (SMT, [0, 4, 1], 2),
        (siblings("0-1", "0-1", "2", "3"), range(4), 3),  # hybrid: one fast core with two threads, and two slow cores
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, range(8), 8),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, range(8), 2),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, range(8), 3),
        ({"proc/self/cgroup": "0::/of/the/host", "sys/fs/cgroup/cpu.max": "400000 100000"}, range(8), 4),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, range(8), 1),
        (
            {
                "proc/self/cgroup": "7:memory:/x\n3:cpu,cpuacct:/x\n0::/",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            range(8),
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            range(8),
            8,
        ),
        ({**SMT, "proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "600000 100000"}, range(8), 4),
    ],
)
def test_cores_count_once_and_quotas_bound_them(
    tmp_path: Path, files: dict[str, str], cpus: list[int], expected: int
) -> None:
    assert num_compute_threads(machine(tmp_path, files), cpus) == expected


def test_this_machine() -> None:
    assert 1 <= num_compute_threads() <= len(os.sched_getaffinity(0))
