"""The router's trace span of each traced request; it covers the time for which the client waits.

The client's `traceparent` comes as gRPC metadata or as an HTTP header; `admit` and `TracedApp` store it in a context
variable. A sampled fraction of the requests without one starts new traces.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.chunk import Chunk, FinishReason
from midstream.rpc.errors import Admit
from midstream.telemetry.tracing import TRACE_PARENT_KEY, Attribute, TraceParent, Tracer, new_trace
from protos import generation_pb2 as pb

_client_parent: ContextVar[str] = ContextVar("client_parent", default="")


class RequestTraces:
    """Starts spans, with the names and attributes of OpenTelemetry's semantic conventions for generative AI."""

    def __init__(self, tracer: Tracer, ratio: float, model: str) -> None:
        """`ratio` is the fraction, from 0 to 1, of requests without a `traceparent` that are traced; `model` is the
        name of the served model.
        """
        self._tracer = tracer
        self._ratio = ratio
        self._model = model

    def begin(self, operation: str, request: pb.GenerateRequest) -> RequestSpan | None:
        """Start a span for the request of the current task; return None if the request is not traced.

        Args:
            operation: OpenTelemetry's name of the operation.
            request: The request as received, with an id.
        """
        return self._begin(f"{operation} {request.model or self._model}", self._attributes(operation, request))

    def resume(self, request_id: str) -> RequestSpan | None:
        """Start a span for reading the rest of a request's output."""
        return self._begin("router.resume", {"midstream.request_id": request_id})

    def _begin(self, name: str, attributes: dict[str, Attribute]) -> RequestSpan | None:
        client = TraceParent.parse(_client_parent.get())
        if client is None:
            if random.random() >= self._ratio:
                return None
            return RequestSpan(self._tracer, name, None, new_trace(is_sampled=True), attributes)
        return RequestSpan(self._tracer, name, client, client.new_child(), attributes) if client.is_sampled else None

    def _attributes(self, operation: str, request: pb.GenerateRequest) -> dict[str, Attribute]:
        sampling = request.sampling
        attributes: dict[str, Attribute] = {
            "midstream.request_id": request.request_id,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "midstream",
            "gen_ai.request.model": request.model or self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.request_id,
        }
        if request.HasField("max_tokens"):
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        for name in ("temperature", "top_p", "top_k", "seed"):
            if sampling.HasField(name):
                attributes[f"gen_ai.request.{name}"] = getattr(sampling, name)
        if sampling.num_return_sequences > 1:
            attributes["gen_ai.request.choice.count"] = sampling.num_return_sequences
        return attributes


class RequestSpan:
    """A span from a request's arrival to its last output.

    Attributes:
        span: Parent of the other services' spans.
    """

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        parent: TraceParent | None,
        span: TraceParent,
        attributes: dict[str, Attribute],
    ) -> None:
        self.span = span
        self._tracer = tracer
        self._name = name
        self._parent = parent
        self._start_ns = time.time_ns()
        self._events: list[tuple[str, int]] = []
        self._attributes = attributes

    def note(self, event: str) -> None:
        """Record an event at the current time."""
        self._events.append((event, time.time_ns()))

    def end(self, final: Chunk | None, error: BaseException | None, reasons: Sequence[str] = ()) -> None:
        """End the span with the final chunk or with an error; otherwise the client has disconnected.

        Args:
            reasons: The finish reason of each sequence that has ended.
        """
        attributes, failure = self._attributes, ""
        if reasons:
            attributes["gen_ai.response.finish_reasons"] = list(reasons)
        if final is not None:
            if final.usage is not None:
                attributes["gen_ai.usage.input_tokens"] = final.usage.prompt_tokens
                attributes["gen_ai.usage.cache_read.input_tokens"] = final.usage.cached_tokens
                attributes["gen_ai.usage.output_tokens"] = final.usage.completion_tokens
            failure = final.error.message if final.error is not None else ""
            if final.finish_reason in (FinishReason.DEADLINE, FinishReason.ERROR):
                attributes["error.type"] = str(final.finish_reason)
        elif error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.note("the client left")
        else:
            failure = str(error) or type(error).__name__
            attributes["error.type"] = type(error).__name__
        self._tracer.record(
            self._name,
            self._parent,
            self._start_ns,
            time.time_ns(),
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
