"""Reads the JSON bodies of HTTP requests, within a memory budget, and renders long responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.authentication import current_caller
from router.pipeline.fair_threads import FairThreads
from router.protocols.body_budget import BodyBudget
from router.protocols.openai.body import Body

_INLINE_BYTES = 32 << 10
_T = TypeVar("_T")


class BodyReader:
    """Reads request bodies for all HTTP APIs of a router."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        # Parsers need the GIL, so more threads would not be faster; the second one is for a second client.
        self._threads = FairThreads(2, "bodies", num_per_client=1)

    @property
    def max_bytes(self) -> int:
        """Maximum size of a body."""
        return self._budget.max_body_bytes

    async def read(self, request: Request, make: Callable[[Body], _T]) -> _T:
        """Return the result of `make` for the parsed body. Raises the errors of `read_data`, or InvalidArgumentError if
        the body is not a JSON object.
        """
        return await self.read_data(request, lambda data: make(Body.parse(data)))

    async def read_data(self, request: Request, make: Callable[[bytes], _T]) -> _T:
        """Return the result of `make` for the body; it is called in a thread for long bodies. Raises
        InvalidArgumentError if the body is too large, UnsupportedError if it is compressed, or OverloadedError if too
        many bytes of request bodies are in memory.
        """
        if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
            raise UnsupportedError("must not be set: bodies are not decompressed", field="Content-Encoding")
        limit, data = self._budget.max_body_bytes, bytearray()
        with self._budget.hold(current_caller.get().name) as held:
            length = int(request.headers.get("content-length") or 0)
            if length > limit:
                raise InvalidArgumentError(f"the body has more than {limit} bytes")
            # Reserve the bytes first: reading a body only to refuse it would cost more than the refusal.
            await held.reserve(length)
            async for part in request.stream():
                data += part
                held.grow_to(len(data))
                if len(data) > limit:
                    raise InvalidArgumentError(f"the body has more than {limit} bytes")
            if len(data) <= _INLINE_BYTES:
                return make(bytes(data))
            return await self._threads.run(lambda: make(bytes(data)))

    async def render(self, make: Callable[[], _T]) -> _T:
        """Run `make`, which renders a long response, in a thread and return its result."""
        return await self._threads.run(make)
