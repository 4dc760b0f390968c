"""Threads of simulated processes, in virtual time.

Each runs in a thread of the operating system, but only while the event loop waits for it, until it waits itself. A run
is therefore as reproducible as one without threads.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from tests.simulation.loop import PROCESS, Process, VirtualLoop


class ProcessDied(BaseException):
    """The process of a thread has died, so the thread ends where it waits."""


_local = threading.local()


class SimulatedThread:
    """A thread with the interface of `threading.Thread`."""

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "", daemon: bool | None = None
    ) -> None:
        process = PROCESS.get()
        assert process is not None
        self._process: Process = process
        self._name = name
        self._target, self._arguments = target, args
        self._loop = cast("VirtualLoop", asyncio.get_running_loop())
        self._context = process.context.copy()
        self._due: asyncio.Handle | None = None
        self._turn, self._pause = _thread.allocate_lock(), _thread.allocate_lock()
        self._turn.acquire()
        self._pause.acquire()
        self._is_started = self._is_done = False
        self._joining: list[SimulatedThread] = []

    def start(self) -> None:
        """Run the target from the next iteration of the loop on."""
        self._process.on_death.append(self._end)
        self.wake()

    def join(self) -> None:
        """Wait, in another simulated thread, until this one has ended."""
        while not self._is_done:
            thread = current()
            self._joining.append(thread)
            thread.wait(None)

    def wake(self) -> None:
        """End the thread's current wait."""
        if self._due is not None:
            self._due.cancel()
        self._due = self._loop.call_soon(self._run, context=self._process.context.copy())

    def wait(self, timeout_s: float | None) -> None:
        """Let the event loop continue until the time has passed or the thread is woken. Raises ProcessDied."""
        if timeout_s is not None:
            self._due = self._loop.call_later(timeout_s, self._run, context=self._process.context.copy())
        self._pause.release()
        self._turn.acquire()
        self.check_alive()

    def check_alive(self) -> None:
        """Raise ProcessDied if the process has died: it can no longer do anything."""
        if self._process.is_dead:
            raise ProcessDied

    def _end(self) -> None:
        if not self._is_done:
            if self._due is not None:
                self._due.cancel()
            self._due = self._loop.call_soon(self._run, context=contextvars.Context())

    def _run(self) -> None:
        """Let the thread run until it waits or ends."""
        self._due = None
        if self._is_done:
            return
        if self._is_started:
            self._turn.release()
        else:
            self._is_started = True
            threading.Thread(target=self._context.run, args=(self._main,), name=self._name, daemon=True).start()
        self._pause.acquire()

    def _main(self) -> None:
        _local.thread = self
        try:
            self._target(*self._arguments)
        except ProcessDied:
            pass
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is a defect)
            self._loop.failures.append(f"the thread {self._name} failed: {error!r}")
        self._is_done = True
        for thread in self._joining:
            thread.wake()
        self._pause.release()


def run_in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run a function in a new thread; return the future of its result."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def finish(value: Any) -> None:
        if not result.done():
            result.set_result(value)

    def run() -> None:
        value = None
        try:
            value = function()
        finally:
            # A dead process is not waited for.
            loop.call_soon(finish, value)

    SimulatedThread(target=run).start()
    return result


def current() -> SimulatedThread:
    """Return the running thread."""
    thread = _local.thread  # fails in other threads
    assert isinstance(thread, SimulatedThread)
    return thread


def is_current() -> bool:
    """Return whether the running code belongs to such a thread."""
    return hasattr(_local, "thread")


class SimulatedQueue:
    """A queue with the interface of `queue.SimpleQueue`, read by one simulated thread."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader: SimulatedThread | None = None

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        if self._reader is not None:
            self._reader.wake()

    def get(self, timeout: float | None = None) -> Any:
        """Remove and return the next item. Raises queue.Empty after the timeout."""
        if not self._items:
            self._reader = current()
            self._reader.wait(timeout)
            self._reader = None
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Return whether there is no item."""
        return not self._items
