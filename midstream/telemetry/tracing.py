"""Request tracing: each process exports spans of its work on a request to an OpenTelemetry collector.

The trace of one request:

1. A client may send W3C's `traceparent`. The router's span is its child, or else the root of a new trace, and is passed
   with the request as `GenerateRequest.trace_parent` to the scheduler, its journal, the worker and the detokenizer.
2. The scheduler's span is the router's child. Its id is derived from the router's, so every process that has
   `trace_parent` can compute it, including a scheduler that took over. Its children are the spans of the time in the
   queue, of prefill and of decoding.
3. Under the scheduler's span the worker adds a span for each step; under the router's span the detokenizer adds one for
   each stream.

A span is created when the operation it describes has ended; no span is kept open, so none is lost when its process
dies. If no collector is set, no process creates a Tracer, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import midstream
from midstream.config.service import ServiceConfig
from midstream.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

TRACE_PARENT_KEY = "traceparent"
_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1
# The queue holds the spans of several seconds of a worker's steps. Further spans are dropped, which is logged.
_MAX_QUEUED_SPANS, _MAX_BATCH, _SEND_INTERVAL_MS, _SEND_TIMEOUT_S = 65_536, 2_048, 500, 3.0
_CLOSE_TIMEOUT_S = 5.0

Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The identity of a span, from which child spans can be created.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        is_sampled: Whether the trace's spans are recorded.
    """

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """Parse a W3C `traceparent`; return None if it is empty or invalid."""
        match = _TRACE_PARENT.fullmatch(text)
        if match is None or (text.startswith("00") and len(text) > 55):
            return None
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        return cls(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None

    @classmethod
    def sampled(cls, text: str) -> TraceParent | None:
        """Return the parsed context if it is sampled, otherwise None."""
        parent = cls.parse(text) if text else None
        return parent if parent is not None and parent.is_sampled else None

    def __str__(self) -> str:
        """Format as `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def new_child(self) -> TraceParent:
        """Return the identity of a new span in the same trace."""
        return TraceParent(self.trace_id, _random_id(64), self.is_sampled)

    def scheduler_span(self) -> TraceParent:
        """Return the identity of the scheduler's span for the request; this one is the router's span."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=8, person=b"scheduler").digest()
        return TraceParent(self.trace_id, int.from_bytes(digest, "big") or 1, self.is_sampled)


def new_trace(*, is_sampled: bool) -> TraceParent:
    """Return the root span of a new trace."""
    return TraceParent(_random_id(128), _random_id(64), is_sampled)


class Tracer:
    """Sends a process's spans to a collector in a background thread; losing the collector affects nothing else."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """Prepare the connection; `endpoint` is the address of an OTLP/gRPC collector, such as http://collector:4317.
        Raises ConfigError if OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import Event, ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
            from opentelemetry.trace.status import Status, StatusCode
        except ImportError as error:
            reason = f"needs `pip install midstream[tracing]` ({error})"
            raise ConfigError(reason, field="otlp_endpoint") from None
        exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=_SEND_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter, _MAX_QUEUED_SPANS, _SEND_INTERVAL_MS, _MAX_BATCH)
        self._resource = Resource.create(
            {"service.name": f"midstream-{service}", "service.instance.id": instance or service}
        )
        self._scope = InstrumentationScope("midstream", midstream.__version__)
        self._span, self._event, self._context = ReadableSpan, Event, SpanContext
        self._flags = TraceFlags(TraceFlags.SAMPLED)
        self._kinds = {False: SpanKind.INTERNAL, True: SpanKind.SERVER}
        self._status, self._codes = Status, StatusCode

    @classmethod
    def from_config(cls, config: ServiceConfig, service: str) -> Tracer | None:
        """Return the configured tracer; None if tracing is off. Raises ConfigError if OpenTelemetry is not installed,
        or the collector's address is invalid.
        """
        if not config.otlp_endpoint:
            return None
        if not config.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError("must be http://HOST:PORT or https://HOST:PORT", field="otlp_endpoint")
        return cls(config.otlp_endpoint, service, config.name)

    def record(
        self,
        name: str,
        parent: TraceParent | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        span: TraceParent | None = None,
        error: str = "",
        events: Sequence[tuple[str, int]] = (),
        is_server: bool = False,
    ) -> None:
        """Record a span, which is sent later. Thread-safe.

        Args:
            parent: Its parent; with None the span is a root, and `span` is required.
            span: The span's ids, if other processes know them; otherwise they are generated.
            error: Error message; empty if there was no error.
            events: Events within the span, as (name, Unix nanoseconds).
            is_server: Whether the span handles a call from outside.
        """
        if span is None:
            assert parent is not None
            span = parent.new_child()
        self._processor.on_end(
            self._span(
                name,
                self._context_of(span, is_remote=False),
                self._context_of(parent, is_remote=True) if parent is not None else None,
                self._resource,
                attributes,
                [self._event(event, timestamp=at_ns) for event, at_ns in events],
                kind=self._kinds[is_server],
                status=self._status(self._codes.ERROR, error) if error else self._status(self._codes.UNSET),
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def _context_of(self, span: TraceParent, *, is_remote: bool) -> SpanContext:
        return self._context(span.trace_id, span.span_id, is_remote, self._flags)

    def close(self) -> None:
        """Send the remaining spans; this takes at most a few seconds."""
        # The processor itself would wait half a minute for an unreachable collector.
        closing = threading.Thread(target=self._processor.shutdown, name="tracer-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


def _random_id(num_bits: int) -> int:
    return secrets.randbits(num_bits) or 1
