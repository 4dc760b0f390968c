"""An event loop with virtual time: when no callback is ready, the time jumps to the next timer.

Everything that runs belongs to a `Process` of the simulated machines, stored in its context. A callback of a frozen
process waits until the process continues (SIGSTOP, SIGCONT); a dead process runs its callbacks only to clean up,
without effect on other processes.
"""

from __future__ import annotations

import asyncio
import asyncio.base_events
import contextvars
import heapq
import itertools
import random
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

# Unix time at which every simulation begins.
START_S = 1_700_000_000.0
_PURGE_TASKS = 64


class Process:
    """A simulated operating-system process.

    Attributes:
        name: Name of the process and of its machine, which is used in addresses.
        number: Number of the process within the simulation.
        is_dead: Whether it has exited or was killed.
        held: Callbacks held back while it is frozen; None while it runs.
        signals: Handlers of signals such as SIGTERM.
        on_death: Actions of the operating system at its death, such as closing connections.
        wall_shift_s: Offset of its machine's wall clock.
        wall_drift: Relative drift of that clock.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.is_dead = False
        self.exit_code: int | None = None
        self.wall_shift_s = 0.0
        self.wall_drift = random.Random(f"clock of {name}").uniform(-1e-3, 1e-3)
        self.held: deque[Callback] | None = None
        self.signals: dict[int, Callable[[], object]] = {}
        self.on_death: list[Callable[[], None]] = []
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._purge_at = _PURGE_TASKS

    def __repr__(self) -> str:
        return f"{self.name}#{self.number}"

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Add a task to the process."""
        self._tasks[task] = None
        if len(self._tasks) > self._purge_at:
            self.forget_done()
            self._purge_at = 2 * len(self._tasks) + _PURGE_TASKS

    def forget_done(self) -> None:
        """Drop tasks that have ended, so that unretrieved errors are reported."""
        self._tasks = {item: None for item in self._tasks if not item.done()}

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine in the process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, name=name or self.name, context=self.context.copy())

    def die(self, exit_code: int | None = None) -> None:
        """End the process immediately, regardless of what it is doing."""
        if self.is_dead:
            return
        self.thaw()
        self.is_dead, self.exit_code = True, exit_code
        for close in self.on_death:
            close()
        for task in self._tasks:
            task.cancel()

    def freeze(self) -> None:
        """Pause the process, like SIGSTOP."""
        if self.held is None and not self.is_dead:
            self.held = deque()

    def thaw(self) -> None:
        """Continue the process, like SIGCONT."""
        held, self.held = self.held, None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for handle in held or ():
            loop.run_soon(handle)

    def terminate(self) -> None:
        """Run the handler of SIGTERM."""
        handler = self.signals.get(signal.SIGTERM)
        if handler is None:
            self.die()
        else:
            asyncio.get_running_loop().call_soon(handler, context=self.context.copy())

    @property
    def has_tasks(self) -> bool:
        """Return whether any task has not ended."""
        return any(not task.done() for task in self._tasks)


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class StandstillError(AssertionError):
    """No callback is ready and no timer is set, but the simulation has not ended."""


class Callback(asyncio.TimerHandle):
    """A handle without asyncio's debugging support, which would be slow: a simulation spends half of its time in
    callbacks and timers.
    """

    __slots__ = ()
    _callback: Callable[..., object] | None
    _context: contextvars.Context

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        arguments: Sequence[Any],
        context: contextvars.Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = arguments
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self._cancelled = True
        self._callback = None
        self._args = ()


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    """An event loop whose time is in seconds since the start of the simulation."""

    _ready: deque[Callback]
    _stopping: bool
    # The `Sockets` with which the loop creates servers and connections.
    sockets: Any = None
    # Starts a thread that runs a function, and returns a future of its result.
    run_in_thread: Callable[[Callable[[], Any]], asyncio.Future[Any]]

    def __init__(self, resolve: Callable[[str], list[str]]) -> None:
        """Create the loop; `resolve` resolves names after `dns:///`."""
        super().__init__()
        self.now = 0.0
        self.failures: list[str] = []
        self._resolve = resolve
        # Timers, ordered by time and then by order of scheduling.
        self._timers: list[tuple[float, int, Callback]] = []
        self._count = itertools.count()
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Return the seconds since the start of the simulation."""
        return self.now

    def unix_ns(self) -> int:
        """Return the value of `time.time_ns` for the current process."""
        process, now_s = PROCESS.get(), self.now
        if process is not None:
            now_s += now_s * process.wall_drift + process.wall_shift_s
        return int((START_S + now_s) * 1e9)

    def run_soon(self, callback: Callback) -> None:
        """In the next iteration, run a callback that was held back."""
        self._ready.append(callback)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Call back in the next iteration."""
        handle = Callback(self.now, callback, args, context)
        self._ready.append(handle)
        return handle

    # Used by futures.
    get_debug = staticmethod(bool)

    # The same as `call_soon`, since there is only one thread.
    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]  # no type variables here
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Call back after a delay in seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Call back at a time."""
        handle = Callback(when, callback, args, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task, and record the process that it belongs to."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        context = options.get("context")
        process = context.get(PROCESS) if context is not None else PROCESS.get()
        if process is not None:
            process.adopt(task)
        return task

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Call back in the current process when a simulated socket becomes readable."""
        context = contextvars.copy_context()
        fd.watch(lambda: self.call_soon(callback, *args, context=context))

    def remove_reader(self, fd: Any) -> bool:
        """Stop calling back for the socket."""
        fd.watch(lambda: None)
        return True

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run a function in a simulated thread."""
        return self.run_in_thread(lambda: func(*args))

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Set a signal handler of the current process."""
        process = PROCESS.get()
        assert process is not None
        process.signals[sig] = lambda: callback(*args)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen on the simulated network."""
        return self.sockets.listen(protocol_factory, host, port)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect over the simulated network."""
        return await self.sockets.connect(protocol_factory, host, port)

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        """Open a connection that a listening socket has accepted."""
        sock.end.open(protocol_factory)
        return sock.end, sock.end.protocol

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Return machine names as addresses."""
        return [(0, 0, 0, "", (address, port)) for address in self._resolve(host)]

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise StandstillError("all tasks wait, and no timer is set")
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            callback = handle._callback
            if callback is None:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.held is not None:
                process.held.append(handle)
                continue
            try:
                handle._context.run(callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is a defect)
                self.failures.append(f"a callback failed: {error!r}")

    def _note_failure(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context['message']}: {error!r}")


class Flag:
    """An event that wakes a single waiter and is then reset."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the current waiter or, if there is none, the next one."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the flag is set or the timeout expires, and reset the flag."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(max(timeout_s, 0), self.set)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._is_set = False
