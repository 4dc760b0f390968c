"""The core's clock and timers. A stale timer has no effect when it fires, so only timers that would otherwise stay for
a long time are cancelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[int], None]
# Number of cancelled timers to keep, in addition to one per other timer.
_MAX_CANCELLED = 64


@dataclass(slots=True)
class Clock:
    """The time of the current event, and the number of steps planned so far, which is the ordinal of the next step."""

    now_ns: int = 0
    num_steps: int = 0


class Timers:
    """A heap of (time, action); the caller passes the time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action]] = []
        self._cancelled = set[int]()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of entries, including those of cancelled timers that are still kept."""
        return len(self._heap)

    @property
    def next_ns(self) -> int | None:
        """Return the time at which the next action is due."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action) -> int:
        """Run `action(now_ns)` at `time_ns`; return a number for `cancel`."""
        self._count += 1
        heapq.heappush(self._heap, (time_ns, self._count, action))
        return self._count

    def cancel(self, number: int) -> None:
        """Cancel an action; no effect if it has already run."""
        self._cancelled.add(number)
        if len(self._cancelled) > len(self._heap) // 2 + _MAX_CANCELLED:
            self._heap = [entry for entry in self._heap if entry[1] not in self._cancelled]
            heapq.heapify(self._heap)
            self._cancelled.clear()

    def turn_at(self, time_ns: int) -> None:
        """Schedule a turn at `time_ns`."""
        self.at(time_ns, lambda _: None)

    def run_due(self, now_ns: int) -> None:
        """Run all due actions, including due actions that these add."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, number, action = heapq.heappop(self._heap)
            if number in self._cancelled:
                self._cancelled.discard(number)
            else:
                action(now_ns)
