"""Responses that are computed while their client is connected, either complete or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from midstream.errors import MidstreamError, OverloadedError
from router.protocols.openai.endpoints import error_response, shown

_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
# Encodes a value as compact JSON.
dump = json.JSONEncoder(separators=(",", ":")).encode


class EventStream:
    """A response of server-sent events.

    Attributes:
        has_begun: Whether the head was sent, so that the status can no longer change to an error.
    """

    def __init__(self, send: Send) -> None:
        self.has_begun = False
        self._send = send

    async def begin(self, headers: Mapping[str, str] | None = None) -> None:
        """Write the head, unless it was written; `headers` are added to it."""
        if self.has_begun:
            return
        self.has_begun = True
        named = [(name.encode(), value.encode()) for name, value in {**_SSE_HEADERS, **(headers or {})}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": named})

    async def write(self, text: str, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": more})


class ComputedResponse(Response):
    """A response that is computed while its client is connected; a dropped connection cancels the computation."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._answer(scope, receive, send))

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class CompleteResponse(ComputedResponse):
    """A response without a stream."""

    def __init__(
        self, compute: Callable[[], Awaitable[Response]], refusal: Callable[[MidstreamError], Response] = error_response
    ) -> None:
        """`refusal` returns the response to a request that failed."""
        super().__init__()
        self._compute = compute
        self._refusal = refusal

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._compute()
        except Exception as error:  # noqa: BLE001 (it is logged)
            response = self._refusal(shown(error))
        await response(scope, receive, send)


class StreamedResponse(ComputedResponse):
    """A response that can be a stream of events."""

    @abstractmethod
    async def compute(self, events: EventStream) -> Response | None:
        """Return the response, or stream events and return None."""

    @abstractmethod
    def failure(self, error: MidstreamError) -> str:
        """Return the last events of a stream that failed."""

    def refusal(self, error: MidstreamError) -> Response:
        """Return the response to a request that failed before its first event."""
        return error_response(error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send)
        try:
            response = await self.compute(events)
        except Exception as error:  # noqa: BLE001 (it is logged)
            response = await self._fail(events, shown(error))
        if response is not None:
            await response(scope, receive, send)

    async def _fail(self, events: EventStream, error: MidstreamError) -> Response | None:
        if not events.has_begun:
            return self.refusal(error)
        # A client that reads too slowly would not read the error either, so close the connection.
        if not isinstance(error, OverloadedError):
            await events.write(self.failure(error), more=False)
        return None


async def _while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` until it ends or the client disconnects."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
