"""The core's clock and timers. Timers are not cancelled: a stale one has no effect when it fires."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[int], None]


@dataclass(slots=True)
class Clock:
    """The time of the current event, and the number of steps planned so far, which is the ordinal of the next step."""

    now_ns: int = 0
    num_steps: int = 0


class Timers:
    """A heap of (time, action); the caller passes the time."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action]] = []
        self._count = 0

    @property
    def next_ns(self) -> int | None:
        """Return the time at which the next action is due."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action) -> None:
        """Run `action(now_ns)` at `time_ns`."""
        self._count += 1
        heapq.heappush(self._heap, (time_ns, self._count, action))

    def turn_at(self, time_ns: int) -> None:
        """Schedule a turn at `time_ns`."""
        self.at(time_ns, lambda _: None)

    def run_due(self, now_ns: int) -> None:
        """Run all due actions, including those that they add."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2](now_ns)
