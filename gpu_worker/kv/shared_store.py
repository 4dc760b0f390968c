"""KV pools in shared memory that survive their processes, so that other workers on the host can reuse their blocks.

Each pool is a file in one shared-memory folder: the hashes of its blocks, their seals, then its keys, then its values.
A worker holds a lock on its file, which the kernel releases when the process ends for any reason; until then other
processes read it only in transfers (see `transfer`), which verify each block. A worker that leaves gives up the lock
itself. KeptBlocks guarantees that the hashes are valid at any moment. A seal is a checksum that a thread computes once
a block is full; blocks of a dead worker without a valid one are not used, because whatever killed the worker may have
changed them. The file name encodes the kind of its blocks; blocks of one kind and hash are bit-identical whichever
worker computes them, so a copied block equals a computed one. Files of dead workers are removed after a while.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpu_worker.kv.block_format import Bytes, block_header, half_hash, kind_digest, seal
from midstream.errors import ConfigError
from midstream.security.private_folder import is_private

if TYPE_CHECKING:
    from midstream.telemetry import Metrics

logger = logging.getLogger(__name__)

_POOL_NAME = re.compile(r"[0-9a-f]{24}-\d+-[0-9a-f]{16}\.kv")
_PAGE = 4096
_KEEP_S = 30.0
# A worker's disconnection may be noticed shortly before its lock is released.
_NUM_TRIES, _RETRY_S = 3, 0.005


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of a KV pool.

    Attributes:
        hashes: [num_blocks], content hash of each block; 0 means unknown.
        keys, values: Bytes [num_layers, num_blocks, bytes of a block in one layer].
        states: Bytes of the recurrent states; empty if there are none, as in the pools of a store.
        seals: [num_blocks], seals of the blocks; empty for a pool that is not in a store.
    """

    hashes: NDArray[np.uint64]
    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    states: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    seals: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, dtype=np.uint64))

    def read(self, block: int, value: int) -> NDArray[np.uint8] | None:
        """Return a copy of a block's contents; None if they do not match this hash."""
        contents = np.concatenate([part.reshape(-1) for part in self._parts(block)])
        # A hash is cleared before its block may change, so an unchanged hash means that the block did not change during
        # the copy.
        return contents if int(self.hashes[block]) == value else None

    def write(self, block: int, contents: NDArray[np.uint8]) -> None:
        """Fill a block with contents that `read` returned."""
        start = 0
        for part in self._parts(block):
            part[:] = contents[start : start + part.size].reshape(part.shape)
            start += part.size

    def _parts(self, block: int) -> list[NDArray[np.uint8]]:
        return [part[:, block] for part in (self.keys, self.values, self.states) if part.size]


class KvStore:
    """The pools of one kind on this host.

    Attributes:
        name: Identical for workers that share the folder and the kind.
    """

    def __init__(self, folder: Path, kind: str, num_layers: int) -> None:
        """Open the folder; create it if it is missing.

        Args:
            folder: A folder in shared memory, accessible to this user only.
            kind: Identifies everything other than the tokens that determines a block's contents.

        Raises:
            ConfigError: The folder cannot be used, or others can access it.
        """
        self._folder, self._num_layers = folder, num_layers
        self._kind = hashlib.blake2b(kind.encode(), digest_size=12).hexdigest()
        self._digest = kind_digest(kind)
        self.num_damaged = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status, is_ours = folder.stat(), is_private(folder)
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error}", field="shared_kv_folder") from None
        if not is_ours:
            raise ConfigError(
                f"{folder} must be a folder, not a link, owned by this user with mode 700", field="shared_kv_folder"
            )
        self.name = f"{boot_id}:{status.st_dev}:{status.st_ino}:{self._kind}"
        self._own: Path | None = None
        self._has_left = False
        self._file_number = -1
        self._layer_block_bytes = 0
        self._seals = np.empty(0, dtype=np.uint64)
        self._stopped = threading.Event()
        self._seen = set[Path]()
        threading.Thread(target=self._keep_clean, name="kv-store", daemon=True).start()

    def make_pool(self, num_blocks: int, layer_block_bytes: int) -> PoolMemory | None:
        """Return zeroed memory for this process's pool; None if there is not enough space in the folder."""
        self._layer_block_bytes = layer_block_bytes
        size = _size(num_blocks, self._num_layers, layer_block_bytes)
        try:
            with self._locked_folder():
                if free_bytes(self._folder) < size:
                    self._remove_left(lambda _: True)
                room = free_bytes(self._folder)
                if room >= size:
                    self._make_file(num_blocks, size)
                    pool = self._map(self._file_number, num_blocks, mmap.PROT_READ | mmap.PROT_WRITE)
                    self._seals = pool.seals
                    return pool
                problem = f"{room / 2**30:.2f} GiB free, but {size / 2**30:.2f} GiB needed"
        except OSError as error:
            problem = str(error)
        logger.warning("the KV pool is not shared: %s: %s", self._folder, problem)
        return None

    def _make_file(self, num_blocks: int, size: int) -> None:
        self._own = self._folder / f"{self._kind}-{num_blocks}-{secrets.token_hex(8)}.kv"
        self._file_number = os.open(self._own, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file_number, fcntl.LOCK_EX)
        os.ftruncate(self._file_number, size)

    def leave_pool(self) -> bool:
        """Let others read this process's pool, as if the process were dead; return False if there is no pool.

        Steps that still run do no harm: a block's hash is cleared before the block may change.
        """
        if self._own is None:
            return False
        fcntl.flock(self._file_number, fcntl.LOCK_UN)
        self._has_left = True
        return True

    def close(self) -> None:
        """Remove this process's pool from the folder, unless it was left to others; its memory is freed when the
        process ends.

        The last process to close also removes the pools of dead workers; otherwise these stay for a while for other
        workers.
        """
        self._stopped.set()
        with contextlib.suppress(OSError), self._locked_folder():
            if self._own is not None and not self._has_left:
                self._own.unlink(missing_ok=True)
            is_last = all(_is_left(path) for path in _pools(self._folder))
            self._remove_left(lambda path: is_last or path in self._seen)
            if is_last and self._own is not None:
                self._own.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Hold the folder's lock, which is required to create or remove files."""
        file_number = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file_number, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file_number)

    def fetch(self, hashes: NDArray[np.uint64], targets: NDArray[np.int32], own: PoolMemory) -> NDArray[np.int32]:
        """Copy blocks from dead workers' pools.

        Args:
            hashes: [N], hashes to look up.
            targets: [N], blocks of this process's pool to fill.

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
                for place, source in zip(places.tolist(), sources.tolist(), strict=True):
                    contents = self._read_sealed(pool, source, int(hashes[place]))
                    if contents is not None:
                        own.write(int(targets[place]), contents)
                        missing[place] = False
                if not missing.any():
                    break
            if not missing.all() or attempt == _NUM_TRIES - 1:
                break
            time.sleep(_RETRY_S)
        return targets[missing]

    def seal(self, block: int, value: int, contents: Bytes) -> None:
        """Record the checksum of a block of this process's pool, whose contents `PoolMemory.read` returned."""
        self._seals[block] = seal(block_header(self._digest, value, len(contents)), value, contents)

    def _read_sealed(self, pool: PoolMemory, block: int, value: int) -> Bytes | None:
        contents, found = pool.read(block, value), int(pool.seals[block])
        if contents is None or found >> 32 != half_hash(value):
            return None  # another block, or its worker died before sealing it
        if found != seal(block_header(self._digest, value, len(contents)), value, contents):
            self.num_damaged += 1
            logger.warning("a KV block of a dead worker is corrupt and will be computed")
            return None
        return contents

    def count(self, metrics: Metrics) -> None:
        """Export how many blocks of dead workers failed verification."""
        text = "KV blocks of dead workers that failed verification."
        metrics.counter_of("worker_kv_adopted_damaged", text, {"": partial(getattr, self, "num_damaged")})

    @property
    def pool_name(self) -> str:
        """The file name of this process's pool; empty if it has none in this folder."""
        return "" if self._own is None else self._own.name

    def open_pool(self, name: str) -> PoolMemory:
        """Return the pool of a live process, which may only be read. Raises OSError if the pool is gone, or ValueError
        if the file is not a pool of this kind.
        """
        if not _POOL_NAME.fullmatch(name) or not name.startswith(self._kind):
            raise ValueError("not a pool of this kind")
        file_number = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self._map(file_number, int(name.split("-")[1]), mmap.PROT_READ)
        finally:
            os.close(file_number)

    def _left_pools(self) -> Iterator[PoolMemory]:
        """Yield the pools that dead workers left, newest first."""
        for path in self._left_files():
            with contextlib.suppress(OSError, ValueError), _unlocked(path) as file_number:
                if file_number is not None:
                    yield self._map(file_number, int(path.name.split("-")[1]), mmap.PROT_READ)

    def _left_files(self) -> list[Path]:
        """Return the files of this kind other than this process's own, newest first; none if the folder was removed."""
        files = []
        try:
            paths = _pools(self._folder)
        except OSError:
            return []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                if path != self._own and path.name.startswith(self._kind):
                    files.append((path.stat().st_ctime_ns, path))
        return [path for _, path in sorted(files, reverse=True)]

    def _map(self, file_number: int, num_blocks: int, access: int) -> PoolMemory:
        size, start = _size(num_blocks, self._num_layers, self._layer_block_bytes), 2 * _hashes_size(num_blocks)
        if os.fstat(file_number).st_size != size:
            raise ValueError("the file is corrupt")
        data = np.frombuffer(mmap.mmap(file_number, size, prot=access), dtype=np.uint8)
        hashes, seals = (data[at : at + num_blocks * 8].view(np.uint64) for at in (0, start // 2))
        keys, values = data[start:].reshape(2, self._num_layers, num_blocks, -1)
        return PoolMemory(hashes, keys, values, seals=seals)

    def _keep_clean(self) -> None:
        """Remove dead workers' pools on the second scan that finds them, so that other workers have time to copy from
        them.
        """
        while not self._stopped.wait(_KEEP_S):
            with contextlib.suppress(OSError), self._locked_folder():
                self._seen = self._remove_left(self._seen.__contains__)

    def _remove_left(self, is_due: Callable[[Path], bool]) -> set[Path]:
        """Remove the pools, of any kind, that dead workers left behind and `is_due` selects; return the others."""
        left = {path for path in _pools(self._folder) if path != self._own and _is_left(path)}
        for path in filter(is_due, left):
            path.unlink(missing_ok=True)
            logger.info("removed the KV pool of a dead worker")
        return {path for path in left if path.exists()}


def _pools(folder: Path) -> list[Path]:
    """Return the pool files in a folder, ignoring all other files."""
    return [path for path in folder.iterdir() if _POOL_NAME.fullmatch(path.name)]


def _is_left(path: Path) -> bool:
    """Return whether no live process holds a pool."""
    with _unlocked(path) as file_number:
        return file_number is not None


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[int | None]:
    """Yield the open file if no live process holds it, and otherwise None."""
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
    """Return the size of the hashes in bytes, in whole pages; the seals have the same size."""
    return -(-num_blocks * 8 // _PAGE) * _PAGE


def _size(num_blocks: int, num_layers: int, layer_block_bytes: int) -> int:
    return 2 * _hashes_size(num_blocks) + 2 * num_layers * num_blocks * layer_block_bytes


def free_bytes(folder: Path) -> int:
    """Return the number of free bytes in a folder that are not reserved for the pools of live workers."""
    room = shutil.disk_usage(folder).free
    for path in _pools(folder):
        with contextlib.suppress(FileNotFoundError):  # its worker has just removed it
            if not _is_left(path):
                status = path.stat()
                room -= max(0, status.st_size - status.st_blocks * 512)
    return room
