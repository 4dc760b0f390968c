"""Describe the machine on which the figures were measured."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
# Flags in /proc/cpuinfo that determine which kernels are used.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def cpu_flags(cpu_info: Path = CPU_INFO) -> set[str]:
    """Return the processor's vector features, named as in /proc/cpuinfo."""
    return set(_fields(cpu_info).get("flags", "").split())


def describe_machine(cpu_info: Path = CPU_INFO) -> str:
    """Return one line: date, cores, processor, features and memory."""
    fields, flags = _fields(cpu_info), cpu_flags(cpu_info)
    features = ", ".join(it.replace("_", "-") for it in _FEATURES if it in flags) or "no vector extension known here"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    day = datetime.now(UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    return f"{day}: {cores} cores of {fields.get('model name', 'a processor')} ({features}), {memory_gib:.0f} GiB"


def _fields(cpu_info: Path) -> dict[str, str]:
    """Return the fields of the first core in /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpu_info.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields
