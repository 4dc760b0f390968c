"""Sleep of a worker: its model and its KV pool are given up, and built again from the same files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from midstream.errors import InvalidArgumentError
from midstream.model.folder import ModelFolder
from protos import worker_pb2

logger = logging.getLogger(__name__)

Facts = list[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class SleepOrdered:
    """The worker is to sleep at this level, or to be awake (0); see SetSleep."""

    level: int


def facts_of(folder: ModelFolder) -> Facts:
    """Return what changes if anyone changes the files from which a model is loaded."""
    found: Facts = []
    for file in files_of(folder):
        status = file.stat()
        found.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found


def files_of(folder: ModelFolder) -> list[Path]:
    """Return the files that decide what a model computes."""
    return [folder.path / "config.json", *folder.weight_files]


def refuse_changed(folder: ModelFolder, known: Facts) -> None:
    """Raise InvalidArgumentError if files of a folder have changed."""
    if facts_of(folder) != known:
        raise InvalidArgumentError(f"files in {folder.path} have changed since the weights were loaded", field="path")


def return_memory() -> None:
    """Return memory that nothing refers to any more to the system."""
    gc.collect()  # the model may be part of reference cycles
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def advise(files: Sequence[Path], level: int) -> None:
    """Let the system keep files in its page cache (level 1), or drop them from it (level 2)."""
    advice = os.POSIX_FADV_DONTNEED if level > 1 else os.POSIX_FADV_WILLNEED
    for file in files:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, advice)


def registration_asleep(register: worker_pb2.Register, level: int) -> worker_pb2.Register:
    """Return the registration of a worker that sleeps, made from the one with which it was awake."""
    asleep = worker_pb2.Register()
    asleep.CopyFrom(register)
    asleep.sleep_level = level
    for field in ("kept_blocks", "kept_hashes", "stored_hashes", "kv_store", "tier_store", "kv_source"):
        asleep.ClearField(field)
    return asleep
