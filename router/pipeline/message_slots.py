"""Limits on gRPC requests that have not arrived in full: memory for a message is taken as soon as it is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import DecodeError

from midstream.errors import DeadlineError, InvalidArgumentError
from router.authentication import current_caller

# Messages being read at once, in total and of one client; others wait, unread, where HTTP/2's flow control holds them.
_MAX_MESSAGES, _MAX_MESSAGES_PER_CLIENT = 128, 32
_MESSAGE_TIMEOUT_S = 60.0

_MessageT = TypeVar("_MessageT")


class MessageSlots:
    """Reads the messages of a router's unary requests, a limited number at once."""

    def __init__(
        self,
        max_messages: int = _MAX_MESSAGES,
        max_messages_per_client: int = _MAX_MESSAGES_PER_CLIENT,
        timeout_s: float = _MESSAGE_TIMEOUT_S,
    ) -> None:
        self._max_messages_per_client = max_messages_per_client
        self._timeout_s = timeout_s
        self._all = asyncio.Semaphore(max_messages)
        self._by_client: dict[str, asyncio.Semaphore] = {}
        self._users: dict[str, int] = {}

    async def read(self, messages: AsyncIterator[_MessageT]) -> _MessageT:
        """Return the current caller's message.

        Raises:
            DeadlineError: It did not arrive in time.
            InvalidArgumentError: There is none, or it cannot be parsed.
        """
        async with self._slot_of(current_caller.get().name), self._all:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await anext(messages)
            except TimeoutError:
                raise DeadlineError(f"the request did not arrive within {self._timeout_s:g} s") from None
            except DecodeError:
                raise InvalidArgumentError("the request cannot be parsed") from None
            except StopAsyncIteration:
                raise InvalidArgumentError("the call has no request") from None

    @contextlib.asynccontextmanager
    async def _slot_of(self, client: str) -> AsyncIterator[None]:
        slots = self._by_client.setdefault(client, asyncio.Semaphore(self._max_messages_per_client))
        self._users[client] = self._users.get(client, 0) + 1
        try:
            async with slots:
                yield
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._by_client[client]
