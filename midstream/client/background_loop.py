"""An event loop in a background thread, in which synchronous code runs coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from midstream.errors import AbortedError, InvalidArgumentError

_T = TypeVar("_T")


class BackgroundLoop:
    """Runs coroutines in a dedicated thread, for any number of other threads."""

    def __init__(self, owner: str) -> None:
        """Start the thread; `owner` names the object that uses it in error messages."""
        self._owner = owner
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"midstream-{owner}", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start a coroutine, and return its future.

        Raises:
            InvalidArgumentError: The loop is closed, or this is a forked process, where its thread does not exist.
        """
        with self._lock:
            if not self._is_closed and os.getpid() == self._process:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        if os.getpid() != self._process:
            problem = "does not work in a forked process, nor does gRPC; use multiprocessing's start method spawn"
        else:
            problem = "is closed; create another one"
        raise InvalidArgumentError(problem, field=self._owner)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and return its result.

        Raises:
            InvalidArgumentError: As in `start`.
            AbortedError: The loop was closed before the coroutine ended.
        """
        future = self.start(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise AbortedError(f"the {self._owner} was closed") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, call: Callable[[], object]) -> None:
        """Call a function in the thread, without waiting for it; no effect once the loop is closed.

        Finalizers can use this, because it takes no lock: they run in any thread, including the loop's own and a thread
        that holds the lock.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run `last`, cancel all other coroutines, and end the thread. No effect if the loop is closed, or in a forked
        process.
        """
        with self._lock:
            closes = not self._is_closed and os.getpid() == self._process
            self._is_closed |= closes
        if not closes:
            if last is not None:
                last.close()
            return
        asyncio.run_coroutine_threadsafe(_end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end(last: Coroutine[Any, Any, object] | None) -> None:
    try:
        if last is not None:
            await last
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
