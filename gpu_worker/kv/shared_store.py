"""KV pools in memory that outlasts their processes: what a worker that died had computed, others of its host take over.

Each pool lies in a file of one folder in shared memory: the hashes of its blocks, then its keys, then its values. A
worker holds a lock on its file, which the kernel drops when the process ends, however it ends; until then nobody else
looks into it. KeptBlocks sees to it that the hashes are true at any moment. The name of a file says of which kind its
blocks are; those of one kind are equal bit for bit whoever computes them, so a copied block is as good as a computed
one. A file that a dead worker left is removed after a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from midstream.errors import ConfigError
from midstream.security.private_folder import is_private

logger = logging.getLogger(__name__)

_POOL_NAME = re.compile(r"[0-9a-f]{24}-\d+-[0-9a-f]{16}\.kv")
_PAGE = 4096
_KEEP_S = 30.0
# A worker's link may be seen to end a moment before its lock does.
_NUM_TRIES, _RETRY_S = 3, 0.005


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of a KV pool.

    Attributes:
        hashes: [num_blocks], what each block holds; 0: nobody knows.
        keys, values: Bytes [num_layers, num_blocks, bytes of a block in one layer].
    """

    hashes: NDArray[np.uint64]
    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]


class KvStore:
    """The pools of one kind on this host.

    Attributes:
        name: Equal for workers that share the folder and the kind.
    """

    def __init__(self, folder: Path, kind: str, num_layers: int) -> None:
        """Opens the folder, and makes it where it is not there.

        Args:
            folder: In shared memory; of this user alone.
            kind: All that makes blocks differ in what they hold for the same tokens.
            num_layers: Of the model.

        Raises:
            ConfigError: The folder is not ours alone.
        """
        self._folder, self._num_layers = folder, num_layers
        self._kind = hashlib.blake2b(kind.encode(), digest_size=12).hexdigest()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status, is_ours = folder.stat(), is_private(folder)
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error}", field="shared_kv_folder") from None
        if not is_ours:
            raise ConfigError(f"{folder} must be a folder of this user alone (mode 700)", field="shared_kv_folder")
        self.name = f"{boot_id}:{status.st_dev}:{status.st_ino}:{self._kind}"
        self._own: Path | None = None
        self._file_number = -1
        self._layer_block_bytes = 0
        self._stopped = threading.Event()
        self._seen = set[Path]()
        threading.Thread(target=self._keep_clean, name="kv-store", daemon=True).start()

    def make_pool(self, num_blocks: int, layer_block_bytes: int) -> PoolMemory | None:
        """Memory for this process's own pool, zeros; None where the folder cannot take it."""
        self._layer_block_bytes = layer_block_bytes
        size = _size(num_blocks, self._num_layers, layer_block_bytes)
        try:
            with self._locked_folder():
                if _room(self._folder) < size:
                    self._remove_left(lambda _: True)
                room = _room(self._folder)
                if room >= size:
                    self._make_file(num_blocks, size)
                    return self._map(self._file_number, num_blocks, mmap.PROT_READ | mmap.PROT_WRITE)
                problem = f"{room / 2**30:.2f} GiB are free, {size / 2**30:.2f} are needed"
        except OSError as error:
            problem = str(error)
        logger.warning("the KV pool is not shared: %s: %s", self._folder, problem)
        return None

    def _make_file(self, num_blocks: int, size: int) -> None:
        self._own = self._folder / f"{self._kind}-{num_blocks}-{secrets.token_hex(8)}.kv"
        self._file_number = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file_number, fcntl.LOCK_EX)
        os.ftruncate(self._file_number, size)

    def close(self) -> None:
        """Removes this process's pool from the folder; its memory stays until the process ends.

        The last one to close removes what dead workers left; others leave it a while to those who live.
        """
        self._stopped.set()
        with contextlib.suppress(OSError), self._locked_folder():
            if self._own is not None:
                self._own.unlink(missing_ok=True)
            is_last = all(_is_left(path) for path in _pools(self._folder))
            self._remove_left(lambda path: is_last or path in self._seen)

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """One process at a time makes and removes files."""
        file_number = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file_number, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file_number)

    def fetch(self, hashes: NDArray[np.uint64], targets: NDArray[np.int32], own: PoolMemory) -> NDArray[np.int32]:
        """Copies blocks that dead workers left.

        Args:
            hashes: [N], of what is looked for.
            targets: [N], blocks of our own pool; each is filled if its hash is found.
            own: This process's pool.

        Returns:
            The targets that were not found.
        """
        missing = np.ones(len(hashes), dtype=bool)
        for attempt in range(_NUM_TRIES):
            for pool in self._left_pools():
                places = np.flatnonzero(missing)
                order = np.argsort(pool.hashes)
                found = np.searchsorted(pool.hashes, hashes[places], sorter=order)
                sources = order[np.minimum(found, len(order) - 1)]
                is_there = pool.hashes[sources] == hashes[places]
                places, sources = places[is_there], sources[is_there]
                for left, ours in ((pool.keys, own.keys), (pool.values, own.values)):
                    ours[:, targets[places]] = left[:, sources]
                missing[places] = False
                if not missing.any():
                    break
            if not missing.all() or attempt == _NUM_TRIES - 1:
                break
            time.sleep(_RETRY_S)
        return targets[missing]

    def _left_pools(self) -> Iterator[PoolMemory]:
        """Pools of workers that died, latest first."""
        for path in self._left_files():
            with contextlib.suppress(OSError, ValueError), _unlocked(path) as file_number:
                if file_number is not None:
                    yield self._map(file_number, int(path.name.split("-")[1]), mmap.PROT_READ)

    def _left_files(self) -> list[Path]:
        """Files of this kind that are not our own, the newest first."""
        files = []
        for path in _pools(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if path != self._own and path.name.startswith(self._kind):
                    files.append((path.stat().st_ctime_ns, path))
        return [path for _, path in sorted(files, reverse=True)]

    def _map(self, file_number: int, num_blocks: int, access: int) -> PoolMemory:
        size, start = _size(num_blocks, self._num_layers, self._layer_block_bytes), _hashes_size(num_blocks)
        if os.fstat(file_number).st_size != size:
            raise ValueError("the file is damaged")
        data = np.frombuffer(mmap.mmap(file_number, size, prot=access), dtype=np.uint8)
        hashes = data[: num_blocks * 8].view(np.uint64)
        keys, values = data[start:].reshape(2, self._num_layers, num_blocks, -1)
        return PoolMemory(hashes, keys, values)

    def _keep_clean(self) -> None:
        """Removes what a dead worker left when it is seen for the second time: others have fetched it then."""
        while not self._stopped.wait(_KEEP_S):
            with contextlib.suppress(OSError), self._locked_folder():
                self._seen = self._remove_left(self._seen.__contains__)

    def _remove_left(self, is_due: Callable[[Path], bool]) -> set[Path]:
        """Removes what dead workers of any kind left, where it is due; returns what is left after that."""
        left = {path for path in _pools(self._folder) if path != self._own and _is_left(path)}
        for path in filter(is_due, left):
            path.unlink(missing_ok=True)
            logger.info("removed the KV pool that a dead worker left")
        return {path for path in left if path.exists()}


def _pools(folder: Path) -> list[Path]:
    """Files that stores made; nothing else in the folder is ours."""
    return [path for path in folder.iterdir() if _POOL_NAME.fullmatch(path.name)]


def _is_left(path: Path) -> bool:
    """Whether no living process holds a pool."""
    with _unlocked(path) as file_number:
        return file_number is not None


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[int | None]:
    """The open file, where no living process holds it; else None."""
    file_number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(file_number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file_number
    finally:
        os.close(file_number)


def _hashes_size(num_blocks: int) -> int:
    return -(-num_blocks * 8 // _PAGE) * _PAGE


def _size(num_blocks: int, num_layers: int, layer_block_bytes: int) -> int:
    return _hashes_size(num_blocks) + 2 * num_layers * num_blocks * layer_block_bytes


def _room(folder: Path) -> int:
    """Free bytes that no living worker's pool may still take."""
    room = shutil.disk_usage(folder).free
    for path in _pools(folder):
        if not _is_left(path):
            status = path.stat()
            room -= max(0, status.st_size - status.st_blocks * 512)
    return room
