"""Limits how many requests of one client start at the same time.

All requests share the event loop. Without this limit, if another client sent a thousand requests at once, a request
would wait for a step of each of them, again and again, until it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from midstream.errors import DeadlineError
from router.pipeline.client_semaphores import ClientSemaphores

_MAX_STARTS_PER_CLIENT = 16
# Slots are held no longer than this: a start that takes longer waits for another component, and does not load the event
# loop.
_HOLD_S = 0.5


class StartSlots:
    """Lets a few requests of each client start concurrently; the others wait in order of arrival."""

    def __init__(self, max_starts_per_client: int = _MAX_STARTS_PER_CLIENT, hold_s: float = _HOLD_S) -> None:
        self._hold_s = hold_s
        self._by_client = ClientSemaphores(max_starts_per_client)

    @contextlib.asynccontextmanager
    async def hold(self, client: str, deadline: float | None = None) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the context ends, but not longer than `hold_s`.

        Raises:
            DeadlineError: There was no slot before `deadline`, an event-loop time.
        """
        with self._by_client.use(client) as slots:
            if slots.locked():
                await _acquire(slots, deadline)
            else:
                await slots.acquire()  # does not wait, so that no timeout is needed
            held = [slots]

            def release() -> None:
                if held:
                    held.pop().release()

            timer = asyncio.get_running_loop().call_later(self._hold_s, release)
            try:
                yield
            finally:
                timer.cancel()
                release()


async def _acquire(slots: asyncio.Semaphore, deadline: float | None) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await slots.acquire()
    except TimeoutError:
        raise DeadlineError("the deadline passed while earlier requests of this client were starting") from None
