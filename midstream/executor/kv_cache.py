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

PRIMARY_LEVEL = 0
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
        tokens: Its tokens.
        lora_id: Task id of the adapter, if there is one.
        cache_level: Always 0, the device.
        priority: Its retention priority; a later change is not reported.
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
    """Blocks can no longer be reused, or were moved to host memory."""

    block_hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class KVCacheEventDiffInt:
    """A change of a number."""

    old_value: int
    new_value: int


@dataclass(frozen=True, slots=True)
class KVCacheUpdatedData:
    """A block was moved, or its priority changed; there are no such events."""

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
        # Hashes of the blocks of each worker group, which are removed when the service says that a cache was cleared.
        self._stored: dict[str, dict[int, None]] = {}
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
            stored = event.stored
            self._stored.setdefault(event.group_id, {}).update(dict.fromkeys(stored.block_hashes))
            size, tokens = stored.tokens_per_block, stored.token_ids
            lora_id = self._lora_id(stored.lora_name)
            priorities = list(stored.priorities) or [_DEFAULT_PRIORITY] * len(stored.block_hashes)
            starts = range(0, len(tokens), size)
            blocks = [
                KVCacheStoredBlockData(
                    block_hash, list(map(UniqueToken, tokens[start : start + size])), lora_id, priority=priority
                )
                for block_hash, start, priority in zip(stored.block_hashes, starts, priorities, strict=True)
            ]
            yield KVCacheStoredData(stored.parent_hash or None, blocks)
        elif event.HasField("removed"):
            for block_hash in event.removed.block_hashes:
                self._stored.get(event.group_id, {}).pop(block_hash, None)
            yield KVCacheRemovedData(list(event.removed.block_hashes))
        else:
            # If the service does not name a group, events were lost, and any of the blocks may be gone.
            groups = [event.group_id] if event.group_id else list(self._stored)
            if gone := [block_hash for group in groups for block_hash in self._stored.pop(group, {})]:
                yield KVCacheRemovedData(gone)
