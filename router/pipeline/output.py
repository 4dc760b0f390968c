"""A request's output, for all APIs: take it, count it, and abort when the client disconnects.

    async with await front.start(request, timeout_s) as output:
        while not output.is_final:
            for chunk in await output.take():
                await write(chunk)

While a write waits for the client, output is merged in `generation.stream`; past its limit the task that opened the
output is cancelled, to interrupt the blocked write.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType

from prometheus_client import Counter, Histogram

from midstream.chunk import Chunk, FinishReason
from midstream.errors import DeadlineError, ExecutionError, OverloadedError
from midstream.telemetry import Metrics, current_request_id
from protos import generation_pb2 as pb
from router.authentication import current_caller
from router.pipeline.background import current_background
from router.pipeline.generation import Generation, Runner
from router.pipeline.idempotency import naming_key
from router.pipeline.quotas import Admission, Quotas
from router.pipeline.request_traces import RequestSpan, RequestTraces
from router.pipeline.stream_limits import StreamLimits

logger = logging.getLogger(__name__)


class RouterMetrics:
    """Metrics of this router's clients.

    Attributes:
        num_tokens: Tokens sent so far, for the throughput log.
        num_ended: Requests ended so far, for the throughput log.
    """

    def __init__(self, metrics: Metrics, *, logs_requests: bool = False) -> None:
        self.num_tokens = self.num_ended = 0
        self._request_level = logging.INFO if logs_requests else logging.DEBUG
        self.first_token: Histogram = metrics.histogram("time_to_first_token_seconds", "Arrival to first output.")
        self.inter_token: Histogram = metrics.histogram(
            "inter_token_latency_seconds", "Time per token after the first."
        )
        self.request: Histogram = metrics.histogram("e2e_request_latency_seconds", "Arrival to last output.")
        self.success: Counter = metrics.counter("request_success", "Ended requests.", ("finished_reason",))
        self.tokens: Counter = metrics.counter("relayed_tokens", "Tokens sent to clients.")

    def log_end(self, reason: str, duration_s: float, first_s: float | None, num_tokens: int) -> None:
        """Log an ended request; the log's context has its id."""
        self.num_ended += 1
        if logger.isEnabledFor(self._request_level):
            extra = {
                "finish_reason": reason,
                "num_output_tokens": num_tokens,
                "duration_s": round(duration_s, 4),
                "first_token_s": None if first_s is None else round(first_s, 4),
            }
            logger.log(self._request_level, "a request ended: %s", reason, extra=extra)


class Output:
    """A request's output to one client; exiting before the end means that the client disconnected.

    Attributes:
        request_id: The request's id.
        is_final: The final chunk has been taken.
    """

    def __init__(
        self,
        request_id: str,
        generation: Generation,
        metrics: RouterMetrics,
        draining: asyncio.Event,
        release: Callable[[], None],
        arrival: float | None = None,
        span: RequestSpan | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`release` is called on exit; `admission` is charged with what is read, None for what was charged before."""
        self.request_id = request_id
        self.is_final = False
        self._generation = generation
        self._metrics = metrics
        self._draining = draining
        self._release = release
        self._arrival = time.monotonic() if arrival is None else arrival
        self._first: float | None = None
        self._last: float | None = None
        self._num_tokens = 0
        self._end: Chunk | None = None
        self._span = span
        self._admission = admission

    async def take(self) -> list[Chunk]:
        """Return the next output, at least one chunk; the final one comes last.

        Raises:
            MidstreamError: The stream failed and cannot continue.
        """
        chunks = await self._generation.take()
        now = time.monotonic()
        for chunk in chunks:
            self._observe(chunk, now)
        if chunks[-1].is_final:
            self.is_final, self._end = True, chunks[-1]
        return chunks

    def raise_failure(self) -> None:
        """Raise the request's error, if any; to be called after the final chunk."""
        if self._end is None:
            return
        if self._end.finish_reason is FinishReason.DEADLINE:
            raise DeadlineError("the request's deadline passed")
        if self._end.finish_reason is FinishReason.ERROR:
            raise self._end.error or ExecutionError("the request failed")

    async def __aenter__(self) -> Output:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()
        if self._admission is not None:
            self._admission.release()
        if self._span is not None:
            self._span.end(self._end, error)
        cancelled = isinstance(error, asyncio.CancelledError)
        self._generation.close(abort=cancelled and not self._draining.is_set())
        if cancelled and self._generation.stream.overflowed:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise OverloadedError("the client reads too slowly") from None
        reason = self._end.finish_reason if self._end is not None else f"left: {error!r}"
        duration_s = time.monotonic() - self._arrival
        first_s = None if self._first is None else self._first - self._arrival
        self._metrics.log_end(str(reason), duration_s, first_s, self._num_tokens)
        if error is None and self._end is not None:
            self._metrics.request.observe(duration_s)
            self._metrics.success.labels(self._end.finish_reason or "").inc()

    def _observe(self, chunk: Chunk, now: float) -> None:
        num_tokens = len(chunk.token_ids)
        if self._last is None:
            self._first = now
            self._metrics.first_token.observe(now - self._arrival)
            if self._span is not None:
                self._span.note("first output")
        elif num_tokens:
            self._metrics.inter_token.observe((now - self._last) / num_tokens)
        self._metrics.tokens.inc(num_tokens)
        self._metrics.num_tokens += num_tokens
        if self._admission is not None and num_tokens:
            self._admission.charge(output=num_tokens)
        self._num_tokens += num_tokens
        self._last = now


class FrontDoor:
    """Starts and resumes requests for all APIs.

    Attributes:
        runner: The path of all requests.
        draining: Set while running requests finish and new ones are rejected.
    """

    def __init__(
        self,
        runner: Runner,
        metrics: RouterMetrics,
        draining: asyncio.Event,
        limits: StreamLimits | None = None,
        traces: RequestTraces | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = quotas or Quotas(Metrics())
        self.runner = runner
        self.draining = draining
        self._metrics = metrics
        self._limits = limits or StreamLimits()
        self._traces = traces

    async def start(self, request: pb.GenerateRequest, timeout_s: float | None, key: str = "") -> Output:
        """Start a request, or attach to the one that was started with its idempotency key.

        Args:
            request: As received from the client; it is changed.
            timeout_s: Time left until the call's deadline.
            key: The idempotency key that the request's id was derived from; empty for none.

        Raises:
            MidstreamError: It is rejected.
        """
        arrival, caller = time.monotonic(), current_caller.get()
        request_id = request.request_id or uuid.uuid4().hex
        current_request_id.set(request_id)
        request.request_id = request_id
        if caller.is_authenticated:
            request.client_id = caller.name
        if caller.quota.priority is not None:
            request.priority = max(caller.quota.priority + min(request.priority, 0), -100)
        background = current_background.get()
        if background is not None:
            request.priority = min(request.priority, background.priority)
            timeout_s = max(background.until - time.time(), 0.0)
        admission = self._quotas.admit(caller)
        try:
            release = self._limits.take(caller.name)
        except OverloadedError:
            admission.release()
            raise
        span = self._traces.begin("router.generate", request_id) if self._traces is not None else None
        request.trace_parent = str(span.span) if span is not None else ""
        try:
            with naming_key(key):
                generation = await self.runner.start(request, timeout_s, _canceller(), is_keyed=bool(key))
        except BaseException as error:
            release()
            admission.release()
            if span is not None:
                span.end(None, error)
            raise
        if span is not None:
            span.note("submitted")
        admission.charge(prompt=len(request.token_ids.values))
        return Output(request_id, generation, self._metrics, self.draining, release, arrival, span, admission)

    def resume(
        self, request_id: str, from_token: int, from_token_by_sequence: Sequence[int], timeout_s: float | None
    ) -> Output:
        """Resume a request's output.

        Raises:
            InvalidArgumentError: The request id is empty or invalid.
            OverloadedError: The client has too many streams.
        """
        current_request_id.set(request_id)
        generation = self.runner.resume(request_id, from_token, from_token_by_sequence, timeout_s, _canceller())
        release = self._limits.take(current_caller.get().name)
        span = self._traces.begin("router.resume", request_id) if self._traces is not None else None
        return Output(request_id, generation, self._metrics, self.draining, release, span=span)

    async def abort(self, request_id: str) -> bool:
        """Abort a request of the caller; return whether it was running."""
        current_request_id.set(request_id)
        return await self.runner.cells.abort(current_caller.get().scope(request_id))

    def abort_soon(self, request_id: str) -> None:
        """Abort a request of the caller in the background."""
        self.runner.abort_soon(current_caller.get().scope(request_id))


def _canceller() -> Callable[[], None]:
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None:
            task.cancel()

    return cancel
