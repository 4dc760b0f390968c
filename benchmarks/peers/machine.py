"""Says what machine the figures are from."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

# What kernels choose by; the rest of /proc/cpuinfo's flags says little.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe_machine(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """One line: date, cores, processor, what it can do, memory."""
    fields: dict[str, str] = {}
    for line in cpu_info.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    features = ", ".join(it.replace("_", "-") for it in _FEATURES if it in flags) or "no vector extension known here"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    day = datetime.now(UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    return f"{day}: {cores} cores of {fields.get('model name', 'a processor')} ({features}), {memory_gib:.0f} GiB"
