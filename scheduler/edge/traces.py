"""The scheduler's trace spans for an ended request: time in the queue, prefill and decoding."""

from __future__ import annotations

from midstream.clock import SteadyClock
from midstream.telemetry.tracing import TraceParent, Tracer
from protos import generation_pb2
from scheduler.core.effects import Effect, RequestEnded
from scheduler.core.events import Event
from scheduler.core.request import Request


class RequestTraces:
    """Exports the spans of ended requests."""

    def __init__(self, tracer: Tracer, clock: SteadyClock) -> None:
        self._tracer = tracer
        self._clock = clock

    def note(self, _: Event, effects: list[Effect]) -> None:
        """Export the spans of requests that an event ended."""
        for effect in effects:
            if isinstance(effect, RequestEnded):
                self._tell(effect.request)

    def _tell(self, request: Request) -> None:
        contents = generation_pb2.GenerateRequest.FromString(request.spec.payload)
        parent = TraceParent.sampled(contents.trace_parent)
        if parent is None:
            return
        span, times, record = parent.scheduler_span(), request.times, self._tracer.record
        unix_ns = self._clock.to_unix_ns
        queued_ns, last_ns = unix_ns(times.queued_ns), unix_ns(times.finished_ns)
        attributes: dict[str, str | int] = {
            "midstream.request_id": request.request_id,
            "gen_ai.request.model": contents.model,
            "gen_ai.usage.input_tokens": len(request.spec.prompt),
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "midstream.cached_tokens": request.counters.num_cached_tokens,
            "midstream.preemptions": request.counters.num_preemptions,
            "midstream.recoveries": request.counters.num_recoveries,
        }
        error = request.failure.message if request.failure is not None else ""
        record("scheduler.request", parent, queued_ns, last_ns, attributes, span=span, error=error)
        name = {"midstream.request_id": request.request_id}
        scheduled_ns, token_ns = unix_ns(times.first_scheduled_ns) or last_ns, unix_ns(times.first_token_ns) or last_ns
        record("scheduler.queue", span, queued_ns, scheduled_ns, name)
        if times.first_scheduled_ns:
            record("scheduler.prefill", span, scheduled_ns, token_ns, name)
        if times.first_token_ns:
            record("scheduler.decode", span, token_ns, last_ns, name)
