"""The router's trace span of each traced request; it covers the time for which the client waits.

The client's `traceparent` comes as gRPC metadata or as an HTTP header; `admit` and `TracedApp` store it in a context
variable. A sampled fraction of the requests without one starts new traces.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.chunk import Chunk
from midstream.rpc.errors import Admit
from midstream.telemetry.tracing import TRACE_PARENT_KEY, TraceParent, Tracer, new_trace

_client_parent: ContextVar[str] = ContextVar("client_parent", default="")


class RequestTraces:
    """Starts spans."""

    def __init__(self, tracer: Tracer, ratio: float) -> None:
        """`ratio` is the fraction, from 0 to 1, of requests without a `traceparent` that are traced."""
        self._tracer = tracer
        self._ratio = ratio

    def begin(self, name: str, request_id: str) -> RequestSpan | None:
        """Start a span for the request of the current task; return None if the request is not traced."""
        client = TraceParent.parse(_client_parent.get())
        if client is None:
            if random.random() >= self._ratio:
                return None
            return RequestSpan(self._tracer, name, None, new_trace(is_sampled=True), request_id)
        return RequestSpan(self._tracer, name, client, client.new_child(), request_id) if client.is_sampled else None


class RequestSpan:
    """A span from a request's arrival to its last output.

    Attributes:
        span: Parent of the other services' spans.
    """

    def __init__(
        self, tracer: Tracer, name: str, parent: TraceParent | None, span: TraceParent, request_id: str
    ) -> None:
        self.span = span
        self._tracer = tracer
        self._name = name
        self._parent = parent
        self._start_ns = time.time_ns()
        self._events: list[tuple[str, int]] = []
        self._attributes: dict[str, str | int] = {"midstream.request_id": request_id}

    def note(self, event: str) -> None:
        """Record an event at the current time."""
        self._events.append((event, time.time_ns()))

    def end(self, final: Chunk | None, error: BaseException | None) -> None:
        """End the span with the final chunk or with an error; if neither is given, the client has disconnected."""
        attributes, failure = self._attributes, ""
        if final is not None:
            attributes["gen_ai.response.finish_reason"] = final.finish_reason or ""
            if final.usage is not None:
                attributes["gen_ai.usage.input_tokens"] = final.usage.prompt_tokens
                attributes["gen_ai.usage.output_tokens"] = final.usage.completion_tokens
            failure = final.error.message if final.error is not None else ""
        elif error is not None:
            failure = str(error) or type(error).__name__
        end_ns = time.time_ns()
        self._tracer.record(
            self._name,
            self._parent,
            self._start_ns,
            end_ns,
            attributes,
            span=self.span,
            error=failure,
            events=self._events,
            is_server=True,
        )


def remember_client(admit: Admit) -> Admit:
    """Wrap `admit` so that it also stores the `traceparent` of gRPC calls."""

    def admit_and_remember(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[], None] | None:
        release = admit(method, context)
        found = ""
        for key, value in context.invocation_metadata() or ():
            if key == TRACE_PARENT_KEY:
                found = str(value)
        _client_parent.set(found)
        return release

    return admit_and_remember


class TracedApp:
    """ASGI middleware that stores the `traceparent` of HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = TRACE_PARENT_KEY.encode()
            values = [value for name, value in scope["headers"] if name == key]
            _client_parent.set(values[-1].decode("latin-1") if values else "")
        await self._app(scope, receive, send)
