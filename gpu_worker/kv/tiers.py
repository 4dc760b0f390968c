"""Tiers below the KV pool: blocks in host memory and on disk that outlive both eviction from the pool and the
processes.

A tier is a folder, in shared memory or on a disk, with one file per block, named by the scheduler's hash of its
contents. The file's header repeats the kind and the hash, and a checksum covers header and contents. It is verified
before a block is used: a file that is corrupt, truncated or misnamed counts as a miss and is removed.

Workers of one kind on a host share the folders without locks: files are written under a temporary name and renamed, a
block's contents are identical whichever worker computed them, and a reader can finish reading a file that another
process removes. The index may be out of date for some seconds, which costs a miss or a redundant write.

If a request asked to keep a block longer or shorter than others, an empty file next to the block's file records this:
its name contains the block's hash, the priority, and the time until which the priority holds, in nanoseconds since the
Unix epoch.

A separate thread stores blocks when they are full, so steps do not wait for it and blocks are stored before the pool
evicts them. The worker reports the stored hashes to the scheduler, which then asks for these blocks instead of having
them computed. Another thread reads blocks ahead of the steps that need them, so that these steps only copy them; a step
waits for blocks that have not been read ahead in time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpu_worker.kv.block_format import HEAD_BYTES, HEADER_BYTES, Bytes, block_header, checksum, kind_digest
from gpu_worker.kv.eviction import DEFAULT_RETENTION, MAX_PRIORITY, EvictionOrder, Retention
from midstream.errors import ConfigError
from midstream.security.private_folder import is_private

if TYPE_CHECKING:
    from gpu_worker.kv.device_pool import BlockPool
    from midstream.telemetry import Metrics
    from protos import worker_pb2

logger = logging.getLogger(__name__)

# Interval between scans for other workers' files, and time for which a tier is paused after a write error.
_SCAN_S, _PAUSE_S = 5.0, 10.0
# How long a step waits for its blocks. A disk that responds slowly or not at all, such as a network disk, must not
# block its worker.
_HUNG_S = 2.0
# How long to wait for the threads when closing.
_CLOSE_S = 5.0
# Time without use after which the blocks of a kind are removed from host memory and from disk, for example those of a
# model that is no longer served, or of an earlier version. It is shorter for memory, which is scarcer.
UNUSED_HOST_S, _UNUSED_S = 3600.0, 7 * 86_400.0
# Maximum number of blocks waiting to be stored; the oldest are dropped, since they can be computed again.
_MAX_WAITING = 8192
# Share of a tier that blocks with a raised priority may hold.
_RETAINED_SHARE = 0.5
# Length of a block's file name: its hash in hexadecimal.
_NAME_LENGTH = 16
# Age after which an incomplete file, or a retention file without its block, is considered abandoned and removed; a
# process may still be writing a younger one or its block.
_INCOMPLETE_S = 60.0


class TierFolder:
    """The blocks of one kind in one tier.

    Attributes:
        num_hits, num_stored, num_evicted, num_damaged, num_errors, read_bytes, written_bytes: Counts since the start.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        kind: str,
        block_bytes: int,
        max_bytes: int,
        max_bytes_per_s: int = 0,
        *,
        unused_s: float = _UNUSED_S,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Open the tier's folder; create it if it is missing.

        Args:
            folder: A folder that only this user can access; kinds and workers share it.
            kind: Identifies everything other than the tokens that determines a block's contents.
            max_bytes: Maximum total size of files of this kind.
            max_bytes_per_s: Maximum rate of this process's writes; 0 means no limit.
            unused_s: How long other kinds are kept after their last use.
            free_bytes: Returns how many bytes blocks may still take up, if others need space in the same file system;
                None means that only `max_bytes` limits them.

        Raises:
            ConfigError: The folder cannot be used, or others can access it.
        """
        self.name = name
        self.num_hits = self.num_stored = self.num_evicted = self.num_damaged = self.num_errors = 0
        self.read_bytes = self.written_bytes = 0
        self._unused_s, self._free_bytes = unused_s, free_bytes
        self._kind = kind_digest(kind)
        self._folder = folder / self._kind.hex()
        self._block_bytes = block_bytes
        self._max_blocks = max_bytes // (block_bytes + HEAD_BYTES)
        self._max_retained = int(self._max_blocks * _RETAINED_SHARE)
        self._lock = threading.Lock()
        self._index = EvictionOrder()
        # Retentions of blocks that are about to be stored, oldest first.
        self._expected: OrderedDict[int, Retention] = OrderedDict()
        self._news: dict[int, bool] = {}
        self._forgotten: set[int] = set()  # found missing or unreadable since the last scan began
        self._is_private = False
        self._paused_until = self._may_write_at = 0.0
        self._write_s = (block_bytes + HEAD_BYTES) / max_bytes_per_s if max_bytes_per_s else 0.0
        field = "shared_kv_folder" if name == "host" else "disk_kv_folder"
        try:
            self.scan()
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error}", field=field) from None
        if not self._is_private:
            raise ConfigError(f"{folder} must be a folder, not a link, owned by this user with mode 700", field=field)

    def __contains__(self, value: int) -> bool:
        with self._lock:
            return value in self._index

    def __len__(self) -> int:
        return len(self._index)

    def take_all(self) -> set[int]:
        """Return the hashes of all blocks known to be stored; from now on `take_news` reports later changes."""
        with self._lock:
            self._news.clear()
            return set(self._index)

    def take_news(self) -> dict[int, bool]:
        """Return the hashes of blocks that were stored (True) or removed (False) since the last call."""
        with self._lock:
            news, self._news = self._news, {}
            return news

    def scan(self) -> None:
        """Read the folder, including files of other workers, in the order of their last use; create it if it has been
        removed. Evict blocks above the limit. While other users can access the folder, the tier counts as empty.
        """
        with self._lock:
            self._forgotten.clear()
        self._is_private = self._make_folder()
        order = self._read_folder() if self._is_private else EvictionOrder()
        self._unmark(order.limit_raised(self._max_retained, time.time_ns()))
        if self._is_private:
            _remove_unused(self._folder.parent, self._unused_s)
        with self._lock:
            for value in self._forgotten:
                order.remove(value)
            before, self._index = self._index, order
            self._news |= dict.fromkeys(set(before) - set(order), False)
            self._news |= dict.fromkeys(set(order) - set(before), True)
        # Other workers may have stored blocks up to the limit at the same time, and the limit may have been higher
        # before.
        self._make_room(self._max_blocks, MAX_PRIORITY)

    def _read_folder(self) -> EvictionOrder:
        found: list[tuple[int, int]] = []
        marks: list[tuple[int, Retention, os.DirEntry[str]]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    _remove_left(entry)
                    continue
                with contextlib.suppress(ValueError, FileNotFoundError):
                    name, _, mark = entry.name.partition(".")
                    value = int.from_bytes(bytes.fromhex(name))
                    if len(name) != _NAME_LENGTH:
                        continue  # not ours
                    if mark:
                        priority, until_ns = mark.split(".")
                        marks.append((value, Retention(int(priority), int(until_ns)), entry))
                    else:
                        found.append((entry.stat().st_mtime_ns, value))
        retentions: dict[int, Retention] = {}
        now_ns, stored = time.time_ns(), {value for _, value in found}
        for value, retention, entry in marks:
            if value not in stored or retention.is_over(now_ns):
                _remove_left(entry)
            else:
                retentions[value] = retentions.get(value, retention).raised(retention)
        order = EvictionOrder()
        for _, value in sorted(found):
            order.add(value, retentions.get(value, DEFAULT_RETENTION))
        return order

    def _make_folder(self) -> bool:
        """Create the folder if it is missing; return whether only this user can access it."""
        parent = self._folder.parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(parent):
            return False
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.utime(self._folder)  # shows that the kind is in use
        return True

    def retain(self, value: int, retention: Retention) -> None:
        """Record a request's retention of a block that is or will be stored.

        As in the pool, this can only raise the retention of a block that is already stored. Blocks with a raised
        priority take at most half of the tier; if there are more, they lose their retention: the lowest priority first,
        then the least recently used.
        """
        now_ns = time.time_ns()
        with self._lock:
            before = self._index.retention(value)
            if before is None:
                self._expected[value] = retention
                self._expected.move_to_end(value)
                if len(self._expected) > _MAX_WAITING:
                    self._expected.popitem(last=False)
                return
            before = DEFAULT_RETENTION if before.is_over(now_ns) else before
            after = before.raised(retention)
            if after != before:
                self._index.add(value, after)
            lost = self._index.limit_raised(self._max_retained, now_ns)
        if after != before:
            self._mark(value, before, after)
        self._unmark(lost)

    @property
    def is_limited(self) -> bool:
        """Whether there is a maximum rate of writes."""
        return self._write_s > 0

    @property
    def delay_s(self) -> float:
        """Time until another block may be written without exceeding the maximum rate."""
        return max(0.0, self._may_write_at - time.monotonic())

    def put(self, value: int, contents: Bytes) -> bool:
        """Store a block, evicting others of at most its priority; return False if that failed or the tier is paused."""
        if time.monotonic() < self._paused_until or not self._is_private:
            return False
        with self._lock:
            retention = self._expected.pop(value, DEFAULT_RETENTION)
        self._may_write_at = max(self._may_write_at, time.monotonic()) + self._write_s
        header = block_header(self._kind, value, len(contents))
        path, new = self._path(value), self._folder / f".{secrets.token_hex(8)}"
        try:
            num_left = self._max_blocks - 1
            if self._free_bytes is not None and self._free_bytes() < HEAD_BYTES + len(contents):
                num_left = min(num_left, len(self) - 1)
            if not self._make_room(num_left, retention.priority):
                return False
            file_number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                data: list[Any] = [header, checksum(header, contents), contents.data]
                if os.writev(file_number, data) != HEAD_BYTES + len(contents):
                    raise OSError("the disk is full")
            finally:
                os.close(file_number)
            new.rename(path)
        except OSError as error:
            self.num_errors += 1
            self._paused_until = time.monotonic() + _PAUSE_S
            logger.warning("cannot store KV blocks in the %s tier: %s", self.name, error)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            return False
        with self._lock:
            self._index.add(value, retention)
            self._news[value] = True
            lost = self._index.limit_raised(self._max_retained, time.time_ns())
        self._mark(value, DEFAULT_RETENTION, retention)
        self._unmark(lost)
        self.num_stored += 1
        self.written_bytes += HEAD_BYTES + len(contents)
        return True

    def get(self, value: int) -> Bytes | None:
        """Return a block's verified contents; None if it is missing or corrupt."""
        path = self._path(value)
        if not self._is_private:
            return None
        try:
            data = np.fromfile(path, dtype=np.uint8, count=HEAD_BYTES + self._block_bytes + 1)
        except FileNotFoundError:
            self._forget(value)
            return None
        except OSError as error:
            self.num_errors += 1
            logger.warning("cannot read KV blocks from the %s tier: %s", self.name, error)
            self._forget(value)
            return None
        self.read_bytes += len(data)
        header = block_header(self._kind, value, self._block_bytes)
        contents = data[HEAD_BYTES:]
        is_whole = len(contents) == self._block_bytes and data[:HEADER_BYTES].tobytes() == header
        if not is_whole or data[HEADER_BYTES:HEAD_BYTES].tobytes() != checksum(header, contents):
            self.num_damaged += 1
            logger.warning("removed a corrupt KV block from the %s tier", self.name)
            self._forget(value)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self.num_hits += 1
        self.touch(value)
        return contents

    def touch(self, value: int) -> bool:
        """Mark a block as recently used; return False if its file is gone."""
        with self._lock:
            self._index.use(value)
        now_ns = time.time_ns()  # more precise than the kernel's timestamp of a new file
        try:
            os.utime(self._path(value), ns=(now_ns, now_ns))
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def confirm(self, value: int) -> bool:
        """Return whether a block is stored; if so, mark it as recently used and report it again.

        A stored block may be computed again if the scheduler forgot it because a step did not get it in time.
        """
        if value not in self:
            return False
        if not self.touch(value):
            self._forget(value)
            return False
        with self._lock:
            if value in self._index:
                self._news[value] = True
        return True

    def _make_room(self, max_blocks: int, priority: int) -> bool:
        """Evict blocks of at most this priority until `max_blocks` are left; return False if that is not possible."""
        while True:
            with self._lock:
                if len(self._index) <= max_blocks:
                    return True
                if not self._index:
                    return False
                value, lowest = self._index.first(time.time_ns())
                if lowest > priority:
                    return False
                retention = self._index.retention(value) or DEFAULT_RETENTION
                self._index.remove(value)
                self._news[value] = False
            self._path(value).unlink(missing_ok=True)
            self._mark(value, retention, DEFAULT_RETENTION)
            self.num_evicted += 1

    def _mark(self, value: int, before: Retention, after: Retention) -> None:
        """Replace the file that records a block's retention; the default retention has no file. If that fails, other
        workers, and this one after a scan, use the default.
        """
        old, new = (
            None if item == DEFAULT_RETENTION else self._folder / f"{value:016x}.{item.priority}.{item.until_ns}"
            for item in (before, after)
        )
        with contextlib.suppress(OSError):
            if new is not None:
                os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if old is not None and old != new:
                old.unlink(missing_ok=True)

    def _unmark(self, lost: Iterable[tuple[int, Retention]]) -> None:
        for value, retention in lost:
            self._mark(value, retention, DEFAULT_RETENTION)

    def _forget(self, value: int) -> None:
        with self._lock:
            self._forgotten.add(value)
            if self._index.remove(value):
                self._news[value] = False

    def _path(self, value: int) -> Path:
        return self._folder / f"{value:016x}"


@dataclass(frozen=True, slots=True)
class StoreChanges:
    """Hashes of the blocks stored and removed since the last call of `KvTiers.hashes` or `KvTiers.changes`."""

    stored: tuple[int, ...]
    removed: tuple[int, ...]


class KvTiers:
    """The tiers of one pool: stores full blocks in them and fetches blocks from them. Also seals the blocks of a pool
    in shared memory.

    Attributes:
        name: Identical for workers that share the tiers; empty if there are none.
        num_read_ahead: Number of blocks that had been read when a step needed them.
    """

    def __init__(
        self,
        tiers: Sequence[TierFolder],
        name: str,
        pool: BlockPool,
        seal: Callable[[int, int, Bytes], None] | None = None,
        max_held: int = 0,
    ) -> None:
        """Start the threads that store, seal and read blocks.

        Args:
            tiers: The tiers, fastest first.
            name: Identical for workers that share the tiers.
            pool: The pool's blocks and their content hashes, which KeptBlocks keeps valid.
            seal: Called with a block, its hash and its contents once it is full.
            max_held: Maximum number of blocks to hold that were read ahead; above it the oldest are dropped.
        """
        self.name = name
        self._tiers, self._pool, self._seal = tiers, pool, seal
        self._waiting: deque[tuple[int, int]] = deque(maxlen=_MAX_WAITING)
        # Blocks that a tier cannot take yet, because of its maximum rate.
        self._delayed: deque[tuple[int, int]] = deque(maxlen=_MAX_WAITING)
        self._retentions: dict[int, Retention] = {}  # not yet passed to the tiers
        self._wake, self._stopped = threading.Condition(), False
        self._is_storing = False
        self.num_read_ahead = 0
        self._max_held = max_held
        self._ahead: OrderedDict[int, None] = OrderedDict()  # blocks to read ahead, in this order
        self._held: OrderedDict[int, Bytes] = OrderedDict()  # blocks that were read ahead, oldest first
        self._wake_reader = threading.Condition()
        # Hashes of the blocks that a step waits for, with the queue for their contents; None ends the thread.
        self._to_read: SimpleQueue[tuple[list[int], SimpleQueue[Bytes | None]] | None] = SimpleQueue()
        # The queue for the blocks that are being read, and the last queue that a step stopped waiting for. While the
        # two are the same, the read hangs, and steps do not use the tiers.
        self._reading: SimpleQueue[Bytes | None] | None = None
        self._abandoned: SimpleQueue[Bytes | None] | None = None
        if tiers:
            threading.Thread(target=self._read_for_steps, name="kv-fetcher", daemon=True).start()
        self._reader = threading.Thread(target=self._read_ahead, name="kv-reader", daemon=True)
        if tiers and max_held:
            self._reader.start()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def offer(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Queue blocks, each with its content hash, to be stored; blocks that change before they are stored are
        skipped.
        """
        with self._wake:
            self._waiting.extend(blocks)
            self._wake.notify()

    def receive(self, step: worker_pb2.StepBatch) -> None:
        """Record a received step's retentions and the blocks to read ahead for it. Call this before the step runs."""
        if step.ahead_hashes and self._reader.is_alive():
            with self._wake_reader:
                for value in step.ahead_hashes[: self._max_held]:
                    self._ahead[value] = None
                self._wake_reader.notify()
        if not self._tiers or not step.retained_hashes:
            return
        asked = zip(step.retained_hashes, step.retained_priorities, step.retained_ms, strict=True)
        now_ns = time.time_ns()
        with self._wake:
            for value, priority, duration_ms in asked:
                until = Retention(priority, now_ns + duration_ms * 10**6) if duration_ms else Retention(priority)
                self._retentions[value] = until
            self._wake.notify()

    def fetch(self, hashes: NDArray[np.uint64], targets: NDArray[np.int32]) -> NDArray[np.int32]:
        """Fill target blocks from the tiers by hash; return the targets that were not found, or not in time."""
        if not self._tiers:
            return targets
        unread: dict[int, int] = {}
        for value, target in zip(hashes.tolist(), targets.tolist(), strict=True):
            with self._wake_reader:
                self._ahead.pop(value, None)
                contents = self._held.pop(value, None)
            if contents is None:
                unread[target] = value
                continue
            self.num_read_ahead += 1
            self._pool.write(target, contents)
        missing = []
        for target, contents in zip(unread, self._read(list(unread.values())), strict=True):
            if contents is None:
                missing.append(target)
            else:
                self._pool.write(target, contents)
        return np.array(missing, dtype=np.int32)

    def _read(self, values: list[int]) -> Iterator[Bytes | None]:
        """Yield blocks in order, read by a thread; None for missing blocks and, after a timeout, for the remaining
        ones.
        """
        answers: SimpleQueue[Bytes | None] = SimpleQueue()
        is_waiting = self._reading is None or self._reading is not self._abandoned
        if is_waiting and values:
            self._to_read.put((values, answers))
        give_up_at = time.monotonic() + _HUNG_S
        for number in range(len(values)):
            contents = None
            if is_waiting:
                try:
                    contents = answers.get(timeout=max(0.0, give_up_at - time.monotonic()))
                except Empty:
                    logger.warning(
                        "the KV tiers do not answer in time; %d blocks will be computed", len(values) - number
                    )
                    self._abandoned, is_waiting = answers, False
            yield contents

    def _read_for_steps(self) -> None:
        for values, answers in iter(self._to_read.get, None):
            self._reading = answers
            for value in values:
                if self._abandoned is answers:
                    break
                answers.put(self._get(value))
            self._reading = None

    def _get(self, value: int) -> Bytes | None:
        return next((found for tier in self._tiers if (found := tier.get(value)) is not None), None)

    def _read_ahead(self) -> None:
        while True:
            with self._wake_reader:
                self._wake_reader.notify_all()
                self._wake_reader.wait_for(lambda: self._stopped or self._ahead)
                if self._stopped:
                    return
                value = next(iter(self._ahead))
                is_held = value in self._held
            contents = None if is_held else self._get(value)
            with self._wake_reader:
                # A step may have needed the block in the meantime, and removed it from the list.
                if self._ahead.pop(value, self) is None and contents is not None:
                    self._held[value] = contents
                    if len(self._held) > self._max_held:
                        self._held.popitem(last=False)

    def wait_until_read(self, timeout_s: float) -> bool:
        """Wait until no block is to be read ahead; return False on timeout."""
        with self._wake_reader:
            return self._wake_reader.wait_for(lambda: not self._ahead, timeout_s)

    def hashes(self) -> set[int]:
        """Return the hashes of all stored blocks; `changes` reports changes since this call."""
        return set[int]().union(*(tier.take_all() for tier in self._tiers))

    def changes(self) -> StoreChanges:
        """Return the changes since the last call of `hashes` or `changes`."""
        stored, removed = set[int](), set[int]()
        for tier in self._tiers:
            for value, is_stored in tier.take_news().items():
                (stored if is_stored else removed).add(value)
        stored |= {value for value in removed if any(value in tier for tier in self._tiers)}
        return StoreChanges(tuple(stored), tuple(removed - stored))

    def wait_until_stored(self, timeout_s: float) -> bool:
        """Wait until all queued blocks are stored or dropped; return False on timeout."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._waiting or self._delayed or self._retentions or self._is_storing), timeout_s
            )

    def close(self) -> None:
        """Stop storing; drop queued blocks."""
        with self._wake:
            self._stopped = True
            self._waiting.clear()
            self._delayed.clear()
            self._wake.notify()
        with self._wake_reader:
            self._wake_reader.notify()
        self._to_read.put(None)
        self._thread.join(_CLOSE_S)
        if self._reader.is_alive():
            self._reader.join(_CLOSE_S)

    def _run(self) -> None:
        next_scan = time.monotonic() + _SCAN_S
        while True:
            with self._wake:
                self._is_storing = False
                self._wake.notify_all()
                delay_s = max((tier.delay_s for tier in self._tiers), default=0.0) if self._delayed else _SCAN_S
                self._wake.wait_for(
                    lambda: self._stopped or self._waiting or self._retentions,
                    max(min(next_scan - time.monotonic(), delay_s), 0),
                )
                if self._stopped:
                    return
                work = [self._waiting.popleft() for _ in range(min(len(self._waiting), 64))]
                is_due = bool(self._delayed) and not any(tier.delay_s for tier in self._tiers)
                due = self._delayed.popleft() if is_due else None
                retentions, self._retentions = self._retentions, {}
                self._is_storing = bool(work or due or retentions)
            for value, retention in retentions.items():
                for tier in self._tiers:
                    tier.retain(value, retention)
            if due is not None:
                self._store(*due, is_delayed=True)
            for block, value in work:
                self._store(block, value)
            if time.monotonic() >= next_scan:
                next_scan = time.monotonic() + _SCAN_S
                for tier in self._tiers:
                    with contextlib.suppress(OSError):
                        tier.scan()

    def _store(self, block: int, value: int, *, is_delayed: bool = False) -> None:
        lacking = []
        for tier in self._tiers:
            if tier.confirm(value):
                continue
            if tier.delay_s or (tier.is_limited and self._delayed and not is_delayed):
                self._delayed.append((block, value))  # behind the blocks that have waited longer
            else:
                lacking.append(tier)
        if not lacking and self._seal is None:
            return
        contents = self._pool.read(block, value)
        if contents is None:
            return
        if self._seal is not None:
            self._seal(block, value, contents)
        for tier in lacking:
            tier.put(value, contents)

    def count(self, metrics: Metrics) -> None:
        """Export the hits, bytes and failures of each tier as metrics."""
        texts = {
            "num_hits": ("worker_kv_tier_hits", "KV blocks fetched."),
            "num_stored": ("worker_kv_tier_stored", "KV blocks stored."),
            "num_evicted": ("worker_kv_tier_evicted", "KV blocks removed to make room."),
            "num_damaged": ("worker_kv_tier_damaged", "KV blocks that failed verification and were removed."),
            "num_errors": ("worker_kv_tier_errors", "Reads and writes that failed."),
            "read_bytes": ("worker_kv_tier_read_bytes", "Bytes read."),
            "written_bytes": ("worker_kv_tier_written_bytes", "Bytes written."),
        }
        for attribute, (name, text) in texts.items():
            counts = {tier.name: partial(getattr, tier, attribute) for tier in self._tiers}
            metrics.counter_of(name, text, counts, "tier")
        text = "KV blocks that had been read when a step needed them."
        metrics.counter_of("worker_kv_tier_read_ahead", text, {"": lambda: self.num_read_ahead})
        blocks = metrics.gauge("worker_kv_tier_blocks", "KV blocks stored at present.", ("tier",))
        for tier in self._tiers:
            blocks.labels(tier.name).set_function(partial(len, tier))


def _remove_left(entry: os.DirEntry[str]) -> None:
    """Remove an incomplete or superfluous file, unless it is so new that a process may still be writing it or its
    block.
    """
    with contextlib.suppress(OSError):
        if time.time() - entry.stat().st_mtime > _INCOMPLETE_S:
            Path(entry.path).unlink()


def _remove_unused(folder: Path, unused_s: float) -> None:
    """Remove kinds that no worker has used for a long time, and leave all other files in the folder."""
    for kind in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if len(bytes.fromhex(kind.name)) == 16 and time.time() - kind.stat().st_mtime > unused_s:
                for path in kind.iterdir():
                    path.unlink()
                kind.rmdir()
