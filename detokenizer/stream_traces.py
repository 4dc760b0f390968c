"""Tracing of streams: one span per output stream of a traced request."""

from __future__ import annotations

import time

from detokenizer.streams import OutputStream
from midstream.telemetry.tracing import TraceParent, Tracer


class StreamTraces:
    """Records spans of finished streams."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def note(self, stream: OutputStream) -> None:
        """Record the span of a detached stream."""
        parent = TraceParent.sampled(stream.trace_parent)
        if parent is None:
            return
        attributes: dict[str, str | int] = {
            "midstream.request_id": stream.request_id,
            "midstream.tokens": stream.num_tokens,
        }
        error = stream.error.message if stream.error is not None else ""
        events = [("first output", stream.first_output_ns)] if stream.first_output_ns else []
        self._tracer.record(
            "detokenizer.stream", parent, stream.attached_ns, time.time_ns(), attributes, error=error, events=events
        )
