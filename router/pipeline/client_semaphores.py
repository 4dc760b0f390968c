"""Semaphores by client, each kept only while it is in use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class ClientSemaphores:
    """A semaphore with `limit` slots for each client."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._num_users: dict[str, int] = {}

    def num_users(self, client: str) -> int:
        """Return how many callers use the client's semaphore, waiting ones included."""
        return self._num_users.get(client, 0)

    @contextlib.contextmanager
    def use(self, client: str) -> Iterator[asyncio.Semaphore]:
        """Yield the client's semaphore, which exists until its last user is done."""
        semaphore = self._semaphores.get(client)
        if semaphore is None:
            self._semaphores[client] = semaphore = asyncio.Semaphore(self.limit)
        self._num_users[client] = self._num_users.get(client, 0) + 1
        try:
            yield semaphore
        finally:
            self._num_users[client] -= 1
            if not self._num_users[client]:
                del self._num_users[client], self._semaphores[client]
