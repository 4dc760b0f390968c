"""Limits on gRPC requests that have not arrived in full: gRPC allocates a message's memory when reading it begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import DecodeError

from midstream.errors import DeadlineError, InvalidArgumentError, OverloadedError
from midstream.rpc.http2.messages import Messages
from router.authentication import current_caller
from router.pipeline.client_semaphores import ClientSemaphores

# Maximum number of messages being read concurrently, in total and per client. Further messages stay unread, held back
# by HTTP/2's flow control.
_MAX_MESSAGES, _MAX_MESSAGES_PER_CLIENT = 128, 32
_MESSAGE_TIMEOUT_S = 30.0
# Health checks need no credentials, so they have separate slots. Their messages are small and arrive quickly.
_MAX_CHECKS, _MAX_CHECKS_PER_CLIENT = 1024, 32
_CHECK_TIMEOUT_S = 2.0
# Maximum number of requests of one client that wait for a slot, and how long a request waits.
_MAX_WAITING = 1024
_WAIT_S = 5.0
_REFUSAL_INTERVAL_S = 0.005

_MessageT = TypeVar("_MessageT")


class MessageSlots:
    """Reads the messages of a router's unary requests, with a limit on concurrent reads."""

    def __init__(
        self,
        max_messages: int = _MAX_MESSAGES,
        max_messages_per_client: int = _MAX_MESSAGES_PER_CLIENT,
        timeout_s: float = _MESSAGE_TIMEOUT_S,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._requests = _Pool(max_messages, max_messages_per_client, timeout_s, wait_s)
        self._checks = _Pool(_MAX_CHECKS, _MAX_CHECKS_PER_CLIENT, _CHECK_TIMEOUT_S, wait_s)

    async def read(self, messages: AsyncIterator[_MessageT]) -> _MessageT:
        """Return the current caller's message.

        Raises:
            OverloadedError: Too many messages are being read.
            DeadlineError: The message did not arrive in time.
            InvalidArgumentError: The message is missing, or cannot be parsed.
        """
        if isinstance(messages, Messages) and messages.is_next_complete:
            return await anext(messages)  # most messages have arrived together with their call
        caller = current_caller.get()
        # Every caller has a role except in health checks.
        return await (self._requests if caller.roles else self._checks).read(caller.name, messages)


class Refusals:
    """Lets one refused call end at a time.

    Ending a call takes the event loop a fraction of a millisecond. Without this, a thousand calls that began together
    and waited in vain would also end together, and other requests would wait for that.
    """

    def __init__(self, interval_s: float = _REFUSAL_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the next call may end."""
        now = asyncio.get_running_loop().time()
        own = max(self._next, now)
        self._next = own + self._interval_s
        await asyncio.sleep(own - now)


class _Pool:
    def __init__(self, max_messages: int, max_messages_per_client: int, timeout_s: float, wait_s: float) -> None:
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._all = asyncio.Semaphore(max_messages)
        self._by_client = ClientSemaphores(max_messages_per_client)
        self._refusals = Refusals()

    async def read(self, client: str, messages: AsyncIterator[_MessageT]) -> _MessageT:
        """Return a client's message."""
        if self._by_client.num_users(client) >= self._by_client.limit + _MAX_WAITING:
            raise OverloadedError("too many requests of this client are still being received; retry later")
        with self._by_client.use(client) as own:
            await self._acquire(own)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await anext(messages)
            except TimeoutError:
                raise DeadlineError(f"the request did not arrive within {self._timeout_s:g} s") from None
            except DecodeError:
                raise InvalidArgumentError("the request cannot be parsed") from None
            except StopAsyncIteration:
                raise InvalidArgumentError("the call has no request") from None
            finally:
                self._all.release()
                own.release()

    async def _acquire(self, own: asyncio.Semaphore) -> None:
        """Take one of the client's slots and one of the slots that all clients share."""
        if not own.locked() and not self._all.locked():  # neither call waits, so no timeout is needed
            await own.acquire()
            await self._all.acquire()
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await own.acquire()
                try:
                    await self._all.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            await self._refusals.turn()
            raise OverloadedError("too many requests are still being received; retry later") from None
