"""Limits on the memory used by incomplete request bodies, in total and per client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from midstream.errors import OverloadedError
from midstream.model.folder import ModelFolder

# Bytes for everything but the prompt (such as guides and tools), and bytes per token of the context in the most verbose
# JSON.
_FIXED_BYTES, _BYTES_PER_TOKEN = 2 << 20, 128
# Additional bytes for the images of a request.
_IMAGE_BYTES = 32 << 20
# The budget is this number of bodies of maximum size, in total and for one client.
_BODIES, _BODIES_PER_CLIENT = 16, 4
_RETRY_AFTER_MS = 500
# A body whose length is known waits this long for other bodies of its client before it is refused.
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
        # The sizes of bodies that wait, by client, in the order of their arrival.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def hold(self, client: str) -> HeldBody:
        """Return an account of the bytes of one body; use it as a context manager."""
        return HeldBody(self, client)

    async def reserve(self, client: str, num_bytes: int) -> None:
        """Count bytes that are yet to arrive, once the budget allows it and earlier bodies of the client are counted.
        Raises OverloadedError if that takes longer than WAIT_S.
        """
        if client not in self._waiting and self._has_room(client, num_bytes):
            self._count(client, num_bytes)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((num_bytes, turn))
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.remove(client, num_bytes)
            else:
                self._leave(client, turn)
            if isinstance(error, TimeoutError):
                raise _exhausted() from None
            raise

    def add(self, client: str, num_bytes: int) -> None:
        """Count bytes. Raises OverloadedError if the budget is exhausted."""
        if not self._has_room(client, num_bytes):
            raise _exhausted()
        self._count(client, num_bytes)

    def remove(self, client: str, num_bytes: int) -> None:
        self._count(client, -num_bytes)
        if not self._by_client[client]:
            del self._by_client[client]
        self._admit()

    def _has_room(self, client: str, num_bytes: int) -> bool:
        return (
            self.num_bytes + num_bytes <= _BODIES * self.max_body_bytes
            and self._by_client[client] + num_bytes <= _BODIES_PER_CLIENT * self.max_body_bytes
        )

    def _count(self, client: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes

    def _admit(self) -> None:
        """Count waiting bodies for which there is room now; clients take turns."""
        for client in list(self._waiting):
            turns = self._waiting.pop(client)
            while turns and self._has_room(client, turns[0][0]):
                num_bytes, turn = turns.popleft()
                if not turn.done():
                    self._count(client, num_bytes)
                    turn.set_result(None)
            if turns:
                self._waiting[client] = turns

    def _leave(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = deque(item for item in self._waiting.pop(client, ()) if item[1] is not turn)
        if turns:
            self._waiting[client] = turns
            self._admit()


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
        """Count all bytes of this body so far. Raises OverloadedError if the budget for all bodies is exhausted."""
        if num_bytes > self._num_bytes:
            self._budget.add(self._client, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def __exit__(self, *_: object) -> None:
        self._budget.remove(self._client, self._num_bytes)
