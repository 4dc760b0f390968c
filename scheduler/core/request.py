"""Requests and their sequences.

A request has one or more sequences, each of which produces one output. A sequence's tokens are its request's prompt and
its own output so far, and all other state can be rebuilt from these: a sequence that is paused, or whose worker died,
restarts as if its output were a part of its prompt.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from midstream.record import record
from scheduler.core.beams import BeamSearch, BeamStep, Candidate
from scheduler.core.failure import Failure
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.request_spec import RequestSpec

# `first_ordinal` of a sequence whose results are ignored: it is not on a worker, or has ended.
NO_RESULTS = 1 << 62

# Delays of a request that a worker could not run yet: 20 ms to 2.6 s.
_FIRST_DELAY_NS, _MAX_DOUBLINGS = 20_000_000, 7


class FinishReason(enum.IntEnum):
    """Why a sequence ended; the numbers are those of the protocol."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    DEADLINE = 4
    ERROR = 5


class RequestState(enum.Enum):
    """State of a request; it returns to QUEUED when it is paused or loses its worker."""

    QUEUED = "queued"
    ACTIVE = "active"
    FINISHED = "finished"


@dataclass(slots=True)
class SequenceEnd:
    """The end of a sequence: it consists of its first `num_tokens` output tokens."""

    reason: FinishReason
    num_tokens: int
    stop_word: str = ""
    stop_token_id: int | None = None
    cumulative_log_prob: float | None = None


@dataclass(slots=True)
class ExtraOutput:
    """Extra output from a worker: a serialized RowOutputs for the output tokens from `token_offset` on."""

    token_offset: int
    data: bytes


class Sequence:
    """One output of a request, and its state on a worker group.

    Attributes:
        output: Output tokens so far.
        table: Blocks that hold its tokens' keys and values.
        num_freed: Number of leading blocks of the table that have left the attention window. They were released, except
            the first `num_sink_blocks`.
        num_hit_blocks: Number of leading blocks that other sequences compute or have computed.
        num_reserved: Number of blocks reserved for it until its end.
        num_computed: Number of tokens whose keys and values are in the cache once all planned steps have run.
        max_num_tokens: Maximum number of tokens whose keys and values are computed.
        checkpoint: Value of num_computed at which generation needs another block or reaches `max_num_tokens`.
        waits_for_result: Whether its next step depends on its last result, as with beams and speculation.
        row: Its row at the worker; None if it has no row.
        is_on_worker: Whether the row was sent to the worker.
        first_ordinal: Results of steps before this one are ignored.
        next_publish: Output length at which the next block of generated tokens can be published.
        next_look: Output length at which a block can be published or the output has its maximum length.
    """

    __slots__ = (
        "_block_hashes",
        "checkpoint",
        "end",
        "first_ordinal",
        "index",
        "is_on_worker",
        "last_token_ns",
        "max_num_tokens",
        "next_look",
        "next_publish",
        "num_computed",
        "num_freed",
        "num_hit_blocks",
        "num_reserved",
        "num_sink_blocks",
        "output",
        "outputs",
        "possible_ends",
        "request",
        "row",
        "table",
        "waits_for_result",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.output: array[int] = array("I")
        self.outputs: list[ExtraOutput] = []
        self.end: SequenceEnd | None = None
        # Worker groups may have blocks of different sizes.
        self._block_hashes: dict[int, list[int]] = {}
        self.last_token_ns = 0
        # Accessed for each token or block.
        self.possible_ends = request.spec.possible_ends
        self.max_num_tokens = request.spec.max_num_tokens
        self.waits_for_result = request.spec.beam_width > 1 or request.spec.num_draft_tokens > 0
        self.clear_placement()

    def clear_placement(self) -> None:
        """Clear the sequence's placement on a worker; its tokens are kept."""
        if self.outputs and not self.output:
            self.outputs = []  # the outputs of the prompt are reported again
        self.table: list[int] = []
        self.num_freed = 0
        self.num_sink_blocks = 0
        self.num_hit_blocks = 0
        self.num_reserved = 0
        self.num_computed = 0
        self.checkpoint = 0
        self.next_publish = self.next_look = 0
        self.row: int | None = None
        self.is_on_worker = False
        self.first_ordinal = NO_RESULTS

    def block_hashes(self, tokens_per_block: int) -> list[int]:
        """Return the hash chain over its full blocks of this size, as far as computed."""
        return self._block_hashes.setdefault(tokens_per_block, [])

    def take_hashes(self, other: Sequence) -> None:
        """Take over the hash chains of a sequence with the same leading tokens."""
        self._block_hashes = {size: hashes.copy() for size, hashes in other._block_hashes.items()}

    def restore(self, tokens: Iterable[int], extras: Iterable[ExtraOutput] = ()) -> None:
        """Set the output produced under an earlier scheduler. Precondition: the sequence has not been placed."""
        self.output = array("I", tokens)
        self.outputs = list(extras)

    def append(self, token: int, now_ns: int) -> None:
        """Append a token of this sequence's output, received at `now_ns`."""
        self.last_token_ns = now_ns
        self.output.append(token)

    @staticmethod
    def append_next(sequences: Iterable[Sequence], tokens: Iterable[int], now_ns: int) -> list[Sequence]:
        """Append one token to each sequence; like `append`, but for all generating sequences of a step in one call.

        Returns:
            The sequences whose new token may end them, or fills a block.
        """
        due: list[Sequence] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.last_token_ns = now_ns
            output = sequence.output
            output.append(token)
            if len(output) == sequence.next_look or token in sequence.possible_ends:
                due.append(sequence)
        return due

    def take_output(self, tokens: array[int]) -> None:
        """Replace the output by that of a beam; the array is not copied."""
        self.output = tokens

    def extend_to(self, tokens: array[int], num_tokens: int, now_ns: int) -> bool:
        """Extend the output to the first `num_tokens` of `tokens`; return whether any were added."""
        num_known = len(self.output)
        if num_tokens <= num_known:
            return False
        self.last_token_ns = now_ns
        self.output.extend(tokens[num_known:num_tokens])
        return True

    def forget_extras(self) -> None:
        """Drop extra outputs; the worker will report them again."""
        self.outputs = []

    def finish(self, end: SequenceEnd) -> None:
        """Set the sequence's end; an earlier end replaces a later one."""
        self.end = end

    def place(self, row: int, ordinal: int) -> None:
        """Place the sequence in a row. Results of steps before `ordinal` are ignored."""
        self.row = row
        self.first_ordinal = ordinal

    def mark_sent(self) -> None:
        """Record that the sequence's row was sent to the worker."""
        self.is_on_worker = True

    def hold(self, table: list[int], num_hit_blocks: int, num_reserved: int) -> None:
        """Set the sequence's blocks; other sequences compute or have computed the first `num_hit_blocks` of them."""
        self.table = table
        self.num_hit_blocks = num_hit_blocks
        self.num_reserved = num_reserved

    def fork_from(self, source: Sequence, num_full: int) -> None:
        """Take over the source's progress and its first `num_full` blocks."""
        self.table = source.table[:num_full]
        self.num_freed, self.num_sink_blocks = source.num_freed, source.num_sink_blocks
        self.num_computed = source.num_computed

    def drop_blocks(self) -> None:
        """Clear the sequence's block table; its row stays."""
        self.table, self.num_freed = [], 0

    def free_before(self, index: int, num_sink_blocks: int) -> None:
        """Record that the sequence's blocks before `index` were released, except for the first `num_sink_blocks`."""
        self.num_freed, self.num_sink_blocks = index, num_sink_blocks

    def reserve(self, num_blocks: int) -> None:
        self.num_reserved = num_blocks

    def limit_hits(self, num_blocks: int) -> None:
        """Set the number of leading blocks that other sequences compute or have computed."""
        self.num_hit_blocks = num_blocks

    def publish_at(self, num_output: int) -> None:
        """Set the output length at which the sequence's next full block is published."""
        self.next_publish = num_output
        self.next_look = min(num_output, self.request.spec.max_tokens)

    def compute_to(self, num_tokens: int) -> None:
        """Record that the sequence's first `num_tokens` tokens will be computed once the planned steps have run."""
        self.num_computed = num_tokens

    def check_at(self, checkpoint: int) -> None:
        """Set the value of `num_computed` at which generation needs another block or ends."""
        self.checkpoint = checkpoint

    @staticmethod
    def compute_next(sequences: Iterable[Sequence]) -> None:
        """Plan one more token for each sequence; like `compute_to`, but for all generating sequences of a step in one
        call.
        """
        for sequence in sequences:
            sequence.num_computed += 1

    @property
    def held_blocks(self) -> list[int]:
        """Return the blocks in the table that have not been released."""
        if not self.num_freed:
            return self.table
        return self.table[: self.num_sink_blocks] + self.table[self.num_freed :]

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output so far."""
        return len(self.request.spec.prompt) + len(self.output)

    @property
    def num_context_tokens(self) -> int:
        """Number of known tokens to compute before generation; at least 1 while in the context phase."""
        return len(self.request.spec.prompt) + len(self.output) - self.num_computed

    def tokens_between(self, start: int, end: int) -> array[int]:
        """Return the known tokens [start, end)."""
        prompt = self.request.spec.prompt
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        if start >= num_prompt:
            return self.output[start - num_prompt : end - num_prompt]
        return prompt[start:] + self.output[: end - num_prompt]

    def __repr__(self) -> str:
        return f"Sequence({self.request.spec.request_id}/{self.index}, {self.num_computed} of {self.num_tokens})"


@dataclass(slots=True)
class RequestTimes:
    """Times of events by the scheduler's steady clock; 0 if an event has not happened. `arrival_ns` was measured by
    another clock.
    """

    arrival_ns: int = 0
    queued_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0


@dataclass(slots=True)
class Counters:
    """The resources that a request has used so far.

    Attributes:
        num_cached_tokens: Number of prompt tokens found in the pool, or fetched from tiers or another worker.
    """

    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recoveries: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_kind_changes: int = 0


@record
class Finish:
    """The record of an ended request, without its output."""

    times: RequestTimes
    failure: Failure | None = None
    counters: Counters = field(default_factory=Counters)


class BeamLanes:
    """The sequences that run a beam search, one lane per beam.

    A beam's next token is chosen here, not by the worker, so its lane waits until all lanes have their candidates. Then
    each running beam is assigned a lane: the first child of a beam stays in its lane, further children fork into lanes
    whose beam was dropped. The fork happens with the next step that runs the request (StepBuilder): full blocks are
    shared, and the last, partly filled block is copied. If the request is paused before that, nothing is lost: it
    restarts from the tokens of its beams.

    Attributes:
        search: The state of the search.
        lanes: One per unit of beam width: lanes of the running beams by rank, then spare ones.
        forks: (from, to) pairs to carry out before a lane runs again.
        has_news: Whether the lanes' last tokens have yet to be sent to the worker.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.search = BeamSearch(request.spec)
        self.lanes = [Sequence(request, index) for index in range(request.spec.beam_width)]
        self.forks: list[tuple[Sequence, Sequence]] = []
        self.has_news = False
        self._candidates: dict[Sequence, TypingSequence[Candidate]] = {}
        self._stop_words: dict[Sequence, Mapping[int, int]] = {}
        self._reports: dict[Sequence, list[bytes]] = {}

    @property
    def running(self) -> TypingSequence[Sequence]:
        """Return the lanes of the running beams, by rank."""
        return self.lanes[: len(self.search.running)]

    @property
    def spare(self) -> TypingSequence[Sequence]:
        """Return the lanes without a beam."""
        return self.lanes[len(self.search.running) :]

    def restore(self, steps: TypingSequence[BeamStep]) -> None:
        """Replay beam-search steps from a journal. Precondition: no lane has been placed.

        A finished search whose outputs were not kept repeats its last step.
        """
        self.search = BeamSearch.restored(self.search.spec, steps)
        if self.search.is_over:
            self.search = BeamSearch.restored(self.search.spec, steps[:-1])
        self._take_tokens()
        self._forget_prompt()

    def mark_forked(self) -> None:
        """Record that the forks and last tokens are part of a step for the worker."""
        self.forks.clear()
        self.has_news = False

    def forget_placement(self) -> None:
        """Reset the lanes after the request left its group: candidates received so far are computed again."""
        self._forget_prompt()
        self.forks.clear()
        self.has_news = False
        self._candidates.clear()
        self._stop_words.clear()
        self._reports.clear()

    def _forget_prompt(self) -> None:
        if not self.search.steps:
            self._request.sequences[0].forget_extras()  # the worker will report the prompt's extra outputs again

    def report(self, lane: Sequence, data: bytes) -> None:
        """Store the extra outputs for a lane's candidates: a serialized RowOutputs."""
        self._reports.setdefault(lane, []).append(data)

    def take(
        self, lane: Sequence, candidates: TypingSequence[Candidate], stop_words: Mapping[int, int] | None = None
    ) -> bool:
        """Store the candidates of a lane, and the stop words that they complete as in `BeamSearch.choose`; return True
        once all lanes have theirs.
        """
        self._candidates[lane] = candidates
        if stop_words:
            self._stop_words[lane] = stop_words
        return len(self._candidates) == len(self.search.running)

    def advance(self) -> None:
        """Apply the search's next step and assign a lane to each beam. Precondition: all candidates are stored."""
        reports = tuple(tuple(self._reports.get(lane, ())) for lane in self.running) if self._reports else ()
        words = [self._stop_words.get(lane, {}) for lane in self.running] if self._stop_words else ()
        step = self.search.choose([self._candidates[lane] for lane in self.running], reports, words)
        self._candidates.clear()
        self._stop_words.clear()
        self._reports.clear()
        parents = self.search.apply(step)
        stays = {self.lanes[parent]: rank for rank, parent in reversed(list(enumerate(parents)))}
        free = iter([lane for lane in self.lanes if lane not in stays])
        chosen = []
        for rank, parent in enumerate(parents):
            source = self.lanes[parent]
            lane = source if stays[source] == rank else next(free)
            if lane is not source:
                self.forks.append((source, lane))
                lane.take_hashes(source)
            chosen.append(lane)
        self.lanes = [*chosen, *free]
        self.has_news = True
        self._take_tokens()

    def _take_tokens(self) -> None:
        for lane, beam in zip(self.running, self.search.running, strict=True):
            lane.take_output(beam.tokens)

    def ends(self, num_sequences: int) -> list[tuple[array[int], SequenceEnd]]:
        """Return the outputs and ends of a finished search, best first.

        If fewer beams have ended than requested, the remaining outputs are empty. If none has ended, the first output
        consists of the decided tokens, since these have been sent to the client.
        """
        found: list[tuple[array[int], SequenceEnd]] = []
        for item in self.search.ended[:num_sequences]:
            reason = FinishReason.STOP if item.is_stopped else FinishReason.LENGTH
            end = SequenceEnd(reason, len(item.beam.tokens), item.stop_word, item.stop_token_id)
            end.cumulative_log_prob = item.beam.cumulative
            found.append((item.beam.tokens, end))
        if not found:
            num_decided = self.search.num_decided
            end = SequenceEnd(FinishReason.STOP, num_decided)
            found.append((self.search.decided.tokens[:num_decided], end))
        missing = num_sequences - len(found)
        return found + [(array("I"), SequenceEnd(FinishReason.STOP, 0)) for _ in range(missing)]


class Host(Protocol):
    """A worker group, as seen by a request that runs on it."""

    @property
    def group_id(self) -> str:
        """The group's name."""

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens per block."""

    @property
    def context(self) -> TypingSequence[Sequence]:
        """Return the sequences in their context phase."""

    @property
    def inflight_request_ids(self) -> frozenset[str]:
        """Return the ids of requests that run in a step in flight."""

    def release(self, request: Request) -> None:
        """Release the rows and blocks of all sequences of a request."""

    def release_sequence(self, sequence: Sequence) -> None:
        """Release a sequence's row and blocks."""


@dataclass(slots=True, eq=False)
class Request:
    """A request and its state.

    Attributes:
        ordinal: Place in the order of arrival; smaller is older.
        group: The worker group whose blocks it holds; None while it is queued or after it has ended.
        counters: The resources that it has used so far.
        lost_store: kv_store of the dead worker whose pool may still hold its blocks.
        may_fetch: Whether its blocks may be fetched from tiers; False after a worker died while fetching them.
        is_read_ahead: Whether a group was told to read its blocks from tiers while it waits.
        may_hand_over: Whether it may move from a prefill to a decode group; False after a move has failed.
        died_on: Groups that died consecutively while running it, without a new token in between.
        silent_on: Groups that fell silent consecutively while running it, without a new token in between.
        num_attached: Number of detokenizers attached to its feed.
        num_delays: How often the delay before its next start was doubled.
        last_ordinal: The last step whose result was counted in num_steps.
        failure: Set when it ended in error.
        beams: Its beam search, if any.
        kind: Kind of the groups that compute its tokens; None before its first start.
        kind_changed_at: For each sequence, the number of its tokens when the kind first changed; empty if it has not.
        earlier_kinds: The kinds that computed its first tokens, oldest first, with the lengths up to which they did.
        is_repeated: Whether tokens that were shown are computed again, because the journal has no output.
        may_change_kind: Whether it may start on a group of another kind.
        unproven_on: Incarnations of the groups on which it ran before they had hashed their weights.
        is_check: Whether it only computes a token of another request again (see verification.py).
    """

    spec: RequestSpec
    ordinal: int
    times: RequestTimes = field(default_factory=RequestTimes)
    state: RequestState = RequestState.QUEUED
    sequences: list[Sequence] = field(default_factory=list)
    group: Host | None = None
    counters: Counters = field(default_factory=Counters)
    num_handovers: int = 0
    lost_store: str = ""
    may_fetch: bool = True
    is_read_ahead: bool = False
    may_hand_over: bool = True
    died_on: tuple[str, ...] = ()
    silent_on: tuple[str, ...] = ()
    num_delays: int = 0
    last_ordinal: int = -1
    num_attached: int = 0
    orphaned_ns: int = 0
    waiting_since_ns: int = 0
    failure: Failure | None = None
    beams: BeamLanes | None = None
    kind: Kind | None = None
    kind_changed_at: tuple[int, ...] = ()
    earlier_kinds: tuple[EarlierKind, ...] = ()
    is_repeated: bool = False
    may_change_kind: bool = False
    unproven_on: tuple[int, ...] = ()
    is_check: bool = False

    def __post_init__(self) -> None:
        self.sequences = [Sequence(self, index) for index in range(self.spec.num_sequences)]
        if self.spec.beam_width > 1:
            self.beams = BeamLanes(self)

    @classmethod
    def restored(cls, spec: RequestSpec, ordinal: int, finish: Finish) -> Request:
        """Return an ended request, restored from its record."""
        return cls(
            spec,
            ordinal,
            times=finish.times,
            state=RequestState.FINISHED,
            counters=finish.counters,
            failure=finish.failure,
        )

    @classmethod
    def check_of(cls, sequence: Sequence, num_output_tokens: int, ordinal: int) -> Request:
        """Return a request that computes the token after the first output tokens of a sequence again.

        It has a salt of its own, so that it never uses blocks which another request has computed.
        """
        spec = replace(
            sequence.request.spec,
            max_tokens=num_output_tokens + 1,
            num_sequences=1,
            num_draft_tokens=0,
            cache_salt=f"{sequence.request.spec.cache_salt}\0check",
            is_cacheable=True,
            retention=(),
        )
        check = cls(spec, ordinal, may_fetch=False, is_check=True)
        check.times.first_scheduled_ns = 1  # it is not a part of the latencies
        check.sequences = [Sequence(check, sequence.index)]
        check.sequences[0].restore(sequence.output[:num_output_tokens])
        return check

    def note_silence(self, group_id: str) -> int:
        """Record a group that fell silent while running the request; return how many groups have done so since its last
        token.
        """
        self.silent_on += (group_id,)
        return len(self.silent_on)

    def note_death(self, group_id: str) -> None:
        """Record a group that died while running the request."""
        self.died_on += (group_id,)

    def forget_death(self, group_id: str) -> None:
        """Drop one record of a group's death."""
        first = self.died_on.index(group_id)
        self.died_on = self.died_on[:first] + self.died_on[first + 1 :]

    def note_progress(self) -> None:
        """Clear the groups that died or fell silent while running the request, since it has a new token."""
        self.died_on = self.silent_on = ()
        self.num_delays = 0

    def next_delay_ns(self) -> int:
        """Return how long to wait before a worker that could not run the request yet tries again. Each delay is twice
        as long as the one before, since the worker computes the request's tokens again each time.
        """
        delay_ns = _FIRST_DELAY_NS << self.num_delays
        self.num_delays = min(self.num_delays + 1, _MAX_DOUBLINGS)
        return delay_ns

    def accept(self, now_ns: int) -> None:
        """Start the request's clocks."""
        self.times.arrival_ns = self.spec.arrival_ns or now_ns
        self.times.queued_ns = self.orphaned_ns = self.waiting_since_ns = now_ns

    def activate(self, group: Host) -> None:
        self.group = group
        self.state = RequestState.ACTIVE

    def leave_group(self) -> None:
        """Record that the request no longer holds anything on its group."""
        self.group = None

    def wait(self) -> None:
        """Record that the request is queued."""
        self.state = RequestState.QUEUED

    def wait_again(self, now_ns: int) -> None:
        """Record that the request is queued again, and start to measure how long it waits for a worker."""
        self.wait()
        self.waiting_since_ns = now_ns

    def complete(self, now_ns: int) -> None:
        """Record the request's end. Precondition: all its sequences have ended."""
        self.state = RequestState.FINISHED
        self.times.finished_ns = now_ns
        self.times.last_token_ns = max(sequence.last_token_ns for sequence in self.sequences)

    def release_sequences(self) -> None:
        """Drop the sequences, which refer to the request, so that both are freed without the garbage collector.

        Precondition: the request was forgotten, its end has been committed, and nobody reads its output.
        """
        self.sequences = []

    def fail(self, failure: Failure | None) -> None:
        """Set the failure with which the request ends; None means no failure."""
        self.failure = failure

    @property
    def is_bound(self) -> bool:
        """Whether tokens of its kind may have been shown, so that another kind must not continue silently."""
        if self.kind is None or self.may_change_kind:
            return False
        has_output = any(sequence.output for sequence in self.sequences)
        return has_output or self.is_repeated or (self.beams is not None and bool(self.beams.search.steps))

    @property
    def known_kind(self) -> Kind:
        """The kind. Precondition: the request has started."""
        assert self.kind is not None
        return self.kind

    def allow_change_of_kind(self) -> None:
        """Allow the request to start on a group of any kind."""
        self.may_change_kind = True

    def start_on_kind(self, kind: Kind, incarnation: int) -> bool:
        """Record the kind of the group on which the request starts; return whether the record of it has changed."""
        if not kind.weights_root:
            self.unproven_on += (incarnation,)
        before, was_free = (self.kind, self.kind_changed_at), self.may_change_kind
        self.may_change_kind = False
        if self.kind is None or not self.is_bound:
            self.kind = kind
        elif not self.kind.agrees_with(kind):
            assert was_free
            lengths = self._num_chosen_tokens
            self.earlier_kinds += (EarlierKind(self.kind, lengths),)
            self._change_kind(kind, lengths)
        elif kind.weights_root:
            self.kind = kind
        return before != (self.kind, self.kind_changed_at)

    def prove_weights(self, kind: Kind, incarnation: int, *, is_here: bool) -> bool:
        """Record the complete identity of the weights of a group on which the request ran; return whether the record
        of its kind has changed.

        Args:
            is_here: Whether the request still runs on the group.
        """
        if incarnation not in self.unproven_on:
            return False
        self.unproven_on = tuple([other for other in self.unproven_on if other != incarnation])
        before = self.kind, self.kind_changed_at
        if self.kind is None or self.kind.agrees_with(kind):
            self.kind = kind
        elif self.is_bound:
            self._change_kind(kind if is_here else self.kind, (0,) * len(self.sequences))
        return before != (self.kind, self.kind_changed_at)

    def _change_kind(self, kind: Kind, offsets: tuple[int, ...]) -> None:
        self.kind = kind
        self.kind_changed_at = tuple(map(min, self.kind_changed_at or offsets, offsets))
        self.counters.num_kind_changes += 1

    @property
    def _num_chosen_tokens(self) -> tuple[int, ...]:
        """For each sequence, the number of its tokens; those of beams are in the steps of the search until it ends."""
        if self.beams is not None:
            return (len(self.beams.search.steps),) * len(self.sequences)
        return tuple([len(sequence.output) for sequence in self.sequences])

    @property
    def kind_parts(self) -> tuple[tuple[EarlierKind, ...], Kind] | None:
        """The kinds that computed its tokens; None before its first start, or if it is not certain because weights
        turned out to differ only after they had computed tokens.
        """
        if self.kind is None:
            return None
        first = self.earlier_kinds[0].ends if self.earlier_kinds else ()
        return (self.earlier_kinds, self.kind) if self.kind_changed_at == first else None

    def restore_kind(self, kind: Kind | None, changed_at: tuple[int, ...], earlier: tuple[EarlierKind, ...]) -> None:
        """Set the kinds under an earlier scheduler. Call it after the output was restored."""
        self.kind, self.kind_changed_at = kind, changed_at
        self.earlier_kinds = earlier
        self.is_repeated = kind is not None and self.spec.tensor_bytes > 0

    def attach(self) -> None:
        """Count a reader of the request's feed."""
        self.num_attached += 1

    def detach(self, now_ns: int) -> bool:
        """Remove a reader from the count; return whether the request is now an orphan."""
        self.num_attached -= 1
        if self.num_attached or self.state is RequestState.FINISHED or self.spec.is_detached:
            return False
        self.orphaned_ns = now_ns
        return True

    def count_recovery(self) -> None:
        """Count the loss of the request's worker or scheduler."""
        self.counters.num_recoveries += 1

    def count_preemption(self) -> None:
        """Count a preemption of the request."""
        self.counters.num_preemptions += 1

    def count_handover(self) -> None:
        """Count a move from a prefill group to a decode group."""
        self.num_handovers += 1

    def keep_here(self) -> None:
        """Record that a handover failed, so that no other one is attempted."""
        self.may_hand_over = False

    def count_step(self, ordinal: int | None = None) -> None:
        """Count a step in which the request took part; with an `ordinal`, at most once per step."""
        if ordinal is None or self.last_ordinal != ordinal:
            self.counters.num_steps += 1
        if ordinal is not None:
            self.last_ordinal = ordinal

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count draft tokens that were verified in a step."""
        self.counters.num_draft_tokens += num_drafts
        self.counters.num_accepted_tokens += num_accepted

    def lose_worker(self, store: str, *, may_fetch: bool) -> None:
        """Record the store of a worker that died or left its blocks (empty if there is none), and whether blocks may
        still be fetched from tiers.
        """
        self.lost_store = store
        self.may_fetch = self.may_fetch and may_fetch

    def note_read_ahead(self) -> None:
        """Record that a group was told to read its blocks from tiers."""
        self.is_read_ahead = True

    def forget_store(self) -> None:
        """Stop looking for the dead worker's blocks."""
        self.lost_store = ""

    def note_scheduled(self, now_ns: int, num_cached_tokens: int) -> None:
        """Record that the request's first step was planned, and how many prompt tokens need not be computed."""
        self.times.first_scheduled_ns = now_ns
        self.counters.num_cached_tokens = num_cached_tokens

    def note_first_token(self, now_ns: int) -> None:
        """Record the time of the request's first token."""
        self.times.first_token_ns = now_ns

    @property
    def request_id(self) -> str:
        """The id under which the request was submitted."""
        return self.spec.request_id

    @property
    def has_run(self) -> bool:
        """Whether the request has held blocks, or was accepted by an earlier scheduler."""
        return self.counters.num_preemptions > 0 or self.counters.num_recoveries > 0 or self.num_handovers > 0

    @property
    def order(self) -> tuple[int, int]:
        """Sort key by urgency: higher priority first, then older first."""
        return (-self.spec.priority, self.ordinal)

    @property
    def finish(self) -> Finish:
        """The record to keep, without the output. Precondition: the request has ended."""
        return Finish(self.times, self.failure, self.counters)

    @property
    def live_sequences(self) -> TypingSequence[Sequence]:
        """Return the sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.end is None]

    @property
    def running_sequences(self) -> TypingSequence[Sequence]:
        """Return the live sequences or, for a beam search, the lanes of its running beams."""
        return self.beams.running if self.beams is not None else self.live_sequences

    @property
    def num_decoding_steps(self) -> int:
        """Number of steps that have produced its output tokens. Only steps of sequences that wait for each result are
        counted; the others produce one token each.
        """
        if self.placed_sequences[0].waits_for_result:
            return self.counters.num_steps
        return self.counters.num_steps + max(len(sequence.output) for sequence in self.sequences)

    @property
    def num_rows(self) -> int:
        """Maximum number of rows that the request will need at one time."""
        return self.spec.beam_width if self.beams is not None else len(self.live_sequences)

    @property
    def waiting_sequences(self) -> TypingSequence[Sequence]:
        """Return the running sequences without a row; for a beam search, lanes of its running beams."""
        if self.beams is not None:
            return [sequence for sequence in self.beams.running if sequence.row is None]
        return [sequence for sequence in self.sequences if sequence.end is None and sequence.row is None]

    @property
    def placed_sequences(self) -> TypingSequence[Sequence]:
        """Return the sequences that may hold rows and blocks."""
        return self.beams.lanes if self.beams is not None else self.sequences

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens over all sequences, not counting tokens beyond the sequences' ends."""
        return sum(s.end.num_tokens if s.end else len(s.output) for s in self.sequences)
