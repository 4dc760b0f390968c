"""Events of the KV cache: TensorRT-LLM's `tensorrt_llm.bindings.executor.kv_cache`."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from protos import stats_pb2

PRIMARY_LEVEL, SECONDARY_LEVEL = 0, 1
_DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class KVCacheCreatedData:
    """The cache was created, with these numbers of blocks on the device and in host memory."""

    num_blocks_per_cache_level: Sequence[int]


@dataclass(frozen=True, slots=True)
class UniqueToken:
    """A token of a block; `token_extra_id` is always 0."""

    token_id: int
    token_extra_id: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheStoredBlockData:
    """A block that can be reused from now on.

    Attributes:
        block_hash: Hash of its tokens and all tokens before them.
        tokens: Its tokens; empty if the block is older than the scheduler.
        lora_id: Task id of the adapter, if there is one.
        cache_level: 0, the device's pool.
        priority: Its retention priority.
    """

    block_hash: int
    tokens: Sequence[UniqueToken]
    lora_id: int | None = None
    cache_level: int = PRIMARY_LEVEL
    priority: int = _DEFAULT_PRIORITY


@dataclass(frozen=True, slots=True)
class KVCacheStoredData:
    """Consecutive blocks were stored. `parent_hash` is that of the block before them; None at the beginning of a
    prompt.
    """

    parent_hash: int | None
    blocks: Sequence[KVCacheStoredBlockData]


@dataclass(frozen=True, slots=True)
class KVCacheRemovedData:
    """Blocks can no longer be reused."""

    block_hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVCacheEventDiffInt:
    """A change of a number."""

    old_value: int
    new_value: int


@dataclass(frozen=True, slots=True)
class KVCacheUpdatedData:
    """A block was moved between the pool, level 0, and host memory or disk, level 1; or its priority was raised."""

    block_hash: int
    cache_level: KVCacheEventDiffInt | None = None
    priority: KVCacheEventDiffInt | None = None


KVCacheEventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """One event.

    Attributes:
        event_id: Number of the event, from 0.
        data: What happened.
        window_size: Number of tokens that attention can see.
        attention_dp_rank: Always None.
    """

    event_id: int
    data: KVCacheEventData
    window_size: int
    attention_dp_rank: int | None = None


class KVCacheEventManager:
    """The latest events of an executor's KV caches, oldest first; the oldest are dropped if there are too many."""

    def __init__(
        self, max_events: int, num_blocks: Sequence[int], window_size: int, lora_id: Callable[[str], int | None]
    ) -> None:
        """Begin with the event that a cache was created.

        Args:
            max_events: Number of events that are kept until they are read.
            num_blocks: As in KVCacheCreatedData.
            window_size: As in KVCacheEvent.
            lora_id: Returns the task id of an adapter.
        """
        self._lora_id = lora_id
        self._condition = threading.Condition()
        self._events: deque[KVCacheEvent] = deque(maxlen=max_events)
        self._ids = itertools.count()
        self._window_size = window_size
        # By worker group and hash: the level and the priority of each block that was reported.
        self._stored: dict[str, dict[int, tuple[int, int]]] = {}
        self._is_open = True
        self._append(KVCacheCreatedData(num_blocks))

    def get_latest_events(self, timeout: timedelta | float | None = None) -> deque[KVCacheEvent]:
        """Return the events since the last call. Wait until there is one, at most for `timeout`, a duration or a number
        of seconds; once the executor is shut down, return those that are left.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._condition:
            while not self._events and self._is_open:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._condition.wait(left)
            found = self._events.copy()
            self._events.clear()
            return found

    def add(self, events: Iterable[stats_pb2.KvEvent]) -> None:
        """Add events of the service."""
        with self._condition:
            for event in events:
                for data in self._converted(event):
                    self._append(data)
            self._condition.notify_all()

    def close(self) -> None:
        """Wake threads that wait for events."""
        with self._condition:
            self._is_open = False
            self._condition.notify_all()

    def _append(self, data: KVCacheEventData) -> None:
        if isinstance(data, KVCacheRemovedData) and self._events:
            last = self._events[-1]
            if isinstance(last.data, KVCacheRemovedData):  # as in TensorRT-LLM, removals that follow each other are one
                joined = KVCacheRemovedData([*last.data.block_hashes, *data.block_hashes])
                self._events[-1] = KVCacheEvent(last.event_id, joined, self._window_size)
                return
        self._events.append(KVCacheEvent(next(self._ids), data, self._window_size))

    def _converted(self, event: stats_pb2.KvEvent) -> Iterator[KVCacheEventData]:
        if event.HasField("stored"):
            yield from self._stored_or_back(event.stored, self._stored.setdefault(event.group_id, {}))
        elif event.HasField("updated"):
            yield from _updated(event.updated, self._stored.setdefault(event.group_id, {}))
        elif event.HasField("removed"):
            for block_hash in event.removed.block_hashes:
                self._stored.get(event.group_id, {}).pop(block_hash, None)
            yield KVCacheRemovedData(list(event.removed.block_hashes))
        else:
            # If the service does not name a group, events were lost, and any of the blocks may be gone.
            groups = [event.group_id] if event.group_id else list(self._stored)
            if gone := [block_hash for group in groups for block_hash in self._stored.pop(group, {})]:
                yield KVCacheRemovedData(gone)

    def _stored_or_back(
        self, stored: stats_pb2.KvBlocksStored, known: dict[int, tuple[int, int]]
    ) -> Iterator[KVCacheEventData]:
        """Yield the blocks that were in host memory as moved, and the others as stored."""
        size, tokens, hashes = stored.tokens_per_block, stored.token_ids, stored.block_hashes
        lora_id = self._lora_id(stored.lora_name)
        priorities = list(stored.priorities) or [_DEFAULT_PRIORITY] * len(hashes)
        blocks = [
            KVCacheStoredBlockData(
                block_hash, [UniqueToken(token) for token in tokens[index * size : (index + 1) * size]], lora_id,
                priority=priorities[index],
            )
            for index, block_hash in enumerate(hashes)
        ]  # fmt: skip
        parent: int | None = stored.parent_hash or None
        for is_back, run in itertools.groupby(blocks, lambda block: known.get(block.block_hash, _NEW)[0] > 0):
            part = list(run)
            if is_back:
                yield from (KVCacheUpdatedData(block.block_hash, _UP) for block in part)
            else:
                yield KVCacheStoredData(parent, part)
            parent = part[-1].block_hash
        known.update((block.block_hash, (PRIMARY_LEVEL, block.priority)) for block in blocks)


_NEW = (PRIMARY_LEVEL, _DEFAULT_PRIORITY)
_UP, _DOWN = KVCacheEventDiffInt(SECONDARY_LEVEL, PRIMARY_LEVEL), KVCacheEventDiffInt(PRIMARY_LEVEL, SECONDARY_LEVEL)


def _updated(updated: stats_pb2.KvBlocksUpdated, known: dict[int, tuple[int, int]]) -> Iterator[KVCacheUpdatedData]:
    for block_hash in updated.block_hashes:
        level, priority = known.get(block_hash, _NEW)
        known[block_hash] = (
            updated.cache_level if updated.HasField("cache_level") else level,
            updated.priority if updated.HasField("priority") else priority,
        )
        new_level, new_priority = known[block_hash]
        yield KVCacheUpdatedData(
            block_hash,
            _DOWN if new_level > level else None,
            KVCacheEventDiffInt(priority, new_priority) if new_priority != priority else None,
        )
