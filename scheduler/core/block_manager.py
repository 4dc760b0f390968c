"""Manages the KV blocks of one worker group: ownership, allocation and eviction order.

A block is *held* while live sequences refer to it, *cached* when no sequence does but its contents can still be found,
and otherwise *free*. Free and cached blocks are available: a cached one is evicted when no free one is left, lowest
retention priority first, then the least recently released.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from midstream.record import record
from scheduler.core.prefix_cache import PrefixCache
from scheduler.core.request_spec import DEFAULT_RETENTION_PRIORITY


@dataclass(slots=True)
class BlockCounts:
    """Counters since the group joined."""

    allocated: int = 0  # including reused blocks
    allocated_new: int = 0  # excluding reused blocks
    reused: int = 0
    missed: int = 0  # full prompt blocks that were looked up and not found
    evicted: int = 0


@record
class Retention:
    """Retention priority of a cached block; without a duration, it holds until the block is evicted."""

    priority: int
    duration_ns: int | None

    def raised(self, other: Retention) -> Retention:
        """Return the stronger of two retentions: the one with the higher priority or, if equal, with the longer
        duration.
        """
        return max(self, other, key=lambda item: (item.priority, item.duration_ns is None, item.duration_ns))

    @property
    def num_ms(self) -> int:
        """The duration in milliseconds, at least 1; 0 if there is none."""
        return 0 if self.duration_ns is None else max(1, self.duration_ns // 1_000_000)


_DEFAULT = Retention(DEFAULT_RETENTION_PRIORITY, None)


class BlockManager:
    """Blocks 0..num_blocks-1 of one worker group."""

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.counts = BlockCounts()
        self.num_held = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_owners = [0] * num_blocks
        self._num_cached = 0
        # Retention priority -> blocks, oldest first; no entry is empty.
        self._cached: dict[int, OrderedDict[int, None]] = {}
        self._cached_priority: dict[int, int] = {}
        self._retention: dict[int, Retention] = {}
        # Hash -> retention of blocks that were retained or released since the last step, for the worker's tiers.
        self._retained: dict[int, Retention] = {}
        # Times at which the retention of cached blocks ends, and the same times as a heap, which may contain stale
        # entries.
        self._expiry_ns: dict[int, int] = {}
        self._expiries: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Number of blocks without contents."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks without an owner whose contents are still findable."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._free) + self._num_cached

    @property
    def is_conserved(self) -> bool:
        """Return whether no block is lost or counted twice: free + cached + held == num_blocks, from independent
        counters.
        """
        return len(self._free) + self._num_cached + self.num_held == self.num_blocks

    def occupancy(self, blocks_per_cell: int) -> tuple[list[int], list[int], list[int]]:
        """Return, for each run of `blocks_per_cell` blocks, the numbers of blocks with one owner, with several owners,
        and cached.
        """
        owners, size = self._num_owners, blocks_per_cell
        held, shared = list[int](), list[int]()
        for start in range(0, self.num_blocks, size):
            cell = owners[start : start + size]
            num_held_by_one = cell.count(1)
            held.append(num_held_by_one)
            shared.append(len(cell) - cell.count(0) - num_held_by_one)
        cached = [0] * len(held)
        for block in self._cached_priority:
            cached[block // size] += 1
        return held, shared, cached

    def num_owners(self, block: int) -> int:
        """Return the number of sequences that refer to the block."""
        return self._num_owners[block]

    def num_cached_of(self, blocks: Iterable[int]) -> int:
        """Return how many of these findable blocks are cached, that is, not held by a live sequence."""
        return sum(map(self._cached_priority.__contains__, blocks))

    def adopt(self, contents: Iterable[tuple[int, int]], now_ns: int) -> None:
        """Register (block, content hash) pairs as cached, oldest first. Precondition: no block has been allocated
        yet.
        """
        adopted = set[int]()
        for block, value in contents:
            if self.prefix_cache.publish(block, value):
                self._put_cached(block, now_ns)
                adopted.add(block)
        self._free = [block for block in self._free if block not in adopted]

    def allocate(self, count: int, now_ns: int) -> list[int]:
        """Allocate empty blocks with one owner each; evict cached blocks if needed.

        Precondition: `count <= num_available`.
        """
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict(now_ns)
            self._num_owners[block] = 1
            blocks.append(block)
        self.num_held += count
        self.counts.allocated += count
        self.counts.allocated_new += count
        return blocks

    def share(self, blocks: Iterable[int], now_ns: int) -> None:
        """Add an owner to each block, whether held or cached."""
        self._expire_retention(now_ns)
        for block in blocks:
            if self._num_owners[block] == 0:
                self._take_cached(block)
                self.num_held += 1
            self._num_owners[block] += 1
            self.counts.allocated += 1
            self.counts.reused += 1

    def release(self, blocks: Iterable[int], now_ns: int) -> None:
        """Remove an owner from each block. A block without owners stays cached if it is findable and was computed.

        Pass the last blocks of a table first: of blocks released together, the first one is evicted first.
        """
        for block in blocks:
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            self.num_held -= 1
            if self.prefix_cache.contains(block) and not self.prefix_cache.is_pending(block):
                self._put_cached(block, now_ns)
            else:
                self._discard(block)

    def withdraw(self, block: int) -> None:
        """Make a block unfindable, because it was not computed; free it if it is cached."""
        if block in self._cached_priority:
            self._take_cached(block)
            self._discard(block)
        else:
            self.prefix_cache.withdraw(block)

    def retain(self, block: int, retention: Retention) -> None:
        """Set the retention of a block with new contents; it applies once the block is cached."""
        self._retention[block] = retention
        self._note_retained(block)

    def raise_retention(self, block: int, retention: Retention, now_ns: int) -> None:
        """Raise the retention of a block that is already findable to at least `retention`, from now on."""
        self._expire_retention(now_ns)
        before = self._retention.get(block, _DEFAULT)
        self._retention[block] = raised = before.raised(retention)
        if raised.priority != before.priority:
            self.prefix_cache.note_priority(block, raised.priority)
        self._note_retained(block)
        if block in self._cached_priority:
            self._take_cached(block)
            self._put_cached(block, now_ns)

    def priorities_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Return the retention priorities of blocks; empty if all have the default."""
        if not self._retention:
            return ()
        found = tuple([self._retention.get(block, _DEFAULT).priority for block in blocks])
        return found if any(priority != DEFAULT_RETENTION_PRIORITY for priority in found) else ()

    def _note_retained(self, block: int) -> None:
        value = self.prefix_cache.hash_of(block)
        if value is not None:
            self._retained[value] = self._retention[block]

    def take_retained(self) -> dict[int, Retention]:
        """Return the retentions that were set, or whose durations started, since the last call, by block hash."""
        retained, self._retained = self._retained, {}
        return retained

    def _discard(self, block: int) -> None:
        self.prefix_cache.withdraw(block)
        self._retention.pop(block, None)
        self._free.append(block)

    def _put_cached(self, block: int, now_ns: int) -> None:
        retention = self._retention.get(block, _DEFAULT)
        if retention.duration_ns is not None:
            self._note_retained(block)  # its duration starts now
            self._expiry_ns[block] = due_ns = now_ns + retention.duration_ns
            heapq.heappush(self._expiries, (due_ns, block))
            if len(self._expiries) > 2 * self.num_blocks:
                self._expiries = [(due_ns, block) for block, due_ns in self._expiry_ns.items()]
                heapq.heapify(self._expiries)
        self._cached.setdefault(retention.priority, OrderedDict())[block] = None
        self._cached_priority[block] = retention.priority
        self._num_cached += 1
        self.prefix_cache.lookups.note_block(block)

    def _take_cached(self, block: int) -> None:
        priority = self._cached_priority.pop(block)
        blocks = self._cached[priority]
        del blocks[block]
        if not blocks:
            del self._cached[priority]
        self._expiry_ns.pop(block, None)
        self._num_cached -= 1
        self.prefix_cache.lookups.note_block(block)

    def _evict(self, now_ns: int) -> int:
        self._expire_retention(now_ns)
        block = next(iter(self._cached[min(self._cached)]))
        self._take_cached(block)
        self.prefix_cache.withdraw(block)
        self._retention.pop(block, None)
        self.counts.evicted += 1
        return block

    def _expire_retention(self, now_ns: int) -> None:
        """Reset blocks whose retention has expired to the default priority, as if they had just been released."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            due_ns, block = heapq.heappop(self._expiries)
            if self._expiry_ns.get(block) == due_ns:
                self._take_cached(block)
                del self._retention[block]
                self._put_cached(block, now_ns)

    def check(self, tables: Iterable[Iterable[int]]) -> list[str]:
        """Check exhaustively that no block is lost or counted twice; used in tests.

        Args:
            tables: The blocks of each live sequence.

        Returns:
            The problems found; empty if none.
        """
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        problems = [
            f"block {block} has {count} owners, but its counter is {self._num_owners[block]}"
            for block, count in enumerate(owners)
            if count != self._num_owners[block]
        ]
        places = self._free + list(self._cached_priority) + [block for block, count in enumerate(owners) if count]
        if sorted(places) != list(range(self.num_blocks)):
            problems.append("free, cached and held blocks do not partition all blocks")
        if not self.is_conserved:
            problems.append(f"{self.num_free} free + {self._num_cached} cached + {self.num_held} held")
        problems += [
            f"cached block {b} cannot be found" for b in self._cached_priority if not self.prefix_cache.contains(b)
        ]
        return problems
