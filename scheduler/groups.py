"""A worker group as the core sees it: its blocks, its rows, and what runs on it.

A request is *started* on a group: each of its sequences gets a row and blocks for all its known tokens, those that hold
the same tokens as another's are shared. Its *context* phase computes the known tokens chunk by chunk; the last chunk
samples a token and the *generation* phase begins, one token a step. `release` takes all of it back, whatever the
reason.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from scheduler.block_manager import BlockManager, Retention
from scheduler.core_config import CoreConfig
from scheduler.events import StepDone, WorkerRegistered
from scheduler.prefix_cache import PrefixCache, extend_hashes
from scheduler.request import DEFAULT_RETENTION_PRIORITY, NO_RESULTS, Request, RequestState, Sequence

_BY_ROW = attrgetter("row")


@dataclass(frozen=True, slots=True)
class LastGeneration:
    """The generating rows that the worker would repeat, and the `generation_version` they are of; -1 is none."""

    version: int = -1
    sequences: tuple[Sequence, ...] = ()
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StartCost:
    """What starting a request takes from a group.

    Attributes:
        num_rows: Rows.
        num_blocks: Available blocks that are taken at once.
        num_blocks_next: Blocks that its first generation step takes besides.
        num_blocks_to_end: Blocks to set aside so that it can run to its end.
        num_cached_tokens: Known tokens that need no computing.
        num_tokens: Known tokens.
    """

    num_rows: int
    num_blocks: int
    num_blocks_next: int
    num_blocks_to_end: int
    num_cached_tokens: int
    num_tokens: int


@dataclass(slots=True)
class Clock:
    """The time of the event at hand."""

    now_ns: int = 0


@dataclass(slots=True)
class InFlightStep:
    """A step that was sent and whose result is awaited.

    Attributes:
        ordinal: Counts the steps of all groups.
        context: (row, sequence, tokens, samples) of each chunk.
        generation: Sequences in ascending order of their rows.
    """

    step_id: int
    ordinal: int
    planned_ns: int
    context: list[tuple[int, Sequence, int, bool]]
    generation: tuple[Sequence, ...]
    generation_rows: tuple[int, ...]
    num_paused: int
    queue_latency_ns: int
    num_empty_slots: int

    @property
    def num_sampled(self) -> int:
        """Rows that give a token."""
        return sum(1 for chunk in self.context if chunk[3]) + len(self.generation)

    def requests(self) -> set[Request]:
        """Requests that take part."""
        return {chunk[1].request for chunk in self.context} | {sequence.request for sequence in self.generation}


class WorkerGroup:
    """One epoch of one worker group.

    Attributes:
        active: Requests that hold blocks here, in the order in which they started.
        context: Sequences in their context phase, in the order in which they started.
        generating: Sequences in their generation phase, by row.
        generation_version: Changes whenever `generating` does.
        num_reserved_blocks: Set aside for active sequences: what they may still take; with a window, all they may hold.
        released_rows: Rows that the next step frees at the worker.
        batch_size: Sequences started since the group was last empty.
    """

    def __init__(self, registration: WorkerRegistered, epoch: int, config: CoreConfig, clock: Clock) -> None:
        self.group_id = registration.group_id
        self.connection = registration.connection
        self.registration = registration
        self.epoch = epoch
        self.config = config
        self.tokens_per_block = config.tokens_per_block
        self.max_batch_size = min(config.max_batch_size, registration.max_batch_size)
        self.max_num_tokens = min(config.max_num_tokens, registration.max_num_tokens)
        self.prefix_cache = PrefixCache()
        self.blocks = BlockManager(registration.num_blocks, self.prefix_cache)
        self._clock = clock
        self.last_heard_ns = registration.time_ns
        self.last_progress_ns = registration.time_ns
        self.active: dict[Request, None] = {}
        self.context: list[Sequence] = []
        self.generating: list[Sequence] = []
        self.generation_version = 0
        self.num_reserved_blocks = 0
        self.num_on_worker = 0
        self.batch_size = 0
        self.released_rows: list[int] = []
        self.in_flight: deque[InFlightStep] = deque()
        self.last_generation = LastGeneration()
        self.next_step_id = 1
        self.num_placed = 0
        self.num_beats_ahead = 0
        self.early_results: dict[int, StepDone] = {}
        self.memory = (0, 0, 0)
        self._free_rows = list(range(self.max_batch_size))
        self._window = config.attention_window
        self._window_blocks = -(-self._window // self.tokens_per_block) + 2 if self._window else 0

    @property
    def has_window(self) -> bool:
        """Blocks behind an attention window are given back."""
        return self._window > 0

    @property
    def num_blocks_to_reserve(self) -> int:
        """Blocks that are neither taken nor set aside for those who run."""
        blocks = self.blocks.num_blocks if self.has_window else self.blocks.num_available
        return blocks - self.num_reserved_blocks

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be started."""
        return len(self._free_rows)

    @property
    def num_context_tokens(self) -> int:
        """Known tokens that are still to be computed."""
        block = self.tokens_per_block
        return sum(s.num_tokens - max(s.num_computed, s.num_hit_blocks * block) for s in self.context)

    @property
    def inflight_request_ids(self) -> frozenset[str]:
        """Requests that a step in flight runs."""
        return frozenset(request.request_id for step in self.in_flight for request in step.requests())

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def blocks_alone(self, request: Request) -> int:
        """Blocks that the request takes at most, on an empty group, also when it has to start again near its end."""
        each = self.blocks_of(request.spec.max_num_tokens)
        shared = 0 if self.has_window else (len(request.spec.prompt) - 1) // self.tokens_per_block
        return each + (request.spec.num_sequences - 1) * (each - shared)

    def is_large_enough(self, request: Request) -> bool:
        """Whether the request could run here if the group were empty."""
        spec = request.spec
        return (
            spec.num_sequences <= self.max_batch_size
            and spec.max_num_tokens < self.registration.max_sequence_length
            and self.blocks_alone(request) <= self.blocks.num_blocks
        )

    def start_cost(self, request: Request) -> StartCost:
        """What starting the request would take; changes nothing."""
        live = request.live_sequences
        shared = (len(request.spec.prompt) - 1) // self.tokens_per_block
        hits = self._find(live[0])
        num_blocks = sum(1 for block in hits if self.blocks.num_owners(block) == 0) - len(hits)
        num_next = num_to_end = num_tokens = 0
        for position, sequence in enumerate(live):
            known = sequence.num_tokens
            own = self.blocks_of(known)
            num_blocks += own - shared if position else own
            num_next += known % self.tokens_per_block == 0
            most = self._max_blocks(request.spec.max_num_tokens, known)
            num_to_end += most if self.has_window else most - own
            num_tokens += known
        num_cached = len(hits) * self.tokens_per_block
        num_to_end += 0 if self.has_window else num_blocks
        return StartCost(len(live), num_blocks, num_next, num_to_end, num_cached, num_tokens)

    def start(self, request: Request, ordinal: int) -> None:
        """Gives each live sequence a row and blocks for its known tokens.

        Precondition: rows and blocks as in `start_cost` are there.

        Args:
            request: A queued request.
            ordinal: Number of the next step; results of steps before it are not for this request.
        """
        self.active[request] = None
        request.group = self
        request.state = RequestState.ACTIVE
        self.num_placed += 1
        leader: Sequence | None = None
        for sequence in request.live_sequences:
            self._start_sequence(sequence, leader)
            sequence.first_ordinal = ordinal
            leader = leader or sequence

    def _start_sequence(self, sequence: Sequence, leader: Sequence | None) -> None:
        spec, block_size = sequence.request.spec, self.tokens_per_block
        known = sequence.num_tokens
        shared = self._find(sequence)
        num_prompt_shared = (len(spec.prompt) - 1) // block_size
        if leader is not None and len(shared) < num_prompt_shared:
            shared = leader.table[:num_prompt_shared]
        self.blocks.share(shared)
        num_own = self.blocks_of(known) - len(shared)
        sequence.table = shared + self.blocks.allocate(num_own, self._clock.now_ns)
        sequence.num_hit_blocks = len(shared)
        sequence.row = heapq.heappop(self._free_rows)
        # With a window, a block given back may stay with others who share it: then all that it may hold is set aside.
        most = self._max_blocks(spec.max_num_tokens, known)
        sequence.num_reserved = most if self.has_window else most - len(sequence.table)
        self.num_reserved_blocks += sequence.num_reserved
        self.batch_size += 1
        self.context.append(sequence)
        self._promise(sequence, len(shared), known // block_size)
        if leader is None:
            self.blocks.counts.missed += max(0, num_prompt_shared - len(shared)) if self._reuses(sequence) else 0

    def _promise(self, sequence: Sequence, first: int, end: int) -> None:
        """Publishes the blocks [first, end) that the sequence will compute, and marks them as pending."""
        cache = self.prefix_cache
        if self._reuses(sequence):
            hashes = extend_hashes(sequence, end, self.tokens_per_block)
            for index in range(first, end):
                block = sequence.table[index]
                if cache.publish(block, hashes[index]):
                    self._retain(sequence, index)
                cache.pending[block] = sequence
            # A block of generated tokens is full, and its last token computed, once the token after it is known.
            sequence.next_publish = (end + 1) * self.tokens_per_block - len(sequence.request.spec.prompt) + 1
        else:
            cache.pending.update((block, sequence) for block in sequence.table[first:end])
            sequence.next_publish = NO_RESULTS

    def _find(self, sequence: Sequence) -> list[int]:
        """Cached blocks for the sequence's beginning; the last known token is always left to compute."""
        if not self._reuses(sequence):
            return []
        num_blocks = (sequence.num_tokens - 1) // self.tokens_per_block
        return self.prefix_cache.find(extend_hashes(sequence, num_blocks, self.tokens_per_block)[:num_blocks])

    def _reuses(self, sequence: Sequence) -> bool:
        return self.config.enable_block_reuse and sequence.request.spec.is_cacheable

    def _max_blocks(self, max_num_tokens: int, num_known: int) -> int:
        """Blocks that a sequence holds at most at one time."""
        most = self.blocks_of(max_num_tokens)
        if self._window:
            most = min(most, self._window_blocks)
        return max(most, self.blocks_of(num_known))

    def begin_generation(self, sequence: Sequence) -> None:
        """Moves a sequence whose context is planned on, unless all its tokens are planned."""
        self.context.remove(sequence)
        if self.set_checkpoint(sequence):
            insort(self.generating, sequence, key=_BY_ROW)
            self.generation_version += 1

    def set_checkpoint(self, sequence: Sequence) -> bool:
        """Sets when the sequence next needs attention; False when all its tokens are planned."""
        limit = sequence.request.spec.max_num_tokens
        sequence.checkpoint = min(len(sequence.table) * self.tokens_per_block, limit)
        return sequence.num_computed < limit

    def end_generation(self, sequence: Sequence) -> None:
        """Takes a sequence out of the generation phase; it keeps its row and blocks."""
        self.generating.remove(sequence)
        self.generation_version += 1

    def grow(self, sequence: Sequence) -> int:
        """Adds a block to a sequence and gives back those that its attention window has left behind.

        Precondition: a block is available.
        """
        if self.has_window:
            self._free_behind_window(sequence)
        else:
            sequence.num_reserved -= 1
            self.num_reserved_blocks -= 1
        (block,) = self.blocks.allocate(1, self._clock.now_ns)
        sequence.table.append(block)
        return block

    def _free_behind_window(self, sequence: Sequence) -> None:
        # The next query attends to positions above num_computed - window.
        num_behind = max(0, sequence.num_computed - self._window + 1) // self.tokens_per_block
        if num_behind > sequence.num_freed:
            self.blocks.release(reversed(sequence.table[sequence.num_freed : num_behind]), self._clock.now_ns)
            sequence.num_freed = num_behind

    def publish_generated(self, sequence: Sequence) -> None:
        """Publishes the block of generated tokens that has just become full."""
        sequence.next_publish += self.tokens_per_block
        index = (sequence.num_tokens - 1) // self.tokens_per_block - 1
        if index < sequence.num_freed:
            return
        extend_hashes(sequence, index + 1, self.tokens_per_block)
        if self.prefix_cache.publish(sequence.table[index], sequence.block_hashes[index]):
            self._retain(sequence, index)
            self.prefix_cache.note_stored(sequence, index, 1, self.tokens_per_block)

    def _retain(self, sequence: Sequence, index: int) -> None:
        spec, start = sequence.request.spec, index * self.tokens_per_block
        retention: Retention | None = None
        if start >= len(spec.prompt):
            if spec.decode_priority != DEFAULT_RETENTION_PRIORITY or spec.decode_duration_ns is not None:
                retention = Retention(spec.decode_priority, spec.decode_duration_ns)
        else:
            for item in spec.retention:
                if item.start <= start and (item.end is None or start < item.end):
                    retention = Retention(item.priority, item.duration_ns)
        self.blocks.retain(sequence.table[index], retention)

    def release(self, request: Request) -> None:
        """Takes rows and blocks of all its sequences back; nothing of the request is left on the group."""
        for sequence in request.sequences:
            if sequence.row is not None:
                self.release_sequence(sequence)
        del self.active[request]
        request.group = None
        if not self.active:
            self.batch_size = 0

    def release_sequence(self, sequence: Sequence) -> None:
        """Takes a sequence's row and blocks back. Steps in flight may still write there: later steps run after them."""
        if sequence in self.context:
            self.context.remove(sequence)
            self._break_promises(sequence)
        elif sequence in self.generating:
            self.end_generation(sequence)
        self.blocks.release(reversed(sequence.table[sequence.num_freed :]), self._clock.now_ns)
        self.num_reserved_blocks -= sequence.num_reserved
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        if sequence.is_on_worker:
            self.released_rows.append(sequence.row)
            self.num_on_worker -= 1
        sequence.clear_placement()

    def _break_promises(self, sequence: Sequence) -> None:
        """Blocks that it was to compute are left to whoever else holds them."""
        pending = self.prefix_cache.pending
        for block in sequence.table[sequence.num_freed :]:
            if pending.get(block) is sequence:
                pending[block] = None

    def held_tables(self) -> Iterable[Iterable[int]]:
        """Blocks of each sequence on the group, for the full check."""
        for request in self.active:
            for sequence in request.sequences:
                yield sequence.table[sequence.num_freed :]
