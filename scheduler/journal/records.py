"""Encodes and decodes the journal's request records."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter

from google.protobuf.message import DecodeError

from midstream.clock import SteadyClock
from midstream.receipts.digests import LINK_TOKENS, links_of, num_confirmed
from protos import generation_pb2
from protos import journal_pb2 as pb
from scheduler.core.beams import BeamStep
from scheduler.core.events import Recovered
from scheduler.core.failure import Failure
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.request import Counters, ExtraOutput, Finish, FinishReason, Request, RequestTimes, SequenceEnd
from scheduler.journal.store import StoredJournal, unseal
from scheduler.wire.kinds import earlier_from_proto, earlier_to_proto, kind_from_proto, kind_to_proto
from scheduler.wire.requests import ModelLimits, spec_from_proto

logger = logging.getLogger(__name__)

# JournalFinish has the fields of both classes.
_TIMES, _COUNTERS = ([item.name for item in fields(kind)] for kind in (RequestTimes, Counters))
_times_of, _counters_of = attrgetter(*_TIMES), attrgetter(*_COUNTERS)


@dataclass(slots=True)
class StoredRequest:
    """A request as stored in the journal's rows.

    Attributes:
        is_changed: Whether commits since the last compaction have changed it.
        first_commit: Commits before this one are included in its row.
        kind: Kind of the groups that computed its output. kind_changed_at, earlier_kinds: As in Request.
        links: The stored links of the chain over each sequence's tokens, oldest first.
    """

    number: int
    recovered: Recovered
    outputs: list[array[int]]
    extras: list[list[ExtraOutput]]
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    finish: Finish | None = None
    is_changed: bool = False
    beam_steps: list[BeamStep] = field(default_factory=list)
    first_commit: int = 0
    kind: Kind | None = None
    kind_changed_at: tuple[int, ...] = ()
    earlier_kinds: tuple[EarlierKind, ...] = ()
    links: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def complete_links(self) -> list[list[bytes]]:
        """The complete links of each sequence's chain, as computed from its tokens; none if it gets no receipt."""
        nonce = self.recovered.spec.receipt_nonce
        if not nonce or self.beam_steps or self.recovered.spec.beam_width > 1:
            return [[] for _ in self.outputs]
        return [
            links_of(nonce, index, tokens[: len(tokens) - len(tokens) % LINK_TOKENS])
            for index, tokens in enumerate(self.outputs)
        ]

    def output_record(self, clock: SteadyClock) -> bytes:
        """Return the request's output as one commit record, with its times converted from `clock`."""
        record = pb.JournalCommit(
            requests=[self.number] * len(self.outputs),
            sequence_indices=range(len(self.outputs)),
            num_tokens=[len(tokens) for tokens in self.outputs],
        )
        for index, tokens in enumerate(self.outputs):
            record.token_ids.extend(tokens)
            for extra in self.extras[index]:
                record.outputs.add(
                    request=self.number, sequence_index=index, token_offset=extra.token_offset, data=extra.data
                )
        for index, links in enumerate(self.complete_links):
            for place, link in enumerate(links):
                num_tokens = (place + 1) * LINK_TOKENS
                record.links.add(request=self.number, sequence_index=index, num_tokens=num_tokens, digest=link)
        for index, end in self.ends.items():
            add_end(record, self.number, index, end)
        add_beam_steps(record, self.number, self.beam_steps)
        if self.kind is not None:
            add_kind(record, self.number, self.kind, self.kind_changed_at, self.earlier_kinds)
        if self.finish is not None:
            add_finish(record, self.number, self.finish, clock)
        return record.SerializeToString()

    def drop_changed_tokens(self) -> bool:
        """Drop tokens that were changed in the journal, so that they are computed again; return whether there were any.

        A changed token changes its link. Tokens after the last complete link are protected by checksums alone.
        """
        nonce, was_changed = self.recovered.spec.receipt_nonce, False
        if not nonce or self.recovered.spec.beam_width > 1:
            return False
        for index, tokens in enumerate(self.outputs):
            length = num_confirmed(nonce, index, tokens, self.links.get(index, ()))
            if length < len(tokens):
                was_changed = True
                del tokens[length:]
                self.extras[index][:] = [extra for extra in self.extras[index] if extra.token_offset < length]
                self.ends.pop(index, None)
                self.finish = None
        return was_changed

    def event(self, time_ns: int) -> Recovered:
        """Return the event that restores the request in the core."""
        return replace(
            self.recovered,
            time_ns=time_ns,
            outputs=tuple(self.outputs),
            ends=tuple(self.ends.items()),
            extras=tuple(tuple(items) for items in self.extras),
            finish=self.finish,
            beam_steps=tuple(self.beam_steps),
            kind=self.kind,
            kind_changed_at=self.kind_changed_at,
            earlier_kinds=self.earlier_kinds,
        )


@dataclass(slots=True)
class Replayed:
    """The result of reading all rows.

    Attributes:
        num_damaged: Number of rows that could not be read, and of commits from the first unreadable one on.
        num_foreign: Number of requests of another model, which are left out.
    """

    requests: dict[int, StoredRequest] = field(default_factory=dict)
    num_damaged: int = 0
    num_foreign: int = 0


def encode_request(request: Request, model_fingerprint: str, clock: SteadyClock) -> bytes:
    """Return the record of an accepted request."""
    deadline_ns = request.spec.deadline_ns
    return pb.JournalRequest(
        payload=request.spec.payload,
        deadline_unix_ns=None if deadline_ns is None else clock.to_unix_ns(deadline_ns),
        accepted_unix_ns=clock.to_unix_ns(request.times.queued_ns),
        model_fingerprint=model_fingerprint,
        deadline_monotonic_ns=None if deadline_ns is None else clock.to_monotonic_ns(deadline_ns),
        boot_id=clock.boot_id,
    ).SerializeToString()


def add_end(record: pb.JournalCommit, number: int, index: int, end: SequenceEnd) -> None:
    record.sequence_ends.add(
        request=number,
        sequence_index=index,
        finish_reason=generation_pb2.FinishReason.ValueType(end.reason),
        num_tokens=end.num_tokens,
        stop_word=end.stop_word,
        stop_token_id=end.stop_token_id,
        cumulative_log_prob=end.cumulative_log_prob,
    )


def add_kind(
    record: pb.JournalCommit, number: int, kind: Kind, changed_at: tuple[int, ...], earlier: tuple[EarlierKind, ...]
) -> None:
    record.kinds.add(request=number, kind=kind_to_proto(kind), changed_at=changed_at, earlier=earlier_to_proto(earlier))


def add_beam_steps(record: pb.JournalCommit, number: int, steps: Iterable[BeamStep]) -> None:
    for step in steps:
        kept = record.beam_steps.add(
            request=number,
            parents=step.parents,
            token_ids=step.token_ids,
            log_probs=step.log_probs,
            token_ranks=step.token_ranks,
            stop_words=step.stop_words,
        )
        for rank, reports in enumerate(step.reports):
            kept.report_ranks.extend([rank] * len(reports))
            kept.reports.extend(reports)


def read_beam_step(record: pb.JournalBeamStep) -> BeamStep:
    reports: list[list[bytes]] = [[] for _ in range(max(record.report_ranks, default=-1) + 1)]
    for rank, data in zip(record.report_ranks, record.reports, strict=True):
        reports[rank].append(data)
    return BeamStep(
        tuple(record.parents),
        tuple(record.token_ids),
        tuple(record.log_probs),
        tuple(record.token_ranks),
        tuple(map(tuple, reports)),
        tuple(record.stop_words),
    )


def add_finish(record: pb.JournalCommit, number: int, finish: Finish, clock: SteadyClock) -> None:
    """Add the final state of an ended request to a record."""
    failure = finish.failure
    message = record.finished.add(
        request=number,
        **dict(zip(_TIMES, clock.to_unix_each(_times_of(finish.times)), strict=True)),
        **dict(zip(_COUNTERS, _counters_of(finish.counters), strict=True)),
    )
    if failure is not None:
        message.error.code, message.error.message, message.error.field = failure.code, failure.message, failure.field


def replay(stored: StoredJournal, limits: ModelLimits, model_fingerprint: str, clock: SteadyClock) -> Replayed:
    """Restore requests from rows.

    A request is read up to the first damaged commit after its row. The rest of its output is recomputed with the same
    result, which depends only on the request. Only requests whose own record is damaged are left out. Times are
    converted to `clock`.
    """
    result = Replayed(num_damaged=stored.num_damaged)
    for number, sealed, output in stored.requests:
        request = _read_request(number, sealed, limits, clock)
        if request is None:
            result.num_damaged += 1
        elif request[1] != model_fingerprint:
            result.num_foreign += 1
        else:
            result.requests[number] = request[0]
            if output and not _apply(output, result.requests, clock):
                result.num_damaged += 1
            request[0].first_commit = stored.first_commits.get(number, 0)
    _replay_commits(stored.commits, result, clock)
    for item in result.requests.values():
        if item.drop_changed_tokens():
            item.is_changed = True
            result.num_damaged += 1
    return result


def _replay_commits(commits: list[tuple[int, bytes]], result: Replayed, clock: SteadyClock) -> None:
    later = sorted(result.requests.values(), key=lambda request: request.first_commit, reverse=True)
    current: dict[int, StoredRequest] = {}
    is_damaged = False
    for number, sealed in commits:
        while later and later[-1].first_commit <= number:
            request = later.pop()
            current[request.number] = request
        if not _apply(sealed, current, clock, marks=True):
            is_damaged = True
            current.clear()
        result.num_damaged += is_damaged


def _read_request(
    number: int, sealed: bytes, limits: ModelLimits, clock: SteadyClock
) -> tuple[StoredRequest, str] | None:
    data = unseal(sealed)
    if data is None:
        return None
    try:
        record = pb.JournalRequest.FromString(data)
        payload = generation_pb2.GenerateRequest.FromString(record.payload)
        spec = replace(
            spec_from_proto(payload, limits, clock.from_unix_ns(record.accepted_unix_ns)),
            arrival_ns=clock.from_unix_ns(payload.arrival_time_unix_ns or record.accepted_unix_ns),
            deadline_ns=_read_deadline(record, clock),
            payload=record.payload,
        )
    except (DecodeError, ValueError, OverflowError) as error:
        # Perhaps a newer version wrote it. Only this request is lost.
        logger.error("the journal's request %d is unreadable: %s", number, error)
        return None
    outputs = [array("I") for _ in range(spec.num_sequences)]
    stored = StoredRequest(number, Recovered(0, spec, tuple(outputs)), outputs, [[] for _ in outputs])
    return stored, record.model_fingerprint


def _read_deadline(record: pb.JournalRequest, clock: SteadyClock) -> int | None:
    if not record.HasField("deadline_unix_ns"):
        return None
    if record.HasField("deadline_monotonic_ns") and record.boot_id and record.boot_id == clock.boot_id:
        return clock.from_monotonic_ns(record.deadline_monotonic_ns)
    return clock.from_unix_ns(record.deadline_unix_ns)


def _apply(sealed: bytes, requests: dict[int, StoredRequest], clock: SteadyClock, *, marks: bool = False) -> bool:
    """Apply a commit record; return False if it is damaged. Entries about unknown requests are skipped."""
    data = unseal(sealed)
    if data is None:
        return False
    try:
        record = pb.JournalCommit.FromString(data)
    except DecodeError:
        return False
    for number, index, tokens in _runs(record):
        if number in requests:
            requests[number].outputs[index].extend(tokens)
            requests[number].is_changed |= marks
    for extra in record.outputs:
        if extra.request in requests:
            output = ExtraOutput(extra.token_offset, extra.data)
            requests[extra.request].extras[extra.sequence_index].append(output)
    _apply_links(record, requests)
    for step in record.beam_steps:
        if step.request in requests:
            requests[step.request].beam_steps.append(read_beam_step(step))
            requests[step.request].is_changed |= marks
    _apply_kinds(record, requests, marks)
    _apply_ends(record, requests, clock, marks)
    return True


def _apply_links(record: pb.JournalCommit, requests: dict[int, StoredRequest]) -> None:
    for link in record.links:
        if link.request in requests:
            requests[link.request].links.setdefault(link.sequence_index, []).append(link.digest)


def _apply_kinds(record: pb.JournalCommit, requests: dict[int, StoredRequest], marks: bool) -> None:
    for item in record.kinds:
        if item.request in requests:
            found = requests[item.request]
            found.kind, found.kind_changed_at = kind_from_proto(item.kind), tuple(item.changed_at)
            found.earlier_kinds = earlier_from_proto(item.earlier)
            found.is_changed |= marks


def _apply_ends(record: pb.JournalCommit, requests: dict[int, StoredRequest], clock: SteadyClock, marks: bool) -> None:
    for end in record.sequence_ends:
        if end.request in requests:
            stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
            requests[end.request].ends[end.sequence_index] = SequenceEnd(
                FinishReason(end.finish_reason), end.num_tokens, end.stop_word, stop_token_id
            )
            if end.HasField("cumulative_log_prob"):
                requests[end.request].ends[end.sequence_index].cumulative_log_prob = end.cumulative_log_prob
            requests[end.request].is_changed |= marks
    for finish in record.finished:
        if finish.request in requests:
            requests[finish.request].finish = _read_finish(finish, clock)
            requests[finish.request].is_changed |= marks


def _runs(record: pb.JournalCommit) -> Iterator[tuple[int, int, array[int]]]:
    tokens = array("I", record.token_ids)
    indices = record.sequence_indices[:] or [0] * len(record.requests)
    counts = record.num_tokens[:] or [1] * len(record.requests)
    start = 0
    for number, index, count in zip(record.requests, indices, counts, strict=True):
        yield number, index, tokens[start : start + count]
        start += count


def _read_finish(record: pb.JournalFinish, clock: SteadyClock) -> Finish:
    failure = None
    if record.HasField("error"):
        failure = Failure(record.error.code, record.error.message, record.error.field)
    times = RequestTimes(**{name: clock.from_unix_ns(getattr(record, name)) for name in _TIMES})
    counters = Counters(**{name: getattr(record, name) for name in _COUNTERS})
    return Finish(times, failure, counters)
