"""Limits how many tasks continue in one iteration of the event loop.

A step has output for hundreds of streams. If all their tasks ran in one iteration, a new request would wait for tens of
milliseconds each time that it yields to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

_MAX_PER_ITERATION = 16

Waiter = asyncio.Future[None]


class Wakeups:
    """Wakes the tasks that wait for output; clients with waiting output take turns."""

    def __init__(self, max_per_iteration: int = _MAX_PER_ITERATION) -> None:
        self._max_per_iteration = max_per_iteration
        self._num_left = max_per_iteration  # in this iteration
        self._is_scheduled = False
        self._waiting: dict[str, deque[Waiter]] = {}  # by client; the first client is next

    def wake(self, client: str, waiter: Waiter) -> None:
        """Wake a task of a client now, or in one of the next iterations."""
        if not self._is_scheduled:
            self._schedule()
        if self._num_left and not self._waiting:
            self._num_left -= 1
            wake_now(waiter)
        else:
            self._waiting.setdefault(client, deque()).append(waiter)

    def _next(self) -> None:
        """Begin an iteration."""
        self._num_left = self._max_per_iteration
        while self._waiting and self._num_left:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            wake_now(own.popleft())
            self._num_left -= 1
            if own:
                self._waiting[client] = own
        self._is_scheduled = False
        if self._num_left < self._max_per_iteration:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._next)


def wake_now(waiter: Waiter) -> None:
    """Wake a task that still waits."""
    if not waiter.done():
        waiter.set_result(None)
