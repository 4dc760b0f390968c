"""The lifecycle of requests: accepted or rejected, attached to and detached from, ended once, kept for a while, and
dropped.
"""

from __future__ import annotations

from functools import partial

from scheduler.core.admission import impossible
from scheduler.core.effects import (
    Accepted,
    Refused,
    RequestEnded,
    RequestForgotten,
    SequenceEnded,
)
from scheduler.core.events import AbortRequested, Attached, Detached, Recovered, StopWordFound, Submitted
from scheduler.core.failure import (
    ALREADY_EXISTS,
    DEADLINE_EXCEEDED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Failure,
)
from scheduler.core.request import Finish, FinishReason, Request, RequestState, Sequence, SequenceEnd
from scheduler.core.request_spec import RequestSpec
from scheduler.core.request_table import RequestTable
from scheduler.core.shared import Shared

_MIN_RETRY_MS, _MAX_RETRY_MS = 100, 30_000


class Lifecycle:
    """Tracks all known requests by id, from submission to expiry.

    Attributes:
        requests: Unfinished requests, and ended ones that are still kept.
        detached: Unfinished requests that are detached.
        is_draining: Whether new requests are rejected.
    """

    def __init__(self, shared: Shared) -> None:
        self.requests = RequestTable(shared.config, shared.timers, self._forget)
        self.detached: dict[Request, None] = {}
        self.is_draining = False
        self.last_queue_time_ns = 0
        self._config, self._clock, self._effects = shared.config, shared.clock, shared.effects
        self._queue, self._timers, self._totals = shared.queue, shared.timers, shared.totals
        self._num_large_bytes = 0
        self._num_seen = 0
        self._deadlines: dict[Request, int] = {}  # numbers of the timers of unfinished requests

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return self.requests.num_unfinished

    def submit(self, event: Submitted) -> Request | None:
        """Accept a request, attach to the known request with the same id, or reject it.

        Returns:
            The request, if it is new.
        """
        spec = event.spec
        known = self.requests.get(spec.request_id)
        if known is not None:
            if known.spec.digest == spec.digest:
                self._effects.append(Accepted(known, is_attached=True))
            else:
                self._refuse(spec, ALREADY_EXISTS, "another request has this id; choose a new one", "request_id")
            return None
        if self.is_draining:
            self._refuse(spec, UNAVAILABLE, "the scheduler is draining")
            return None
        if self._queue.is_full:
            self._refuse(
                spec, RESOURCE_EXHAUSTED, f"the queue is full: {len(self._queue)} requests are waiting; retry later"
            )
            return None
        failure = impossible(spec, self._config)
        if failure is not None:
            self._effects.append(Refused(spec.request_id, failure))
            return None
        if spec.num_large_bytes and not self._make_room(spec.num_large_bytes):
            self._refuse(
                spec,
                RESOURCE_EXHAUSTED,
                "the memory for tensors and attachments is in use by other requests; retry later",
            )
            return None
        request = self._take_in(spec)
        self._queue.push(request)
        self._effects.append(Accepted(request, is_attached=False))
        return request

    def recover(self, event: Recovered) -> Request:
        """Restore a request from the journal with its output so far."""
        request = self._restore_finished(event, event.finish) if event.finish else self._take_in(event.spec)
        for index, (sequence, tokens) in enumerate(zip(request.sequences, event.outputs, strict=True)):
            sequence.restore(tokens, event.extras[index] if index < len(event.extras) else ())
        for index, end in event.ends:
            request.sequences[index].finish(end)
        request.restore_kind(event.kind, event.kind_changed_at, event.earlier_kinds)
        if event.finish is not None:
            self.requests.keep(request, self._clock.now_ns)  # its age is known only by the clock of another process
            return request
        request.count_recovery()
        if request.beams is not None and request.live_sequences:
            request.beams.restore(event.beam_steps)
        if request.live_sequences:
            self._queue.put_back(request)
        else:
            self._finish(request)
        return request

    def _restore_finished(self, event: Recovered, finish: Finish) -> Request:
        """Keep a request that had already ended for clients that resume it, without counting it again."""
        self._num_seen += 1
        request = Request.restored(event.spec, self._num_seen, finish)
        self._num_large_bytes += event.spec.num_large_bytes
        self.requests.add(request)
        return request

    def _refuse(self, spec: RequestSpec, code: int, message: str, field: str = "") -> None:
        retry_ms = 0
        if code == RESOURCE_EXHAUSTED:
            retry_ms = min(max(self.last_queue_time_ns // 1_000_000, _MIN_RETRY_MS), _MAX_RETRY_MS)
        self._effects.append(Refused(spec.request_id, Failure(code, message, field), retry_ms))

    def _take_in(self, spec: RequestSpec) -> Request:
        now = self._clock.now_ns
        self._num_seen += 1
        request = Request(spec, self._num_seen)
        self._num_large_bytes += spec.num_large_bytes
        request.accept(now)
        self.requests.add(request)
        if spec.deadline_ns is not None:
            on_deadline = partial(self._on_deadline, spec.request_id, request.ordinal)
            self._deadlines[request] = self._timers.at(spec.deadline_ns, on_deadline)
        if spec.is_detached:
            self.detached[request] = None
        else:
            self._timers.at(now + self._config.orphan_grace_ns, partial(self._on_orphaned, spec.request_id))
        return request

    def abort(self, event: AbortRequested) -> bool:
        """End a request on behalf of a client; return False if it has already ended or is unknown."""
        request = self.requests.get(event.request_id)
        if request is None or request.state is RequestState.FINISHED:
            return False
        self.end(request, FinishReason.ABORT)
        return True

    def attach(self, event: Attached) -> None:
        """Add a reader of the request's feed."""
        request = self.requests.get(event.request_id)
        if request is not None:
            request.attach()

    def detach(self, event: Detached) -> None:
        """Remove a reader; when the last one is removed, the orphan grace period starts."""
        request = self.requests.get(event.request_id)
        if request is None or request.num_attached == 0:
            return
        if request.detach(self._clock.now_ns):
            due = self._clock.now_ns + self._config.orphan_grace_ns
            self._timers.at(due, partial(self._on_orphaned, event.request_id))

    def stop_word(self, event: StopWordFound) -> None:
        """End a sequence at its stop word, even if it has already ended at a later position.

        A beam search ends its beams at stop words itself, so the detokenizer's report of its best output is ignored.
        """
        request = self.requests.get(event.request_id)
        if request is None or request.beams is not None or event.sequence_index >= len(request.sequences):
            return
        sequence = request.sequences[event.sequence_index]
        if event.num_tokens > len(sequence.output):
            return
        end = SequenceEnd(FinishReason.STOP, event.num_tokens, event.stop_word)
        if sequence.end is None:
            self.end_sequence(sequence, end)
        elif _is_overtaken(sequence.end, end):
            sequence.finish(end)
            self._effects.append(SequenceEnded(sequence))

    def end(self, request: Request, reason: FinishReason, failure: Failure | None = None) -> None:
        """End all sequences of a request in any state. Precondition: the request has not ended."""
        request.fail(failure)
        for sequence in request.live_sequences:
            self.end_sequence(sequence, SequenceEnd(reason, len(sequence.output)))

    def end_sequence(self, sequence: Sequence, end: SequenceEnd) -> None:
        """End one sequence, and its request if no other sequence is left; its rows and blocks are freed at once."""
        request = sequence.request
        sequence.finish(end)
        if request.group is not None and sequence.row is not None:
            request.group.release_sequence(sequence)
        self._effects.append(SequenceEnded(sequence))
        if not request.live_sequences:
            self._finish(request)
        elif request in self._queue:
            self._follow_in_queue(request)

    def _follow_in_queue(self, request: Request) -> None:
        """Update the queue after a sequence ended while other sequences of its request are waiting."""
        waiting = request.waiting_sequences
        if not waiting:
            self._queue.remove(request)
        elif request.group is not None and len(waiting) == len(request.live_sequences):
            request.group.release(request)  # the request holds nothing on the group any longer
            request.wait()

    def _finish(self, request: Request) -> None:
        if request.group is not None:
            request.group.release(request)
        if request in self._queue:
            self._queue.remove(request)
        request.complete(self._clock.now_ns)
        if request in self._deadlines:
            self._timers.cancel(self._deadlines.pop(request))
        self.detached.pop(request, None)
        self._queue.settle(request)
        self._count_finished(request)
        self._effects.append(RequestEnded(request, request.sequences))
        self.requests.keep(request, self._clock.now_ns)

    def _count_finished(self, request: Request) -> None:
        totals, end = self._totals, request.sequences[0].end
        assert end is not None
        name = end.reason.name.lower()
        totals.num_completed += 1
        totals.num_finished_by_reason[name] = totals.num_finished_by_reason.get(name, 0) + 1
        totals.e2e_request_latency.observe(self._clock.now_ns - request.times.queued_ns)

    def _make_room(self, num_bytes: int) -> bool:
        """Free memory for a request's tensors and attachments by dropping ended requests that nobody reads; return
        False if that is not enough.
        """
        limit = self._config.max_tensor_bytes - num_bytes
        if self._num_large_bytes > limit:
            for request in self.requests.ended:
                if request.spec.num_large_bytes and not request.num_attached and self._num_large_bytes > limit:
                    self.requests.forget(request)
        return self._num_large_bytes <= limit

    def _forget(self, request: Request) -> None:
        self._num_large_bytes -= request.spec.num_large_bytes
        self._effects.append(RequestForgotten(request))

    def _on_deadline(self, request_id: str, ordinal: int, _: int) -> None:
        request = self.requests.get(request_id)
        if request is None or request.ordinal != ordinal or request.state is RequestState.FINISHED:
            return
        failure = None
        if not request.num_output_tokens:
            failure = Failure(DEADLINE_EXCEEDED, "the deadline passed before the first token")
        self.end(request, FinishReason.DEADLINE, failure)

    def _on_orphaned(self, request_id: str, now_ns: int) -> None:
        request = self.requests.get(request_id)
        if request is None or request.num_attached or request.state is RequestState.FINISHED:
            return
        if now_ns - request.orphaned_ns >= self._config.orphan_grace_ns:
            self.end(request, FinishReason.ABORT)


def _is_overtaken(known: SequenceEnd, found: SequenceEnd) -> bool:
    """Return whether a stop word precedes the recorded end of its sequence, which was reached before the stop word was
    found. The client gets the output up to the stop word, whatever ended the sequence after it.
    """
    return not known.stop_word and found.num_tokens <= known.num_tokens
