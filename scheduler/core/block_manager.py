"""Owns the KV blocks of one worker group: who holds them, which can be taken, and which go first.

A block is *held* while live sequences refer to it, *cached* when nobody does but its contents can still be found, else
*free*. Free and cached blocks are available: a cached one is evicted when no free one is left, least retention priority
first, then the one that was given back the longest ago.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.prefix_cache import PrefixCache
from scheduler.core.request_spec import DEFAULT_RETENTION_PRIORITY


@dataclass(slots=True)
class BlockCounts:
    """Counts since the group joined."""

    allocated: int = 0  # handed out, reused ones included
    allocated_new: int = 0  # handed out empty
    reused: int = 0
    missed: int = 0  # full prompt blocks that were looked for and not found
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a cached block is kept; without a duration, the priority stands for as long as the block lives."""

    priority: int
    duration_ns: int | None

    def raised(self, other: Retention) -> Retention:
        """Return what keeps a block longer: the higher priority, of equal ones the longer duration."""
        return max(self, other, key=lambda item: (item.priority, item.duration_ns is None, item.duration_ns))


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
        # When the retention of cached blocks ends, and the same as a heap, where entries that no longer hold remain.
        self._expiry_ns: dict[int, int] = {}
        self._expiries: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        """Blocks without contents."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, with contents that can be found."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self._num_cached

    @property
    def is_conserved(self) -> bool:
        """R5, from counters that are kept apart: free + cached + held blocks are all blocks."""
        return len(self._free) + self._num_cached + self.num_held == self.num_blocks

    def occupancy(self, blocks_per_cell: int) -> tuple[list[int], list[int], list[int]]:
        """For each run of so many blocks: how many one sequence holds, how many several do, how many are cached."""
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
        """Sequences that refer to the block."""
        return self._num_owners[block]

    def adopt(self, contents: Iterable[tuple[int, int]], now_ns: int) -> None:
        """Takes blocks that hold what these hashes say as cached, oldest first. No block has been handed out yet."""
        adopted = set[int]()
        for block, value in contents:
            if self.prefix_cache.publish(block, value):
                self._put_cached(block, now_ns)
                adopted.add(block)
        self._free = [block for block in self._free if block not in adopted]

    def allocate(self, count: int, now_ns: int) -> list[int]:
        """Hands out empty blocks with one owner each; evicts cached ones where needed.

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
        """Adds an owner to each block, held or cached."""
        self._expire_retention(now_ns)
        for block in blocks:
            if self._num_owners[block] == 0:
                self._take_cached(block)
                self.num_held += 1
            self._num_owners[block] += 1
            self.counts.allocated += 1
            self.counts.reused += 1

    def release(self, blocks: Iterable[int], now_ns: int) -> None:
        """Takes an owner from each block. Those left without stay cached if they can be found and were computed.

        Hand in the end of a table first: of blocks given back together, the first is evicted first.
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

    def retain(self, block: int, retention: Retention) -> None:
        """Set how long a block with new contents is kept once it is cached; what is not set is the default."""
        self._retention[block] = retention

    def raise_retention(self, block: int, retention: Retention, now_ns: int) -> None:
        """Keep a block that can be found already at least as long as `retention` says, from now on."""
        self._expire_retention(now_ns)
        self._retention[block] = self._retention.get(block, _DEFAULT).raised(retention)
        if block in self._cached_priority:
            self._take_cached(block)
            self._put_cached(block, now_ns)

    def _discard(self, block: int) -> None:
        self.prefix_cache.withdraw(block)
        self._retention.pop(block, None)
        self._free.append(block)

    def _put_cached(self, block: int, now_ns: int) -> None:
        retention = self._retention.get(block, _DEFAULT)
        if retention.duration_ns is not None:
            self._expiry_ns[block] = due_ns = now_ns + retention.duration_ns
            heapq.heappush(self._expiries, (due_ns, block))
            if len(self._expiries) > 2 * self.num_blocks:
                self._expiries = [(due_ns, block) for block, due_ns in self._expiry_ns.items()]
                heapq.heapify(self._expiries)
        self._cached.setdefault(retention.priority, OrderedDict())[block] = None
        self._cached_priority[block] = retention.priority
        self._num_cached += 1

    def _take_cached(self, block: int) -> None:
        priority = self._cached_priority.pop(block)
        blocks = self._cached[priority]
        del blocks[block]
        if not blocks:
            del self._cached[priority]
        self._expiry_ns.pop(block, None)
        self._num_cached -= 1

    def _evict(self, now_ns: int) -> int:
        self._expire_retention(now_ns)
        block = next(iter(self._cached[min(self._cached)]))
        self._take_cached(block)
        self.prefix_cache.withdraw(block)
        self._retention.pop(block, None)
        self.counts.evicted += 1
        return block

    def _expire_retention(self, now_ns: int) -> None:
        """Blocks whose duration is over fall back to the default priority, in the place of one just given back."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            due_ns, block = heapq.heappop(self._expiries)
            if self._expiry_ns.get(block) == due_ns:
                self._take_cached(block)
                del self._retention[block]
                self._put_cached(block, now_ns)

    def check(self, tables: Iterable[Iterable[int]]) -> list[str]:
        """Full check of R5 for tests and idle moments.

        Args:
            tables: Blocks that each live sequence holds.

        Returns:
            What is wrong; empty when all is well.
        """
        owners = [0] * self.num_blocks
        for table in tables:
            for block in table:
                owners[block] += 1
        problems = [
            f"block {block} has {count} owners, {self._num_owners[block]} are counted"
            for block, count in enumerate(owners)
            if count != self._num_owners[block]
        ]
        places = self._free + list(self._cached_priority) + [block for block, count in enumerate(owners) if count]
        if sorted(places) != list(range(self.num_blocks)):
            problems.append("free, cached and held blocks are not each block once")
        if not self.is_conserved:
            problems.append(f"{self.num_free} free + {self._num_cached} cached + {self.num_held} held")
        problems += [
            f"cached block {b} cannot be found" for b in self._cached_priority if not self.prefix_cache.contains(b)
        ]
        return problems
