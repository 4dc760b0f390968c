"""File operations of a log; their order determines what survives a power cut.

`sync` makes the contents of a file durable, `sync_names` the directory entries. Nothing is durable before that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from scheduler.journal import JournalError, LostError

_LOCK_NAME = "lock"
_LOCK_TIMEOUT_S = 5.0
_LOCK_POLL_S = 0.01
_EPOCH_BYTES = 8


class LogFolder:
    """A folder of files to which one process at a time writes, accessible only to its owner.

    The file `lock` holds the epoch of the process that may write. It is locked during each write, and while another
    process raises the epoch. The lock is released when the process that holds it ends.
    """

    def __init__(self, path: Path) -> None:
        """Prepare the folder; `open` opens it."""
        self.path = path
        self._lock = -1
        self._files: dict[str, int] = {}
        self._inodes: dict[str, tuple[int, int]] = {}

    def open(self) -> None:
        """Open the folder, creating it if needed."""
        missing = list(itertools.takewhile(lambda path: not path.is_dir(), self.path.parents))
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True)
        # A process that was killed may have created the folder, too.
        for path in (self.path, *missing):
            with contextlib.suppress(PermissionError):  # others' folders may not be readable
                sync_folder(path.parent)
        with contextlib.suppress(PermissionError):
            self.path.chmod(0o700)
        self._lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._inodes[_LOCK_NAME] = _inode(os.fstat(self._lock))

    def names(self) -> list[str]:
        """Return the names of all files except the lock file, sorted."""
        return sorted(path.name for path in self.path.iterdir() if path.name != _LOCK_NAME)

    def read(self, name: str) -> bytes:
        """Return a file's contents."""
        with contextlib.suppress(PermissionError):
            (self.path / name).chmod(0o600)
        return (self.path / name).read_bytes()

    def create(self, name: str, num_bytes: int) -> int:
        """Create a file of `num_bytes` zeros, replacing any file of this name, and return its size.

        Preallocation avoids syncing the size with each write. Without enough disk space the size is 0.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._files[name] = file = os.open(self.path / name, flags, 0o600)
        self._inodes[name] = _inode(os.fstat(file))
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(file, 0)
        return os.fstat(file).st_size

    def write(self, name: str, data: bytes, offset: int) -> None:
        """Write to a file that was created or renamed by this object."""
        _write(self._files[name], data, offset)

    def sync(self, name: str) -> None:
        """Return once everything written to such a file is durable."""
        os.fdatasync(self._files[name])

    def write_again(self, name: str, data: bytes, offset: int) -> None:
        """Return once the data that another process has written there is durable.

        A sync alone would not do: once a sync has failed, Linux considers the data to be on the disk.
        """
        file = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write(file, data, offset)
            os.fdatasync(file)
        finally:
            os.close(file)

    def rename(self, name: str, new_name: str) -> None:
        (self.path / name).rename(self.path / new_name)
        if name in self._files:
            self._files[new_name] = self._files.pop(name)
            self._inodes[new_name] = self._inodes.pop(name)

    def unlink(self, name: str) -> None:
        """Delete a file."""
        self.release(name)
        (self.path / name).unlink()

    def release(self, name: str) -> None:
        """Close a file that will not be written to again."""
        file = self._files.pop(name, None)
        if file is not None:
            del self._inodes[name]
            os.close(file)

    def sync_names(self) -> None:
        """Return once the folder's directory entries are durable."""
        sync_folder(self.path)

    def check(self, name: str, num_bytes: int) -> None:
        """Raise LostError if the lock file or this file was deleted or replaced, or this file has less than `num_bytes`
        bytes.
        """
        if os.fstat(self._lock).st_nlink == 0:
            raise LostError(f"{self.path / _LOCK_NAME} was deleted or replaced while it was in use")
        status = os.fstat(self._files[name])
        if status.st_nlink == 0:
            raise LostError(f"{self.path / name} was deleted or replaced while it was in use")
        if status.st_size < num_bytes:
            raise LostError(f"{self.path / name} was truncated while it was in use")

    def check_names(self, names: Sequence[str]) -> None:
        """Raise LostError if a file with one of these names is missing or is not the open one."""
        for name in (_LOCK_NAME, *names):
            path = self.path / name
            try:
                inode = _inode(path.stat())
            except (FileNotFoundError, NotADirectoryError):
                raise LostError(f"{path} was deleted while it was in use") from None
            if inode != self._inodes.get(name, inode):
                raise LostError(f"{path} was replaced while it was in use")

    def __enter__(self) -> None:
        """Take the lock. Raises JournalError if another process holds it for too long."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for_lock()

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _wait_for_lock(self) -> None:
        give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            time.sleep(_LOCK_POLL_S)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise JournalError(
                        f"{self.path} has been locked by another process for {_LOCK_TIMEOUT_S:g} s; "
                        f"see `fuser {self.path / _LOCK_NAME}`"
                    ) from None
            else:
                return

    def epoch(self) -> int:
        """Return the writer's epoch. Unless the lock is held, a successor may raise it immediately afterwards."""
        return int.from_bytes(os.pread(self._lock, _EPOCH_BYTES, 0), "little")

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the only one that may write. Precondition: the lock is held. The change does not survive a
        reboot.
        """
        os.pwrite(self._lock, epoch.to_bytes(_EPOCH_BYTES, "little"), 0)

    def close(self) -> None:
        for name in list(self._files):
            self.release(name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def sync_folder(path: Path) -> None:
    """Return once a folder's directory entries are durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
