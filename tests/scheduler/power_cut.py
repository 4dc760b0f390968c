"""A simulated disk that loses all or any part of the unsynced data at a power cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.journal import LostError
from scheduler.journal.log_folder import LogFolder


class PowerCut(BaseException):
    """The process dies in the middle of a file operation."""


@dataclass(slots=True)
class File:
    """The contents of a file on disk and in the page cache, and the writes that are not yet synced."""

    on_disk: bytearray = field(default_factory=bytearray)
    cached: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)


class Disk:
    """A disk with one folder of files.

    Attributes:
        operations_left: Number of operations until a PowerCut is raised; if negative, none is raised.
        meanwhile: Called during each operation; stands in for another process that runs at that time.
        epoch: Contents of the lock, which exists only in the kernel's memory.
    """

    def __init__(self) -> None:
        self.operations_left = -1
        self.meanwhile: Callable[[], None] = lambda: None
        self.epoch = 0
        self.names: dict[str, File] = {}
        self._names_on_disk: dict[str, File] = {}
        self._unsynced_names: list[dict[str, File | None]] = []

    def operate(self) -> None:
        """Count one operation, which may be interrupted by a power cut."""
        self.meanwhile()
        if self.operations_left == 0:
            self.operations_left = -1
            raise PowerCut
        self.operations_left -= self.operations_left > 0

    def change_names(self, changes: dict[str, File | None]) -> None:
        """Create, rename or delete files, as one operation."""
        self._unsynced_names.append(changes)
        _apply_names(self.names, changes)
        self.operate()

    def sync_names(self) -> None:
        self.operate()
        self._names_on_disk = dict(self.names)
        self._unsynced_names.clear()

    def cut(self, dice: random.Random) -> None:
        """Drop unsynced data, except for some of the renames and a prefix or middle part of each write."""
        names = self._names_on_disk
        for changes in self._unsynced_names:
            if dice.random() < 0.5:
                _apply_names(names, changes)
        self._unsynced_names.clear()
        self.names = dict(names)
        self.epoch = 0
        for file in {id(file): file for file in names.values()}.values():
            _lose(file, dice)


def _apply_names(names: dict[str, File], changes: dict[str, File | None]) -> None:
    for name, file in changes.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _lose(file: File, dice: random.Random) -> None:
    for offset, data in file.unsynced:
        first = dice.choice((0, dice.randint(0, len(data))))
        last = dice.choice((first, len(data), dice.randint(first, len(data))))
        kept = data[first:last]
        if kept:
            _write(file.on_disk, offset + first, kept)
    file.unsynced.clear()
    file.cached = bytearray(file.on_disk)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


class FolderOnDisk(LogFolder):
    """The disk as seen by one process. A killed process leaves everything that it has written to the next process."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(Path("/disk"))
        self._disk = disk
        self._open: dict[str, File] = {}
        self.is_locked = False

    def open(self) -> None:
        pass

    def names(self) -> list[str]:
        return sorted(self._disk.names)

    def read(self, name: str) -> bytes:
        return bytes(self._disk.names[name].cached)

    def create(self, name: str, num_bytes: int) -> int:
        file = self._open[name] = File()
        self._disk.change_names({name: file})
        self.write(name, bytes(num_bytes), 0)
        return num_bytes

    def write(self, name: str, data: bytes, offset: int) -> None:
        file, half = self._open[name], len(data) // 2
        file.unsynced.append((offset, data))
        _write(file.cached, offset, data[:half])
        self._disk.meanwhile()
        _write(file.cached, offset + half, data[half:])
        self._disk.operate()

    def write_again(self, name: str, data: bytes, offset: int) -> None:
        file = self._disk.names[name]
        assert file.cached[offset : offset + len(data)] == data
        self._disk.operate()
        file.on_disk = bytearray(file.cached)
        file.unsynced.clear()

    def sync(self, name: str) -> None:
        self._disk.operate()
        file = self._open[name]
        file.on_disk = bytearray(file.cached)
        file.unsynced.clear()

    def rename(self, name: str, new_name: str) -> None:
        if name in self._open:
            self._open[new_name] = self._open.pop(name)
        self._disk.change_names({name: None, new_name: self._disk.names[name]})

    def unlink(self, name: str) -> None:
        self._disk.change_names({name: None})

    def release(self, name: str) -> None:
        self._open.pop(name, None)

    def sync_names(self) -> None:
        self._disk.sync_names()

    def check(self, name: str, num_bytes: int) -> None:
        if name not in self._disk.names:
            raise LostError(name)

    def check_names(self, names: Sequence[str]) -> None:
        pass

    def __enter__(self) -> None:
        self.is_locked = True

    def __exit__(self, *_: object) -> None:
        self.is_locked = False
        self._disk.meanwhile()

    def epoch(self) -> int:
        self._disk.meanwhile()
        return self._disk.epoch

    def set_epoch(self, epoch: int) -> None:
        self._disk.epoch = epoch

    def close(self) -> None:
        pass
