"""Threads for work that would block the event loop; clients take turns.

In a plain thread pool, a client's work would wait behind all the work that another client has submitted before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from midstream.errors import OverloadedError
from router.authentication import current_caller

_T = TypeVar("_T")


class FairThreads:
    """Runs functions on behalf of the current caller; clients with waiting functions take turns."""

    def __init__(
        self, num_threads: int, name: str, *, num_per_client: int = 0, max_waiting_per_client: int = 0
    ) -> None:
        """Create the pool; threads start on demand.

        Args:
            num_threads: Maximum number of functions that run concurrently.
            num_per_client: Maximum number of running functions of one client; 0 means no limit.
            max_waiting_per_client: Maximum number of waiting functions of one client; 0 means no limit.
        """
        self.num_waiting = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._num_per_client = num_per_client or num_threads
        self._max_waiting_per_client = max_waiting_per_client
        self._running = Counter[str]()
        # Waiting functions by client; the first client that is below its limit is next.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def close(self) -> None:
        """Stop the threads once the running functions have ended."""
        self._threads.shutdown(cancel_futures=True)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in a thread. Raises OverloadedError if too many functions of this client are waiting."""
        client, loop = current_caller.get().name, asyncio.get_running_loop()
        await self._wait(client)
        try:
            work = self._threads.submit(function)
        except BaseException:
            self._release(client)
            raise

        def ended(_: Future[_T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release, client)

        # A thread finishes its function even if its caller was cancelled and no longer waits for the result.
        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    async def _wait(self, client: str) -> None:
        """Wait until a thread is free, and reserve it."""
        if self._num_free and self._running[client] < self._num_per_client and client not in self._waiting:
            self._take(client)
            return
        own = self._waiting.setdefault(client, deque())
        if self._max_waiting_per_client and len(own) >= self._max_waiting_per_client:
            raise OverloadedError("too many requests of this client are waiting for a thread")
        turn = asyncio.get_running_loop().create_future()
        own.append(turn)
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release(client)
            elif turn in self._waiting.get(client, ()):
                self._remove(client, turn)
            raise

    def _take(self, client: str) -> None:
        self._num_free -= 1
        self._running[client] += 1

    def _release(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._start_next()

    def _start_next(self) -> None:
        for client in list(self._waiting):
            if not self._num_free:
                return
            while self._running[client] < self._num_per_client and client in self._waiting:
                turn = self._waiting[client][0]
                self._remove(client, turn)
                if turn.done():  # cancelled, but its task has not run since
                    continue
                if client in self._waiting:  # the client goes to the end of the queue
                    self._waiting[client] = self._waiting.pop(client)
                self._take(client)
                turn.set_result(None)
                break

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        self.num_waiting -= 1
        if not self._waiting[client]:
            del self._waiting[client]
