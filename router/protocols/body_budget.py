"""Limits on the memory used by incomplete request bodies, in total and per client."""

from __future__ import annotations

import asyncio
from collections import Counter

from midstream.errors import OverloadedError
from midstream.model.folder import ModelFolder
from router.pipeline.client_semaphores import ClientSemaphores

# Bytes for everything but the prompt (such as guides and tools), and bytes per token of the context in the most verbose
# JSON.
_FIXED_BYTES, _BYTES_PER_TOKEN = 2 << 20, 128
# Additional bytes for the images of a request.
_IMAGE_BYTES = 32 << 20
# The budget is this number of bodies of maximum size, in total and for one client.
_BODIES, _BODIES_PER_CLIENT = 16, 4
_RETRY_AFTER_MS = 500
# A body whose length is known waits up to this long for room in the budget before it is refused.
WAIT_S = 5.0


def max_body_bytes(model: ModelFolder, configured: int, max_message_bytes: int) -> int:
    """Return the size limit of HTTP bodies: the configured one, or one derived from the model's context length."""
    by_context = _FIXED_BYTES + _BYTES_PER_TOKEN * model.max_sequence_length + _image_bytes(model)
    return min(configured or by_context, max_message_bytes)


def max_request_bytes(model: ModelFolder, max_message_bytes: int) -> int:
    """Return the size limit of gRPC requests; it allows for prompts given as float32 embeddings."""
    by_context = (4 << 20) + (4 * model.hidden_size + _BYTES_PER_TOKEN) * model.max_sequence_length
    return min(by_context + _image_bytes(model), max_message_bytes)


def _image_bytes(model: ModelFolder) -> int:
    return 0 if model.image_token_id is None else _IMAGE_BYTES


class BodyBudget:
    """Counts the bytes of request bodies that are in memory."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.num_bytes = 0
        self._by_client: Counter[str] = Counter()
        # The first waiting body of each client blocks its client's other bodies until there is room.
        self._turns = ClientSemaphores(1)
        self._removed = asyncio.Event()

    def hold(self, client: str) -> HeldBody:
        """Return an account of the bytes of one body; use it as a context manager."""
        return HeldBody(self, client)

    async def reserve(self, client: str, num_bytes: int) -> None:
        """Count bytes that are yet to arrive, once the budget allows it and earlier bodies of the client are counted.
        Raises OverloadedError if that takes longer than WAIT_S.
        """
        if not self._turns.num_users(client) and self._has_room(client, num_bytes):
            self._count(client, num_bytes)
            return
        try:
            with self._turns.use(client) as turn:
                async with asyncio.timeout(WAIT_S), turn:
                    while not self._has_room(client, num_bytes):
                        await self._removed.wait()
                    self._count(client, num_bytes)
        except TimeoutError:
            raise _exhausted() from None

    def add(self, client: str, num_bytes: int) -> None:
        """Count bytes. Raises OverloadedError if the budget is exhausted."""
        if not self._has_room(client, num_bytes):
            raise _exhausted()
        self._count(client, num_bytes)

    def remove(self, client: str, num_bytes: int) -> None:
        self._count(client, -num_bytes)
        if not self._by_client[client]:
            del self._by_client[client]
        self._removed.set()
        self._removed = asyncio.Event()

    def _has_room(self, client: str, num_bytes: int) -> bool:
        return (
            self.num_bytes + num_bytes <= _BODIES * self.max_body_bytes
            and self._by_client[client] + num_bytes <= _BODIES_PER_CLIENT * self.max_body_bytes
        )

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes


def _exhausted() -> OverloadedError:
    return OverloadedError("too many bytes of incomplete requests in memory", retry_after_ms=_RETRY_AFTER_MS)


class HeldBody:
    """The bytes of one body, which are counted until the context ends."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    def __enter__(self) -> HeldBody:
        return self

    async def reserve(self, num_bytes: int) -> None:
        """Count bytes before they arrive. Raises OverloadedError if the budget stays exhausted."""
        await self._budget.reserve(self._client, num_bytes)
        self._num_bytes += num_bytes

    def grow_to(self, num_bytes: int) -> None:
        """Count the bytes of this body that have arrived so far. Raises OverloadedError if the budget for all bodies is
        exhausted.
        """
        if num_bytes > self._num_bytes:
            self._budget.add(self._client, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def __exit__(self, *_: object) -> None:
        self._budget.remove(self._client, self._num_bytes)
