"""Limits how many requests of one client start at the same time.

All requests share the event loop. Without this limit, if another client sent a thousand requests at once, a request
would wait for a step of each of them, again and again, until it has started.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from midstream.errors import DeadlineError
from router.pipeline.deadlines import until

# A client is alone if no other one has started a request for this long.
_ALONE_S = 1.0
# Slots are held no longer than this: a start that takes longer waits for another component, and does not load the event
# loop.
_HOLD_S = 0.5


class StartSlots:
    """Lets a few requests of each client start concurrently; the others wait in order of arrival."""

    def __init__(
        self,
        max_starts_per_client: int,
        max_starts_alone: int = 0,
        hold_s: float = _HOLD_S,
    ) -> None:
        """`max_starts_alone`, if higher, is the limit for a client while no other client starts requests."""
        self._max_starts_per_client = max_starts_per_client
        self._max_starts_alone = max(max_starts_alone, max_starts_per_client)
        self._hold_s = hold_s
        self._by_client: dict[str, _Starts] = {}
        self._last_client = ""
        self._alone_from = 0.0  # event-loop time

    def hold(self, client: str, deadline: float | None = None) -> Start:
        """Return a context that waits for a slot, and holds it until it ends, but not longer than `hold_s`.

        On entry, it raises DeadlineError if there was no slot before `deadline`, an event-loop time.
        """
        return Start(self, client, deadline)

    def enter(self, client: str) -> _Starts:
        """Return the client's starts; they are dropped when its last start has left."""
        if client != self._last_client:
            if self._last_client:
                self._alone_from = asyncio.get_running_loop().time() + _ALONE_S
            self._last_client = client
        starts = self._by_client.get(client)
        if starts is None:
            starts = self._by_client[client] = _Starts(self.limit, self._hold_s)
        starts.num_users += 1
        return starts

    def limit(self, now: float) -> int:
        """Return how many requests of a client may start at the same time."""
        return self._max_starts_alone if now >= self._alone_from else self._max_starts_per_client

    def leave(self, client: str) -> None:
        """Record that a start has ended."""
        starts = self._by_client[client]
        starts.num_users -= 1
        if not starts.num_users:
            del self._by_client[client]


class Start:
    """The start of one request, as a context."""

    __slots__ = ("_client", "_deadline", "_slots", "_starts")

    def __init__(self, slots: StartSlots, client: str, deadline: float | None) -> None:
        self._slots = slots
        self._client = client
        self._deadline = deadline

    async def __aenter__(self) -> None:
        self._starts = self._slots.enter(self._client)
        if self._starts.take(self):
            return
        try:
            async with until(self._deadline):
                await self._starts.wait(self)
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, TimeoutError):
                message = "the deadline passed while earlier requests of this client were starting"
                raise DeadlineError(message) from None
            raise

    async def __aexit__(self, *_: object) -> None:
        self._starts.give_back(self)
        self._slots.leave(self._client)


class _Starts:
    """The starts of one client.

    Attributes:
        num_users: Number of requests that start or wait.
    """

    def __init__(self, limit: Callable[[float], int], hold_s: float) -> None:
        self.num_users = 0
        self._limit = limit
        self._hold_s = hold_s
        # Starts that hold a slot, and the time at which each loses it, earliest first.
        self._holders: dict[Start, float] = {}
        self._waiting: deque[tuple[Start, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None  # only while others wait

    def take(self, start: Start) -> bool:
        """Take a slot; return whether there was one."""
        now = asyncio.get_running_loop().time()
        limit = self._limit(now)
        if len(self._holders) >= limit:
            self._drop_late(now)
        if self._waiting or len(self._holders) >= limit:
            return False
        self._holders[start] = now + self._hold_s
        return True

    async def wait(self, start: Start) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((start, turn))
        self._look_later()
        await turn

    def give_back(self, start: Start) -> None:
        """Release the slot of a start, if it holds one."""
        if self._holders.pop(start, None) is not None:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give free slots to waiting starts."""
        now = asyncio.get_running_loop().time()
        limit = self._limit(now)
        while self._waiting and len(self._holders) < limit:
            start, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._holders[start] = now + self._hold_s
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._timer is None:
            first = next(iter(self._holders.values()))
            self._timer = asyncio.get_running_loop().call_at(first, self._look)

    def _look(self) -> None:
        """Pass on the slots of starts that have held them for too long."""
        self._timer = None
        self._drop_late(asyncio.get_running_loop().time())
        self._pass_on()
        if self._waiting:
            self._look_later()

    def _drop_late(self, now: float) -> None:
        for start, due in list(self._holders.items()):
            if due > now:
                break
            del self._holders[start]
