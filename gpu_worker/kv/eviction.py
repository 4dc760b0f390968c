"""The order in which a tier evicts its blocks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

# As in the pool, blocks that no request asked to keep have this priority.
DEFAULT_PRIORITY, MAX_PRIORITY = 35, 100
_FOREVER_NS = 1 << 63


@dataclass(frozen=True, slots=True)
class Retention:
    """A priority and its end, in nanoseconds since the Unix epoch; by default it holds until the block is evicted."""

    priority: int
    until_ns: int = _FOREVER_NS

    def is_over(self, now_ns: int) -> bool:
        """Return whether the retention has ended, so that the block has the default priority again."""
        return self.until_ns <= now_ns

    def raised(self, other: Retention) -> Retention:
        """Return the retention with the higher priority or, if equal, the later end."""
        return max(self, other, key=lambda item: (item.priority, item.until_ns))


DEFAULT_RETENTION = Retention(DEFAULT_PRIORITY)


class EvictionOrder:
    """Blocks by hash, each with a retention: the lowest priority is evicted first, then the least recently used."""

    def __init__(self) -> None:
        # Priority -> blocks, least recently used first; no entry is empty.
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        self._retentions: dict[int, Retention] = {}
        self._ends: list[tuple[int, int]] = []  # end times of retentions; may include outdated ones

    def __len__(self) -> int:
        return len(self._retentions)

    def __contains__(self, value: int) -> bool:
        return value in self._retentions

    def __iter__(self) -> Iterator[int]:
        return iter(self._retentions)

    def retention(self, value: int) -> Retention | None:
        """Return the retention of a block; None if the block is unknown."""
        return self._retentions.get(value)

    def add(self, value: int, retention: Retention = DEFAULT_RETENTION) -> None:
        """Add a block, or move it to the end of its priority's queue; this replaces its retention."""
        self.remove(value)
        self._retentions[value] = retention
        self._blocks.setdefault(retention.priority, OrderedDict())[value] = None
        if retention.until_ns != _FOREVER_NS:
            heapq.heappush(self._ends, (retention.until_ns, value))
            if len(self._ends) > 2 * len(self) + 64:  # most entries belong to retentions that were replaced
                kept = self._retentions.items()
                self._ends = [(item.until_ns, value) for value, item in kept if item.until_ns != _FOREVER_NS]
                heapq.heapify(self._ends)

    def use(self, value: int) -> None:
        """Mark a block, if it is known, as the most recently used of its priority."""
        retention = self._retentions.get(value)
        if retention is not None:
            self._blocks[retention.priority].move_to_end(value)

    def remove(self, value: int) -> bool:
        """Remove a block; return whether it was there."""
        retention = self._retentions.pop(value, None)
        if retention is None:
            return False
        blocks = self._blocks[retention.priority]
        del blocks[value]
        if not blocks:
            del self._blocks[retention.priority]
        return True

    def first(self, now_ns: int) -> tuple[int, int]:
        """Return the block to evict first, and its priority. Precondition: there is one."""
        self._expire(now_ns)
        priority = min(self._blocks)
        return next(iter(self._blocks[priority])), priority

    def limit_raised(self, max_blocks: int, now_ns: int) -> list[tuple[int, Retention]]:
        """Reset blocks until at most `max_blocks` have a priority above the default: the lowest of these priorities
        first, then the least recently used. Return the blocks that were reset, with the retention that they lost.
        """
        self._expire(now_ns)
        lost: list[tuple[int, Retention]] = []
        raised = sorted(priority for priority in self._blocks if priority > DEFAULT_PRIORITY)
        num_above = sum(len(self._blocks[priority]) for priority in raised) - max_blocks
        for priority in raised:
            for value in list(islice(self._blocks[priority], max(0, num_above - len(lost)))):
                lost.append((value, self._retentions[value]))
                self.add(value)
        return lost

    def _expire(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, value = heapq.heappop(self._ends)
            retention = self._retentions.get(value)
            if retention is not None and retention.until_ns == until_ns:
                self.add(value)
