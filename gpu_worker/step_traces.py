"""Trace spans of the worker: one for each step and each traced request in it."""

from __future__ import annotations

import time

from gpu_worker.batch.step import Step, StepOutput
from midstream.telemetry.tracing import TraceParent, Tracer


class StepTraces:
    """Tracks the rows of traced requests. If there are none, a step costs only one check."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[int, tuple[TraceParent, str]] = {}  # row -> the scheduler's span, request id
        self._generating: set[int] = set()

    def clear(self) -> None:
        self._spans.clear()
        self._generating.clear()

    def note(self, step: Step, output: StepOutput, waiting_s: float) -> None:
        """Record spans for a step that has just run."""
        self._apply(step)
        if not self._spans:
            return
        end_ns = time.time_ns()
        start_ns = end_ns - int(output.forward_s * 1e9)
        attributes: dict[str, str | int] = {
            "midstream.step_id": step.step_id,
            "midstream.sampled_rows": len(output.num_tokens) or len(output.token_ids),
            "midstream.waiting_us": int(waiting_s * 1e6),
        }
        for row, length in zip(step.context_rows.tolist(), step.context_lengths.tolist(), strict=True):
            if row in self._spans:
                parent, request_id = self._spans[row]
                own = {"midstream.request_id": request_id, "midstream.chunk_tokens": length}
                self._tracer.record("worker.prefill", parent, start_ns, end_ns, attributes | own)
        for row in self._generating:
            parent, request_id = self._spans[row]
            own = {"midstream.request_id": request_id}
            self._tracer.record("worker.decode", parent, start_ns, end_ns, attributes | own)

    def _apply(self, step: Step) -> None:
        spans = self._spans
        for row in step.released_rows.tolist():
            spans.pop(row, None)
        for new in step.new_sequences:
            parent = TraceParent.sampled(new.trace_parent)
            if parent is not None:
                spans[new.row] = (parent.scheduler_span(), new.request_id)
            else:
                spans.pop(new.row, None)
        for fork in step.forks:
            if fork.from_row in spans:
                spans[fork.to_row] = spans[fork.from_row]
            else:
                spans.pop(fork.to_row, None)
        if step.repeat_generation:
            self._generating.difference_update(step.released_rows.tolist(), step.idle_rows.tolist())
        else:
            self._generating.clear()
        self._generating.update(row for row in step.generation_rows.tolist() if row in spans)
