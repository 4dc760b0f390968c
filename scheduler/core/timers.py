"""The time as the core knows it, and things to do at a time; cancelled by being harmless when they come up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[int], None]


@dataclass(slots=True)
class Clock:
    """The time of the event at hand."""

    now_ns: int = 0


class Timers:
    """A heap of (time, action); time is handed in, never read."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action]] = []
        self._count = 0

    @property
    def next_ns(self) -> int | None:
        """When the next action is due."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action) -> None:
        """Runs `action(now_ns)` once it is `time_ns`."""
        self._count += 1
        heapq.heappush(self._heap, (time_ns, self._count, action))

    def run_due(self, now_ns: int) -> None:
        """Runs everything that is due, what that adds included."""
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2](now_ns)
