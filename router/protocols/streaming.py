"""Responses that are computed while their client is connected, either complete or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from midstream.errors import MidstreamError, OverloadedError
from router.pipeline.keep_alives import Beat, KeepAlives, KeptStream
from router.protocols.http_server import SEND_BODY
from router.protocols.openai.endpoints import error_response, shown

# Because of the last header, nginx does not hold events back to fill its buffers or to compress them.
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
# An event stream's comment, which has no meaning.
COMMENT = ": keep-alive\n\n"
# Encodes a value as compact JSON.
dump = json.JSONEncoder(separators=(",", ":")).encode


class EventStream:
    """A response of server-sent events.

    Attributes:
        has_begun: Whether the head was sent, so that the status can no longer change to an error.
        has_events: Whether an event was written.
    """

    def __init__(self, scope: Scope, send: Send, headers: Callable[[], Mapping[str, str]]) -> None:
        """`headers` returns what is added to the head."""
        self.has_begun = self.has_events = False
        self._send, self._send_body = send, scope.get(SEND_BODY, send)
        self._headers = headers
        self._kept: KeptStream | None = None

    def keep_open(self, keep_alives: KeepAlives, beat: Beat) -> KeptStream:
        """Return the context in which `beat` is called whenever the stream has been silent."""
        self._kept = keep_alives.keep(beat)
        return self._kept

    async def begin(self) -> None:
        """Write the head, unless a keep-alive has already written it."""
        if not self.has_begun:
            await self._write(self._send, self._begin())

    def write(self, text: str, *, more: bool = True) -> Awaitable[object]:
        """Write events, after the head."""
        self.has_events = True
        return self._write(self._send_body, _body(text, more=more))

    async def send_all(self, messages: Iterable[Message]) -> None:
        """Send the messages of a keep-alive."""
        for message in messages:
            await self._send(message)

    def keep_alive(self, text: str) -> list[Message]:
        """Return the messages of a keep-alive, which are to be sent next: `text`, after the head unless that was
        written.
        """
        head = [] if self.has_begun else [self._begin()]
        return [*head, _body(text, more=True)]

    def _begin(self) -> Message:
        self.has_begun = True
        named = [(name.encode(), value.encode()) for name, value in {**SSE_HEADERS, **self._headers()}.items()]
        return {"type": "http.response.start", "status": 200, "headers": named}

    def _write(self, send: Send, message: Message) -> Awaitable[object]:
        return send(message) if self._kept is None else self._kept.write(send, message)


def _body(text: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


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

    def __init__(self, keep_alives: KeepAlives, *, is_stream: bool) -> None:
        super().__init__()
        self._keep_alives = keep_alives
        self._is_stream = is_stream

    @abstractmethod
    def own_headers(self) -> Mapping[str, str]:
        """Return the headers that are specific to this response."""

    @abstractmethod
    async def compute(self, events: EventStream) -> Response | None:
        """Return the response, or stream events and return None."""

    def keep_alive(self) -> str:
        """Return what is written while there is no output, in the form that the API's clients count as activity."""
        return COMMENT

    @abstractmethod
    def failure(self, error: MidstreamError) -> str:
        """Return the last events of a stream that failed."""

    def refusal(self, error: MidstreamError) -> Response:
        """Return the response to a request that failed before its first event."""
        return error_response(error)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(scope, send, self.own_headers)

        def beat() -> Coroutine[object, object, None]:
            return events.send_all(events.keep_alive(self.keep_alive()))

        with events.keep_open(self._keep_alives, beat) if self._is_stream else contextlib.nullcontext():
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
        if not (isinstance(error, OverloadedError) and events.has_events):
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
