"""A disk, and the part of `os`, `fcntl` and `pathlib` with which a log accesses it.

What a process writes is in the page cache, where other processes see it, until it is synced. A killed process leaves
the page cache as it is. A power cut loses what is not synced: all of it or any part, torn at any byte, of the contents
as well as of the names.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

_FIRST_FD = 1_000


@dataclass(slots=True, eq=False)
class File:
    """A file.

    Attributes:
        content: Its contents as processes see them.
        on_disk: Its contents as they are after a power cut, at least.
        unsynced: Writes that are not synced: offsets and data.
        num_links: Number of its names.
        holder: The open file that has locked it.
        note: For whoever observes the disk.
    """

    number: int
    content: bytearray = field(default_factory=bytearray)
    on_disk: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)
    num_links: int = 1
    holder: int | None = None
    note: Any = None


@dataclass(slots=True, eq=False)
class Folder:
    """A folder, with its names as processes see them, as they are after a power cut, and the changes in between."""

    number: int
    names: dict[str, Node] = field(default_factory=dict)
    on_disk: dict[str, Node] = field(default_factory=dict)
    unsynced: list[dict[str, Node | None]] = field(default_factory=list)
    num_links: int = 1

    def change(self, changes: dict[str, Node | None]) -> None:
        """Create, rename or delete entries, as one operation."""
        for name in changes:
            before = self.names.get(name)
            if before is not None and before not in changes.values():
                before.num_links = 0
        self.unsynced.append(changes)
        _apply(self.names, changes)


Node = File | Folder


def _apply(names: dict[str, Node], changes: dict[str, Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass(slots=True)
class _Open:
    node: Node
    owner: object


class Disk:
    """The disk of one machine.

    Attributes:
        wait: Called with `write`, `names`, `sync` or `other` during each operation, to let other processes run or to
            end this one. A sync has no effect before it returns.
        owner: Returns the process that runs.
        num_bytes_left: Number of bytes that can still be allocated; None means that the disk is not full.
        failures_left: Number of the next operations that fail with an I/O error, by operation: `write` or `sync`.
        happened: Number of errors and losses of each kind.
        on_sync: Called after a file was synced.
    """

    def __init__(self, wait: Callable[[str], None], owner: Callable[[], object] = lambda: None) -> None:
        self.wait, self.owner = wait, owner
        self.num_bytes_left: int | None = None
        self.failures_left = Counter[str]()
        self.happened = Counter[str]()
        self.on_sync: Callable[[File], None] = lambda _: None
        self._inodes = itertools.count(1)
        self._fds = itertools.count(_FIRST_FD)
        self._opened: dict[int, _Open] = {}
        self.root = Folder(next(self._inodes))

    # Faults

    def cut_power(self, dice: random.Random) -> None:
        """Lose what is not synced."""
        self._opened.clear()
        before = self.happened["torn"]
        self._lose(self.root, dice)
        self.happened["torn"] = before + (self.happened["torn"] > before)

    def _lose(self, folder: Folder, dice: random.Random) -> None:
        for changes in folder.unsynced:
            if dice.random() < 0.5:
                _apply(folder.on_disk, changes)
        folder.unsynced.clear()
        folder.names = dict(folder.on_disk)
        for node in folder.names.values():
            node.num_links = 1
            if isinstance(node, Folder):
                self._lose(node, dice)
            else:
                self._lose_content(node, dice)

    def _lose_content(self, file: File, dice: random.Random) -> None:
        for offset, data in file.unsynced:
            first = dice.choice((0, dice.randint(0, len(data))))
            last = dice.choice((first, len(data), dice.randint(first, len(data))))
            self.happened["torn"] += 0 < last - first < len(data)
            if last > first:
                _write(file.on_disk, offset + first, data[first:last])
        file.unsynced.clear()
        file.content = bytearray(file.on_disk)
        file.holder = None

    def fill(self, num_bytes: int) -> None:
        """Let other programs use the disk, until only so many bytes are left."""
        self.num_bytes_left = num_bytes

    def free(self) -> None:
        """Free the space that other programs use."""
        self.num_bytes_left = None

    def spoil(self, file: File, offset: int) -> None:
        """Change a byte of a file, as a failing disk does."""
        for content in (file.content, file.on_disk):
            if offset < len(content):
                content[offset] ^= 0x55
        file.unsynced = [(start, data) for start, data in file.unsynced if not start <= offset < start + len(data)]

    def delete(self, path: str) -> None:
        """Delete the files of a folder, while they are in use."""
        folder = self._existing(path, Folder)
        for name in list(folder.names):
            folder.change({name: None})

    def files(self, path: object) -> dict[str, File]:
        """Return the files in a folder, by name and in this order; none if there is no folder."""
        folder = self.find(path)
        if not isinstance(folder, Folder):
            return {}
        return {name: node for name, node in sorted(folder.names.items()) if isinstance(node, File)}

    def died(self, owner: object) -> None:
        """Close the files of a dead process."""
        for fd in [fd for fd, item in self._opened.items() if item.owner is owner]:
            self._close(fd)

    # What processes call

    @property
    def os(self) -> Any:
        """Return what stands for the module `os`."""
        return SimpleNamespace(
            **{name: value for name, value in vars(os).items() if name.startswith("O_")},
            open=self.open,
            close=self.close,
            stat=self.stat,
            fstat=lambda fd: _status(self._node(fd)),
            pread=self.pread,
            pwrite=self.pwrite,
            posix_fallocate=self.posix_fallocate,
            ftruncate=self.ftruncate,
            fdatasync=self.sync,
            fsync=self.sync,
        )

    @property
    def fcntl(self) -> Any:
        """Return what stands for the module `fcntl`."""
        constants = {name: getattr(fcntl, name) for name in ("LOCK_EX", "LOCK_NB", "LOCK_UN")}
        return SimpleNamespace(**constants, flock=self.flock)

    def path_type(self) -> type[DiskPath]:
        """Return the class of the paths on this disk."""
        return type("PathOnThisDisk", (DiskPath,), {"disk": self, "__slots__": ()})

    def find(self, path: object) -> Node | None:
        """Return a file or folder; None if there is none of this name."""
        node: Node | None = self.root
        for part in PurePosixPath(str(path)).parts[1:]:
            node = node.names.get(part) if isinstance(node, Folder) else None
        return node

    def make_folder(self, path: PurePosixPath, *, parents: bool) -> None:
        parent = self.find(path.parent)
        if parent is None and parents:
            self.make_folder(path.parent, parents=True)
        self._change_names(path, {path.name: Folder(next(self._inodes))})

    def read(self, path: object) -> bytes:
        self.wait("other")
        return bytes(self._existing(path, File).content)

    def stat(self, path: object) -> Any:
        return _status(self._existing(path, File | Folder))

    def rename(self, path: PurePosixPath, target: PurePosixPath) -> None:
        assert path.parent == target.parent
        self._change_names(path, {path.name: None, target.name: self._existing(path, File | Folder)})

    def unlink(self, path: PurePosixPath) -> None:
        self._existing(path, File)
        self._change_names(path, {path.name: None})

    def open(self, path: object, flags: int, mode: int = 0o777) -> int:
        node = self.find(path)
        if node is None and flags & os.O_CREAT:
            self._allocate(1)
            name = PurePosixPath(str(path)).name
            self._change_names(path, {name: File(next(self._inodes))})
        elif isinstance(node, File) and flags & os.O_TRUNC:
            self.ftruncate_file(node)
        fd = next(self._fds)
        self._opened[fd] = _Open(self._existing(path, File | Folder), self.owner())
        return fd

    def close(self, fd: int) -> None:
        self.wait("other")
        self._close(fd)

    def _close(self, fd: int) -> None:
        node = self._opened.pop(fd).node
        if isinstance(node, File) and node.holder == fd:
            node.holder = None

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self._file(fd).content[offset : offset + size])

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        file, half = self._file(fd), len(data) // 2
        self._fail("write")
        size = len(data)
        if offset + size > len(file.content):
            size = self._allocate(size, is_partial=True)
        # Others may see a part of what is written, and a process that is killed leaves it.
        for first, last in ((0, min(half, size)), (half, size)):
            if first < last:
                piece = bytes(data[first:last])
                _write(file.content, offset + first, piece)
                file.unsynced.append((offset + first, piece))
            self.wait("write")
        return size

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        file = self._file(fd)
        missing = max(offset + size - len(file.content), 0)
        self._allocate(missing)
        file.unsynced.append((len(file.content), bytes(missing)))
        file.content.extend(bytes(missing))

    def ftruncate(self, fd: int, size: int) -> None:
        assert size == 0, "nothing else is used"
        self.ftruncate_file(self._file(fd))

    def ftruncate_file(self, file: File) -> None:
        """Empty a file. It has no durable name yet, so what a power cut leaves of its contents does not matter."""
        file.content.clear()
        file.on_disk.clear()
        file.unsynced.clear()

    def sync(self, fd: int) -> None:
        node = self._node(fd)
        count = len(node.unsynced)
        self.wait("sync")
        if isinstance(node, Folder):
            self._fail("sync")
            for changes in node.unsynced[:count]:
                _apply(node.on_disk, changes)
            del node.unsynced[:count]
            return
        written = node.unsynced[:count]
        del node.unsynced[:count]
        # After an error, the kernel considers the data that it could not write to be on the disk.
        self._fail("sync")
        for offset, data in written:
            _write(node.on_disk, offset, data)
        self.on_sync(node)

    def flock(self, fd: int, flags: int) -> None:
        file = self._file(fd)
        if flags & fcntl.LOCK_UN:
            file.holder = None if file.holder == fd else file.holder
        elif file.holder in (None, fd):
            file.holder = fd
        else:
            raise BlockingIOError(errno.EWOULDBLOCK, "the file is locked")

    def _existing(self, path: object, kind: Any) -> Any:
        node = self.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        assert isinstance(node, kind)
        return node

    def _change_names(self, path: object, changes: dict[str, Node | None]) -> None:
        self._existing(PurePosixPath(str(path)).parent, Folder).change(changes)
        self.wait("names")

    def _node(self, fd: int) -> Node:
        self.wait("other")
        return self._opened[fd].node

    def _file(self, fd: int) -> File:
        node = self._node(fd)
        assert isinstance(node, File)
        return node

    def _fail(self, operation: str) -> None:
        if self.failures_left[operation]:
            self.failures_left[operation] -= 1
            self.happened[f"failed {operation}"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _allocate(self, size: int, *, is_partial: bool = False) -> int:
        """Take space from a full disk, and return the number of bytes taken."""
        left = self.num_bytes_left
        if left is None:
            return size
        if left < size and (not is_partial or not left):
            self.happened["full"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_bytes_left = max(left - size, 0)
        return min(size, left)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def _status(node: Node) -> Any:
    size = len(node.content) if isinstance(node, File) else 0
    return SimpleNamespace(st_dev=1, st_ino=node.number, st_nlink=node.num_links, st_size=size)


class DiskPath(PurePosixPath):
    """A path on a disk, with the part of the interface of `pathlib.Path` that is used."""

    __slots__ = ()
    disk: Disk

    def exists(self) -> bool:
        return self.disk.find(self) is not None

    def is_dir(self) -> bool:
        return isinstance(self.disk.find(self), Folder)

    def is_file(self) -> bool:
        return isinstance(self.disk.find(self), File)

    def mkdir(self, mode: int = 0o777, *, parents: bool = False) -> None:
        self.disk.make_folder(self, parents=parents)

    def chmod(self, mode: int) -> None:
        pass

    def iterdir(self) -> Iterator[DiskPath]:
        return iter([self / name for name in self.disk.files(self)])

    def read_bytes(self) -> bytes:
        return self.disk.read(self)

    def stat(self) -> Any:
        return self.disk.stat(self)

    def rename(self, target: DiskPath) -> None:
        self.disk.rename(self, target)

    def unlink(self) -> None:
        self.disk.unlink(self)
