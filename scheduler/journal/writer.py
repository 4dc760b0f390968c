"""Converts effects to rows; the output of all requests since the last commit is packed into one record."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from midstream.clock import SteadyClock
from midstream.receipts.digests import LINK_TOKENS, before_links, next_link
from protos import journal_pb2 as pb
from scheduler.core.beams import BeamStep
from scheduler.core.effects import (
    Accepted,
    BeamsAdvanced,
    Emitted,
    KindSet,
    RequestEnded,
    RequestForgotten,
    SequenceEnded,
)
from scheduler.core.events import Recovered
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.request import ExtraOutput, Request, Sequence
from scheduler.journal import AdapterLoaded, AdapterUnloaded, JournalEntry
from scheduler.journal.adapters import encode_adapter
from scheduler.journal.records import StoredRequest, add_beam_steps, add_end, add_finish, add_kind, encode_request
from scheduler.journal.store import Transaction, seal

# The cost of compaction grows with the size of the rows that it writes, so it waits until the commits are larger than
# these rows, and larger than this.
MIN_COMPACTION_BYTES = 1 << 20


@dataclass(slots=True)
class Kept:
    """Records how much of a request is already in the journal.

    Attributes:
        lengths: Number of output tokens of each sequence.
        num_outputs: Number of extra outputs of each sequence.
        num_bytes: Approximate size of its output.
        request_bytes: Approximate size of the accepted request.
        num_beam_steps: Number of steps of its beam search.
        kind: The stored kind. kind_changed_at, earlier_kinds: As in Request.
        has_ended: Whether each sequence's end is stored. is_over: Whether the request's end is stored.
        links: The last complete link of the chain over each sequence's tokens, once there is one; see JournalLink.
    """

    number: int
    lengths: list[int]
    num_outputs: list[int]
    has_ended: list[bool]
    is_over: bool = False
    num_bytes: int = 0
    num_beam_steps: int = 0
    request_bytes: int = 0
    kind: Kind | None = None
    kind_changed_at: tuple[int, ...] = ()
    earlier_kinds: tuple[EarlierKind, ...] = ()
    links: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Runs:
    """Columns of a JournalCommit under construction."""

    requests: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("I"))

    def write(self, record: pb.JournalCommit) -> None:
        record.requests.extend(self.requests)
        record.token_ids.extend(self.tokens)
        if any(self.indices):
            record.sequence_indices.extend(self.indices)
        if len(self.tokens) != len(self.counts) or any(count != 1 for count in self.counts):
            record.num_tokens.extend(self.counts)


class RowWriter:
    """Converts effects to rows, and tracks what is already in the journal.

    Attributes:
        live_bytes: Approximate size of all requests' rows.
    """

    def __init__(
        self,
        kept: dict[str, Kept],
        model_fingerprint: str,
        clock: SteadyClock,
        adapters: Iterable[tuple[str, bytes]] = (),
        *,
        folds_commits: bool = True,
    ) -> None:
        """Continue after the stored state.

        Args:
            kept: Contents of the journal when it was opened, by request id; compacted.
            adapters: Sealed adapter records of the journal, by name.
        """
        self._add: dict[type[Any], Callable[[Any, Transaction, pb.JournalCommit], None]] = {
            Accepted: self._accept,
            BeamsAdvanced: self._add_beam_steps,
            KindSet: self._set_kind,
            SequenceEnded: self._end_sequence,
            RequestEnded: self._finish,
            RequestForgotten: self._forget,
            AdapterLoaded: self._load,
            AdapterUnloaded: self._unload,
        }
        self._folds_commits = folds_commits
        self._adapters = dict(adapters)
        self._requests: dict[str, Request] = {}
        self._clock = clock
        self.num_compactions = 0
        self._kept = kept
        self._model_fingerprint = model_fingerprint
        self._next_number = max((item.number for item in kept.values()), default=0) + 1
        self._changed: dict[str, Request] = {}
        self._commit_bytes = 0
        self._changed_bytes = 0
        self._ids = {item.number: request_id for request_id, item in kept.items()}
        self.live_bytes = sum(item.num_bytes + item.request_bytes for item in kept.values())

    def transaction(self, entries: Iterable[JournalEntry]) -> Transaction:
        """Return the rows for the next entries."""
        result, record, runs = Transaction(), pb.JournalCommit(), _Runs()
        for entry in entries:
            if type(entry) is Emitted:
                self._add_tokens(entry, runs, record)
            else:
                self._add[type(entry)](entry, result, record)
        runs.write(record)
        data = record.SerializeToString()
        if data:
            result.commit = seal(data)
            self._commit_bytes += len(result.commit)
        if self._folds_commits and self._commit_bytes > max(MIN_COMPACTION_BYTES, self._changed_bytes):
            result.compacted = self._compact()
        return result

    def _load(self, entry: AdapterLoaded, result: Transaction, _: pb.JournalCommit) -> None:
        sealed = self._adapters[entry.adapter.name] = seal(encode_adapter(entry.adapter, self._model_fingerprint))
        result.adapters.append((entry.adapter.name, sealed))

    def _unload(self, entry: AdapterUnloaded, result: Transaction, _: pb.JournalCommit) -> None:
        self._adapters.pop(entry.name, None)
        result.adapters.append((entry.name, b""))

    def _accept(self, entry: Accepted, result: Transaction, _: pb.JournalCommit) -> None:
        request = entry.request
        count = len(request.sequences)
        kept = Kept(self._next_number, [0] * count, [0] * count, [False] * count)
        self._next_number += 1
        self._kept[request.request_id] = kept
        self._ids[kept.number] = request.request_id
        self._requests[request.request_id] = request
        data = encode_request(request, self._model_fingerprint, self._clock)
        kept.request_bytes = len(data)
        self.live_bytes += len(data)
        result.accepted.append((kept.number, seal(data)))

    def _add_tokens(self, entry: Emitted, runs: _Runs, record: pb.JournalCommit) -> None:
        # This loop runs once per token.
        kept_of, tokens = self._kept, runs.tokens
        add_request, add_index, add_count = runs.requests.append, runs.indices.append, runs.counts.append
        num_before = len(tokens)
        for sequence, length in zip(entry.sequences, entry.lengths, strict=True):
            spec, index = sequence.request.spec, sequence.index
            if spec.tensor_bytes:
                continue  # the output of such a request is not stored, but computed again
            kept = kept_of[spec.request_id]
            start = kept.lengths[index]
            count = length - start
            kept.lengths[index] = length
            kept.num_bytes += 4 * count
            add_request(kept.number)
            add_index(index)
            add_count(count)
            if count == 1:
                tokens.append(sequence.output[start])
            else:
                tokens.extend(sequence.output[start:length])
            if self._folds_commits:
                self._mark_changed(sequence.request, kept, 4 * count)
            if length % LINK_TOKENS < count and spec.receipt_nonce:
                self._add_links(sequence, start, length, kept, record)
            if sequence.outputs:
                self._add_outputs(sequence, length, kept, record)
        self.live_bytes += 4 * (len(tokens) - num_before)

    def _add_links(self, sequence: Sequence, start: int, length: int, kept: Kept, record: pb.JournalCommit) -> None:
        """Add the links that the tokens [start, length) complete."""
        nonce, index = sequence.request.spec.receipt_nonce, sequence.index
        link = kept.links.get(index) or before_links(nonce, index)
        for end in range(start - start % LINK_TOKENS + LINK_TOKENS, length + 1, LINK_TOKENS):
            link = next_link(link, sequence.output[end - LINK_TOKENS : end])
            record.links.add(request=kept.number, sequence_index=index, num_tokens=end, digest=link)
        kept.links[index] = link

    def _add_beam_steps(self, entry: BeamsAdvanced, _: Transaction, record: pb.JournalCommit) -> None:
        request, beams = entry.request, entry.request.beams
        if request.spec.tensor_bytes:
            return
        kept = self._kept[request.request_id]
        assert beams is not None
        steps = beams.search.steps[kept.num_beam_steps : entry.num_steps]
        kept.num_beam_steps = entry.num_steps
        add_beam_steps(record, kept.number, steps)
        self._add_extras(0, request.sequences[0].outputs[kept.num_outputs[0] : entry.num_outputs], kept, record)
        num_bytes = sum(map(_num_bytes, steps))
        kept.num_bytes += num_bytes
        self.live_bytes += num_bytes
        self._mark_changed(request, kept, num_bytes)

    def _add_outputs(self, sequence: Sequence, length: int, kept: Kept, record: pb.JournalCommit) -> None:
        extras = sequence.outputs[kept.num_outputs[sequence.index] :]
        self._add_extras(sequence.index, takewhile(lambda extra: extra.token_offset < length, extras), kept, record)

    def _add_extras(self, index: int, extras: Iterable[ExtraOutput], kept: Kept, record: pb.JournalCommit) -> None:
        for extra in extras:
            kept.num_outputs[index] += 1
            kept.num_bytes += len(extra.data)
            self.live_bytes += len(extra.data)
            record.outputs.add(
                request=kept.number, sequence_index=index, token_offset=extra.token_offset, data=extra.data
            )

    def _mark_changed(self, request: Request, kept: Kept, num_bytes: int) -> None:
        """Let the next compaction write the request's row, which has grown by `num_bytes`."""
        if not self._folds_commits:
            return
        if request.request_id not in self._changed:
            self._changed[request.request_id] = request
            self._changed_bytes += kept.num_bytes
        else:
            self._changed_bytes += num_bytes

    def _set_kind(self, entry: KindSet, _: Transaction, record: pb.JournalCommit) -> None:
        kept = self._kept[entry.request.request_id]
        kept.kind, kept.kind_changed_at, kept.earlier_kinds = entry.kind, entry.changed_at, entry.earlier
        add_kind(record, kept.number, entry.kind, entry.changed_at, entry.earlier)
        self._mark_changed(entry.request, kept, 0)

    def _end_sequence(self, entry: SequenceEnded, _: Transaction, record: pb.JournalCommit) -> None:
        sequence = entry.sequence
        request = sequence.request
        if request.spec.tensor_bytes:
            return
        kept = self._kept.get(request.request_id)
        if kept is None:
            return  # restored from the kept requests (scheduler/edge/kept_requests.py)
        kept.has_ended[sequence.index] = True
        assert sequence.end is not None
        add_end(record, kept.number, sequence.index, sequence.end)
        self._mark_changed(request, kept, 0)

    def _finish(self, entry: RequestEnded, _: Transaction, record: pb.JournalCommit) -> None:
        request = entry.request
        if request.spec.tensor_bytes:
            return
        kept = self._kept[request.request_id]
        kept.is_over = True
        add_finish(record, kept.number, request.finish, self._clock)
        self._mark_changed(request, kept, 0)

    def _forget(self, entry: RequestForgotten, result: Transaction, _: pb.JournalCommit) -> None:
        request = entry.request
        self._requests.pop(request.request_id, None)
        kept = self._kept.pop(request.request_id, None)
        if kept is not None:
            result.forgotten.append(kept.number)
            del self._ids[kept.number]
            self.live_bytes -= kept.num_bytes + kept.request_bytes
            if self._changed.pop(request.request_id, None) is not None:
                self._changed_bytes -= kept.num_bytes

    def know(self, requests: Iterable[Request]) -> None:
        """Register the requests restored from the journal."""
        self._requests.update((request.request_id, request) for request in requests if request.request_id in self._kept)

    def everything(self) -> Transaction:
        """Return all rows as of the last transaction, to fill an empty journal."""
        self._changed.clear()
        self._changed_bytes = self._commit_bytes = 0
        return Transaction(rewritten=self.rows(self._ids), adapters=list(self._adapters.items()))

    def rows(self, numbers: Iterable[int]) -> list[tuple[int, bytes, bytes]]:
        """Return the rows of some requests as of the last transaction; dropped requests have none."""
        rows = []
        for number in numbers:
            if number not in self._ids:
                continue
            request_id = self._ids[number]
            request = self._requests[request_id]
            data = encode_request(request, self._model_fingerprint, self._clock)
            output = _stored(request, self._kept[request_id]).output_record(self._clock)
            rows.append((number, seal(data), seal(output)))
        return rows

    def _compact(self) -> list[tuple[int, bytes]]:
        rows = []
        for request_id, request in self._changed.items():
            kept = self._kept[request_id]
            rows.append((kept.number, seal(_stored(request, kept).output_record(self._clock))))
        self._changed.clear()
        self._changed_bytes = self._commit_bytes = 0
        self.num_compactions += 1
        return rows


def _num_bytes(step: BeamStep) -> int:
    return (
        13 * len(step.parents) + len(step.stop_words) + sum(len(data) for reports in step.reports for data in reports)
    )


def _stored(request: Request, kept: Kept) -> StoredRequest:
    """Return a request as it is in the journal."""
    lengths, counts = kept.lengths, kept.num_outputs
    stored = StoredRequest(
        kept.number,
        Recovered(0, request.spec, ()),
        [sequence.output[:length] for sequence, length in zip(request.sequences, lengths, strict=True)],
        [sequence.outputs[:count] for sequence, count in zip(request.sequences, counts, strict=True)],
        {s.index: s.end for s in request.sequences if kept.has_ended[s.index] and s.end is not None},
        kind=kept.kind,
        kind_changed_at=kept.kind_changed_at,
        earlier_kinds=kept.earlier_kinds,
    )
    if kept.is_over:
        stored.finish = request.finish
    elif request.beams is not None:
        stored.beam_steps = request.beams.search.steps[: kept.num_beam_steps]
    return stored


def kept_of(stored: StoredRequest) -> Kept:
    """Return how much of a stored request is in the journal."""
    return Kept(
        stored.number,
        [len(tokens) for tokens in stored.outputs],
        [len(extras) for extras in stored.extras],
        [index in stored.ends for index in range(len(stored.outputs))],
        stored.finish is not None,
        4 * sum(map(len, stored.outputs)) + sum(len(extra.data) for items in stored.extras for extra in items),
        len(stored.beam_steps),
        len(stored.recovered.spec.payload),
        stored.kind,
        stored.kind_changed_at,
        stored.earlier_kinds,
        {index: links[-1] for index, links in enumerate(stored.complete_links) if links},
    )
