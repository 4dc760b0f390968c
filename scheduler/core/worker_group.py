"""A worker group as the core sees it: its blocks, its rows, and what runs on it.

A request is *started* on a group: each of its sequences gets a row and blocks for all its known tokens; blocks with the
same tokens are shared. Its *context* phase computes the known tokens chunk by chunk; the last chunk samples a token and
the *generation* phase begins, one token per step. `release` undoes all of this, whatever the reason.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from operator import attrgetter

from midstream.record import record
from scheduler.core.adoption import Adoptions
from scheduler.core.block_manager import BlockManager
from scheduler.core.block_tables import BlockTables
from scheduler.core.config import CoreConfig
from scheduler.core.events import StepDone, WorkerBeat, WorkerRegistered
from scheduler.core.fairness import Clients, Holdings, Pace
from scheduler.core.in_flight import InFlightStep, LastGeneration
from scheduler.core.kind import Kind
from scheduler.core.prefix_cache import Hits, PrefixCache, extend_hashes
from scheduler.core.request import Request, Sequence
from scheduler.core.request_spec import RequestSpec
from scheduler.core.role import Role
from scheduler.core.standing import Standing
from scheduler.core.timers import Clock

_BY_ROW = attrgetter("row")
_ALL_PPM = 1_000_000
# Limit on the data that a step copies from tiers or a dead worker's pool, which takes a few tens of milliseconds.
_MAX_ADOPTED_BYTES, _MAX_ADOPTED_BLOCKS = 32 << 20, 1024
# Limit on the known hashes of one store, so that no worker can fill the memory. A registration cannot hold more either.
_MAX_STORED = 1 << 23


@record
class StartCost:
    """Resources of a group that are needed to start a request, or some of its sequences.

    Attributes:
        num_rows: Number of rows.
        num_blocks: Available blocks that are allocated immediately.
        num_blocks_next: Further blocks for its first generation step.
        num_blocks_to_end: Blocks to reserve so that it can run to its end.
        num_cached_tokens: Number of known tokens that need not be computed.
        num_tokens: Number of known tokens.
    """

    num_rows: int
    num_blocks: int
    num_blocks_next: int
    num_blocks_to_end: int
    num_cached_tokens: int
    num_tokens: int

    @property
    def num_blocks_at_once(self) -> int:
        """Number of blocks allocated by the end of the first generation step."""
        return self.num_blocks + self.num_blocks_next


class AdapterRoom:
    """Tracks device memory for the LoRA adapters used by a group's requests.

    A worker pins an adapter while a row uses it, so the adapters in use must fit together; an adapter that is already
    in use needs no further memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = self._all = num_bytes
        self._num_users: dict[str, int] = {}

    def fits(self, spec: RequestSpec) -> bool:
        """Return whether a request with this adapter can start now."""
        return not spec.lora_key or spec.lora_key in self._num_users or spec.lora_bytes <= self._left

    def fits_alone(self, spec: RequestSpec) -> bool:
        """Return whether a request with this adapter could start if no other request ran."""
        return spec.lora_bytes <= self._all

    def take(self, spec: RequestSpec) -> None:
        """Count the adapter of a started request."""
        if not spec.lora_key:
            return
        if spec.lora_key not in self._num_users:
            self._left -= spec.lora_bytes
        self._num_users[spec.lora_key] = self._num_users.get(spec.lora_key, 0) + 1

    def give_back(self, spec: RequestSpec) -> None:
        """Remove the adapter of a released request from the count."""
        if not spec.lora_key:
            return
        self._num_users[spec.lora_key] -= 1
        if not self._num_users[spec.lora_key]:
            del self._num_users[spec.lora_key]
            self._left += spec.lora_bytes


def note_stored(stored: set[int], hashes: Iterable[int]) -> None:
    """Add hashes of blocks in a worker's tiers to the known hashes, unless there are too many."""
    if len(stored) < _MAX_STORED:
        stored.update(hashes)


class WorkerGroup:
    """One epoch of one worker group.

    Attributes:
        tokens_per_block: Number of tokens in one of its blocks, a multiple of the scheduler's.
        has_state: Whether blocks hold a recurrent state after their last token, which can be used only at the end of a
            block.
        standing: Its fault record over all epochs.
        is_asleep: Whether it has given its memory back, or was told to; it gets nothing to run.
        is_outdated: Whether it has other weights than all groups are to have, and gets nothing to run until it has
            changed them.
        tables: Block tables of its sequences.
        clients: Tracks whether several clients send requests. pace: Decides when the next step is planned.
        active: Requests that hold blocks here, in the order in which they started.
        holdings: Rows and blocks that each client may use here until its requests end.
        context: Sequences in their context phase, in the order in which they started.
        generating: Sequences in their generation phase, by row.
        generation_version: Changes whenever `generating` does.
        num_waiting: Number of sequences with rows that must wait for each result before they run again.
        adoptions: Blocks that the next steps ask the worker to look up in pools of dead workers, or in its tiers.
        kind: Its kind, including the identity of its weights. block_kind: The kind of its KV blocks.
        role: Its role.
        stored: Known hashes of the blocks in its tiers; shared with groups that share the tiers.
        fetched: Hashes of the blocks that it has fetched from other groups and not adopted yet.
        batch_size: Number of sequences started since the group was last empty.
        splits_contexts: Whether a context may be split over several steps. reuses_blocks: Whether sequences may share
            cached blocks.
        num_micro_batches: Number of steps, without sequences in common, that the group computes at the same time.
        checks: Steps in flight that compute tokens of other groups again, by step id.
        num_unproved_tokens: Number of tokens that it gave since its last verified step. unproved: Their requests.
    """

    def __init__(
        self,
        registration: WorkerRegistered,
        epoch: int,
        config: CoreConfig,
        clock: Clock,
        clients: Clients,
        standing: Standing,
        stored: set[int],
    ) -> None:
        self.group_id = registration.group_id
        self.connection = registration.connection
        self.registration = registration
        self.kind, self.block_kind = registration.kind, registration.block_kind
        self.epoch = epoch
        self.config = config
        self.tokens_per_block = registration.tokens_per_block
        self.max_batch_size = min(config.max_batch_size, registration.max_batch_size)
        self.max_num_tokens = min(config.max_num_tokens, registration.max_num_tokens)
        self.num_micro_batches = registration.num_micro_batches
        self.prefix_cache = PrefixCache(self._priorities_of, lambda value: value in self.stored)
        self.blocks = BlockManager(registration.num_blocks, self.prefix_cache)
        self._needs_whole_prompts = "whole_prompts" in registration.features
        self.splits_contexts = config.enable_chunked_context and not self._needs_whole_prompts
        self.reuses_blocks = config.enable_block_reuse and not self._needs_whole_prompts
        self.tables = BlockTables(
            config, self.blocks, self.tokens_per_block, clock, registration.attention_window, reuses=self.reuses_blocks
        )
        self.adapters = AdapterRoom(registration.lora_cache_bytes)
        self.standing = standing
        self.is_outdated = False
        self.is_asleep = registration.sleep_level > 0
        self.has_state = "recurrent_state" in registration.features
        self._clock = clock
        self.clients = clients
        self.pace = Pace(clients)
        self.last_heard_ns = registration.time_ns
        self.last_progress_ns = registration.time_ns
        self.active: dict[Request, None] = {}
        self.holdings = Holdings()
        self.context: list[Sequence] = []
        self.generating: list[Sequence] = []
        self.generation_version = 0
        self.num_on_worker = 0
        self.num_waiting = 0
        self.batch_size = 0
        most = _MAX_ADOPTED_BYTES // registration.block_bytes if registration.block_bytes else _MAX_ADOPTED_BLOCKS
        self.adoptions = Adoptions(max(most, 1))
        self.role = Role(registration.role or Role.BOTH)
        self.stored = stored
        self.fetched = set[int]()
        self._ahead: list[int] = []
        self._context_limits: dict[Sequence, int] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.last_generation = LastGeneration()
        self.next_step_id = 1
        self.num_placed = 0
        self._num_beats_ahead = 0
        self._early_results: dict[int, StepDone] = {}
        self.checks: dict[int, InFlightStep] = {}
        # Only on CPUs do the same tokens give the same bits whatever else is in the batch.
        is_exact = not registration.device.startswith("cuda")
        self._verify_ppm = config.verify_ppm if is_exact and registration.num_micro_batches == 1 else 0
        self._verify_credit = 0
        self.num_unproved_tokens = 0
        self.unproved: dict[str, None] = {}
        self.memory = (0, 0, 0)
        self._released_rows: list[int] = []
        self._free_rows = list(range(self.max_batch_size))
        self._take_kept(registration, clock.now_ns)

    def _take_kept(self, registration: WorkerRegistered, now_ns: int) -> None:
        """Register the kept blocks of the worker as cached, and tell the worker which of them may change."""
        kept = list(zip(registration.kept_blocks, registration.kept_hashes, strict=True))
        if self.reuses_blocks and not self.standing.num_faults:
            self.blocks.adopt(kept, now_ns)
        self.prefix_cache.note_dropped(block for block, _ in kept)

    def note_weights(self, kind: Kind, block_kind: str) -> None:
        """Replace its kind by one that includes the complete identity of its weights."""
        self.kind, self.block_kind = kind, block_kind

    @property
    def is_held_off(self) -> bool:
        """Whether the group is held off, so that it gets nothing to run for a while: because of its faults, or until it
        has changed its weights, or while it sleeps.
        """
        return self.is_changing or self.standing.is_held(self._clock.now_ns)

    def note_asleep(self) -> None:
        """Record that the group was told to sleep, or to wake up; it registers again once it has done so."""
        self.is_asleep = True

    @property
    def is_changing(self) -> bool:
        """Whether the group gets nothing to run although it has no fault."""
        return self.is_outdated or self.is_asleep

    @property
    def reason_held_off(self) -> str:
        """Why the group gets nothing to run; empty if it does."""
        if self.standing.is_held(self._clock.now_ns):
            return self.standing.reason
        if self.is_asleep:
            return "it sleeps"
        return "it changes its weights" if self.is_outdated else ""

    def note_outdated(self, *, is_outdated: bool) -> None:
        """Record whether the group has other weights than all groups are to have."""
        self.is_outdated = is_outdated

    @property
    def can_verify(self) -> bool:
        """Whether its results can be compared with those of other groups."""
        return self._verify_ppm > 0

    @property
    def verifies_next_step(self) -> bool:
        """Whether the next step that samples is to be verified: of n such steps, the share rounded down was."""
        return self._verify_credit + self._verify_ppm >= _ALL_PPM

    def send(self, step: InFlightStep) -> None:
        """Add a step to the steps in flight."""
        self.in_flight.append(step)
        self.next_step_id += 1
        if self._verify_ppm and step.num_sampled:
            self._verify_credit += self._verify_ppm - _ALL_PPM * step.is_verified

    def send_check(self, step: InFlightStep) -> None:
        """Add a step that computes tokens of another group again. It is independent of the other steps in flight: its
        result is used as soon as it arrives, and it is in addition to `max_in_flight`.
        """
        self.checks[step.step_id] = step
        self.next_step_id += 1

    def take_check(self, event: StepDone) -> InFlightStep | None:
        """Remove and return the check of which this is the result; None if it is another step's."""
        step = self.checks.pop(event.step_id, None)
        if step is not None:
            self.last_heard_ns = self.last_progress_ns = event.time_ns
            self._num_beats_ahead = 0
        return step

    def note_committed(self, step: InFlightStep, num_tokens: int) -> None:
        """Record that a step's result was applied, for the case that the group turns out to be wrong."""
        if step.is_verified:
            self.num_unproved_tokens, self.unproved = 0, {}
        else:
            self.num_unproved_tokens += num_tokens
            self.unproved.update(dict.fromkeys(sequence.request.request_id for sequence in step.sampled()))

    def deliver(self, event: StepDone) -> str | None:
        """Store a result until the results of all earlier steps are applied.

        Returns:
            Why it is invalid; empty if it is valid, None if it duplicates an earlier result.
        """
        self.last_heard_ns = event.time_ns
        if not self.in_flight or event.step_id < self.in_flight[0].step_id:
            return None
        if event.step_id > self.in_flight[-1].step_id:
            return "the result is for a step that was not sent"
        self._early_results[event.step_id] = event
        return ""

    def next_result(self) -> StepDone | None:
        """Return the result of the oldest step in flight, if it has arrived."""
        return self._early_results.get(self.in_flight[0].step_id) if self.in_flight else None

    def finish_step(self, event: StepDone) -> InFlightStep:
        """Remove and return the oldest step in flight, whose result has been checked, with its result."""
        del self._early_results[event.step_id]
        self.standing.note_good_step()
        self.last_progress_ns = event.time_ns
        self._num_beats_ahead = 0
        step = self.in_flight.popleft()
        self.pace.note_result(step, event.time_ns)
        if step.adoption.entries:
            self.tables.settle(step.adoption, event.missing_blocks)
        if self.fetched:
            self.fetched.difference_update(step.adoption.hashes)  # the worker no longer holds them outside its pool
        if event.missing_blocks:
            asked = zip(step.adoption.blocks, step.adoption.hashes, strict=True)
            missing = [value for block, value in asked if block in event.missing_blocks]
            self.stored.difference_update(missing)
            self.prefix_cache.note_gone_below(missing)
        return step

    def note_beat(self, event: WorkerBeat) -> bool:
        """Process a heartbeat; return False if a result was lost."""
        self.last_heard_ns = event.time_ns
        self.memory = event.memory
        if self.registration.tier_store:
            self.stored.difference_update(event.removed_hashes)
            note_stored(self.stored, event.stored_hashes)
        awaited = self._awaited_steps()
        if not awaited or event.last_step_id < min(step.step_id for step in awaited):
            self._num_beats_ahead = 0
            return True
        # The worker finished a step whose result is missing. The first time may be due to reordering; the second time
        # the result is lost.
        self._num_beats_ahead += 1
        return self._num_beats_ahead < 2

    def _awaited_steps(self) -> list[InFlightStep]:
        """Return the steps whose results have not arrived."""
        steps = [step for step in self.in_flight if step.step_id not in self._early_results]
        return [*steps, *self.checks.values()] if self.checks else steps

    @property
    def awaited_since_ns(self) -> int | None:
        """Since when the next result is awaited; None if none is."""
        awaited = self._awaited_steps()
        return max(self.last_progress_ns, min(step.planned_ns for step in awaited)) if awaited else None

    def take_released_rows(self) -> list[int]:
        """Return the rows that the worker must release before the next step; each row is returned once."""
        rows, self._released_rows = self._released_rows, []
        return rows

    def has_below_pool(self, value: int) -> bool:
        """Return whether the worker is believed to hold the block with this hash outside its pool."""
        return value in self.fetched or value in self.stored

    def has_block(self, value: int) -> bool:
        """Return whether the block with this hash is in the pool, or believed to be outside it."""
        return bool(self.prefix_cache.find([value])) or self.has_below_pool(value)

    def num_fetchable_tokens(self, request: Request) -> int:
        """Return how many known tokens of a queued request can be fetched from tiers, after those in the pool."""
        return len(self._fetchable_hashes(request)) * self.tokens_per_block

    def _fetchable_hashes(self, request: Request) -> list[int]:
        if not (self.stored or self.fetched) or not request.may_fetch or not self.tables.reuses(request):
            return []
        sequence = request.waiting_sequences[0]
        first = self.tables.hits(sequence).num_blocks
        num_blocks = (sequence.num_tokens - 1) // self.tokens_per_block
        hashes = extend_hashes(sequence, num_blocks, self.tokens_per_block)
        end = first
        while end < num_blocks and self.has_below_pool(hashes[end]):
            end += 1
        return hashes[first:end]

    def read_ahead(self, request: Request) -> None:
        """Have the worker read the blocks of a queued request from its tiers into memory."""
        self._ahead += self._fetchable_hashes(request)

    def take_hashes_ahead(self) -> list[int]:
        """Return the hashes of stored blocks that later steps adopt, each once: those of the next step, and those of
        queued requests.
        """
        ahead, self._ahead = [*self.adoptions.next_hashes, *self._ahead], []
        return [value for value in ahead if value in self.stored and value not in self.fetched]

    def can_fetch_from(self, source: WorkerGroup) -> bool:
        """Return whether the worker can fetch blocks from the pool of another group."""
        has_equal_blocks = source.tokens_per_block == self.tokens_per_block and source.block_kind == self.block_kind
        return source.registration.kv_source != "" and has_equal_blocks and source.kind.agrees_with(self.kind)

    @property
    def first_open_step(self) -> int:
        """Return the number of the oldest step whose result is awaited or, if there is none, of the next step."""
        return self.in_flight[0].step_id if self.in_flight else self.next_step_id

    @property
    def max_in_flight(self) -> int:
        """Maximum number of steps in flight: `pipeline_depth`, and one more for each further micro-batch."""
        return self.config.pipeline_depth + self.num_micro_batches - 1

    @property
    def num_free_rows(self) -> int:
        """Number of rows that are not in use."""
        return len(self._free_rows)

    @property
    def units_per_block(self) -> int:
        """Number of the scheduler's blocks that one of its blocks corresponds to."""
        return self.tokens_per_block // self.config.tokens_per_block

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that all of its blocks hold."""
        return self.blocks.num_blocks * self.tokens_per_block

    @property
    def num_context_tokens(self) -> int:
        """Number of known tokens that have yet to be computed."""
        total, block = 0, self.tokens_per_block
        for sequence in self.context:
            num_known = len(sequence.request.spec.prompt) + len(sequence.output)
            num_hit, num_computed = sequence.num_hit_blocks * block, sequence.num_computed
            total += num_known - (num_hit if num_hit > num_computed else num_computed)
        return total

    def limit_contexts(self, limits: dict[Sequence, int]) -> None:
        """Limit how many leading tokens of these sequences the next step may compute; other sequences have no limit."""
        self._context_limits = limits

    def lift_context_limits(self) -> bool:
        """Remove the limits; return whether there were any."""
        had_limits = bool(self._context_limits)
        self._context_limits = {}
        return had_limits

    def num_to_compute(self, sequence: Sequence) -> int:
        """Return how many known tokens of a sequence in its context phase the next step may compute."""
        limit = self._context_limits.get(sequence)
        return sequence.num_context_tokens if limit is None else limit - sequence.num_computed

    def splits(self, num_tokens: int) -> bool:
        """Return whether a context with this many tokens may be split over several steps.

        Without chunked context, it is split only if it is longer than the group's `max_num_tokens`, which happens if
        the request has grown since it first ran, or came from a group with a larger limit.
        """
        is_too_long = num_tokens > self.max_num_tokens
        return self.splits_contexts or (is_too_long and not self._needs_whole_prompts)

    @property
    def adopting_requests(self) -> set[Request]:
        """Return the requests that wait for blocks from a dead worker's pool or from tiers."""
        return self.adoptions.requests.union(*(step.adoption.requests for step in self.in_flight))

    @property
    def inflight_request_ids(self) -> frozenset[str]:
        """Return the ids of requests that run in a step in flight."""
        return frozenset(request.request_id for step in self.in_flight for request in step.requests())

    def _priorities_of(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return self.blocks.priorities_of(blocks)

    def blocks_alone(self, request: Request) -> int:
        """Return the maximum number of blocks that the request holds at one time on an empty group, even if it restarts
        near its end.
        """
        return self._blocks_of_rows(request, self._num_rows_at_once(request))

    def _num_rows_at_once(self, request: Request) -> int:
        """Return the number of the request's rows that an empty group can hold; a beam search needs all of them."""
        return request.num_rows if request.beams is not None else min(request.num_rows, self.max_batch_size)

    def num_startable(self, request: Request) -> int:
        """Return the number of the request's waiting sequences that an empty group could start together."""
        return min(len(request.waiting_sequences), self.max_batch_size)

    def _blocks_of_rows(self, request: Request, num_rows: int) -> int:
        each = self.tables.blocks_of(request.spec.max_num_tokens)
        if num_rows == 1:
            return each
        shared = 0 if self.tables.has_window else (len(request.spec.prompt) - 1) // self.tokens_per_block
        return each + (num_rows - 1) * (each - shared)

    def takes_prompt(self, request: Request) -> bool:
        """Return whether the request's prompt can be computed here: without chunked context it must fit in one step."""
        fits = len(request.spec.prompt) <= self.max_num_tokens
        return self.splits_contexts or fits or (request.has_run and not self._needs_whole_prompts)

    def is_large_enough(self, request: Request) -> bool:
        """Return whether the group is large enough to run the request, if necessary in parts, if it were empty."""
        spec, num_rows = request.spec, self._num_rows_at_once(request)
        return (
            self.takes_prompt(request)
            and num_rows <= self.max_batch_size
            and spec.max_num_tokens < self.registration.max_sequence_length
            and self._blocks_of_rows(request, num_rows) <= self.blocks.num_blocks
            and self.adapters.fits_alone(spec)
        )

    def start_cost(self, request: Request, num_sequences: int | None = None) -> StartCost:
        """Return the cost of starting this many of the request's waiting sequences; by default as many as an empty
        group could start together.
        """
        if num_sequences is None:
            num_sequences = self.num_startable(request)
        waiting, tables = request.waiting_sequences[:num_sequences], self.tables
        shared = (len(request.spec.prompt) - 1) // self.tokens_per_block
        has_leader = self._leader(request) is not None
        hits = Hits() if has_leader else tables.hits(waiting[0])
        num_blocks = hits.num_cached - hits.num_blocks
        num_next = num_to_end = num_tokens = 0
        max_num_tokens = request.spec.max_num_tokens
        for position, sequence in enumerate(waiting):
            known = sequence.num_tokens
            own = tables.blocks_of(known)
            num_blocks += own - shared if position or has_leader else own
            num_next += known % self.tokens_per_block == 0 and known < max_num_tokens
            most = tables.max_blocks(max_num_tokens, known)
            num_to_end += most if tables.has_window else most - own
            num_tokens += known
        num_cached = (shared if has_leader else hits.num_blocks) * self.tokens_per_block
        num_spare = len(request.beams.spare) if request.beams is not None else 0
        if num_spare:
            num_next += num_spare
            num_to_end += num_spare * tables.num_to_reserve(request.spec, waiting[0].num_tokens)
        num_to_end += 0 if tables.has_window else num_blocks
        return StartCost(len(waiting) + num_spare, num_blocks, num_next, num_to_end, num_cached, num_tokens)

    def start(self, request: Request, num_sequences: int) -> None:
        """Assign rows to waiting sequences of a request, and allocate blocks for their known tokens.

        The sequences ignore results of steps that were planned before. Precondition: rows and blocks as in `start_cost`
        are available; the request runs on no other group.

        Args:
            request: The request, which has waiting sequences.
            num_sequences: How many of them start.
        """
        if request.group is None:
            self.active[request] = None
            self.adapters.take(request.spec)
            request.activate(self)
            self.num_placed += 1
        leader = self._leader(request)
        was_lost_here = request.lost_store != "" and request.lost_store == self.registration.kv_store
        may_fetch = request.may_fetch and bool(self.stored or self.fetched)
        adoptions = self.adoptions if was_lost_here or may_fetch else None
        is_stored = None if was_lost_here else self.has_below_pool
        waiting = request.waiting_sequences
        starting = waiting[:num_sequences]
        if len(starting) == len(waiting):
            request.forget_store()
        for sequence in starting:
            self.tables.fill(sequence, leader, adoptions, is_stored)
            self._take_row(sequence)
            self.context.append(sequence)
            leader = leader or sequence
        if request.beams is not None and leader is not None:
            for lane in request.beams.spare:
                self.tables.reserve(lane, leader.num_tokens)
                self._take_row(lane)

    def _leader(self, request: Request) -> Sequence | None:
        """Return a sequence of the request that runs on this group and holds all blocks of the prompt.

        Sequences that start while there is such a leader share its blocks, so a request never holds more than
        `blocks_alone`.
        """
        if request.group is None:
            return None
        return next((s for s in request.placed_sequences if s.row is not None and not s.num_freed), None)

    def _take_row(self, sequence: Sequence) -> None:
        self.holdings.add(sequence.request.spec.client_id, self._blocks_of_row(sequence.request))
        sequence.place(heapq.heappop(self._free_rows), self._clock.num_steps)
        self.batch_size += 1
        self.num_waiting += sequence.waits_for_result

    def _blocks_of_row(self, request: Request) -> int:
        num_rows = request.spec.num_rows
        return -(-self._blocks_of_rows(request, num_rows) // num_rows)

    def begin_generation(self, sequence: Sequence) -> None:
        """End the context phase of a sequence whose context is fully planned; the sequence generates next, unless it
        waits for a result or all its tokens are planned.
        """
        self.context.remove(sequence)
        if not sequence.waits_for_result:
            self.resume_generation(sequence)

    def resume_generation(self, sequence: Sequence) -> None:
        """Resume the generation of a sequence, unless all its tokens are planned."""
        if not self.set_checkpoint(sequence):
            return
        insort(self.generating, sequence, key=_BY_ROW)
        self.generation_version += 1

    def rest(self, sequences: Iterable[Sequence]) -> None:
        """Exclude from generation the sequences of a step that must wait for its result, until the result arrives."""
        resting = {sequence for sequence in sequences if sequence.waits_for_result}
        if resting:
            self.generating = [sequence for sequence in self.generating if sequence not in resting]
            self.generation_version += 1

    def set_checkpoint(self, sequence: Sequence) -> bool:
        """Set the sequence's next checkpoint; return False if all its tokens are planned."""
        sequence.check_at(min(len(sequence.table) * self.tokens_per_block, sequence.max_num_tokens))
        return sequence.num_computed < sequence.max_num_tokens

    def mark_sent(self, sequence: Sequence) -> bool:
        """Record that a sequence's row is sent to the worker; return False if it had been sent before."""
        if sequence.is_on_worker:
            return False
        sequence.mark_sent()
        self.num_on_worker += 1
        return True

    def note_generation(self, version: int, sequences: tuple[Sequence, ...], rows: tuple[int, ...]) -> LastGeneration:
        """Store the rows for which a step generates; the next step is encoded relative to them."""
        self.last_generation = LastGeneration(version, sequences, rows)
        return self.last_generation

    def end_generation(self, sequence: Sequence) -> None:
        """Remove a sequence from the generation phase; it keeps its row and blocks."""
        self.generating.remove(sequence)
        self.generation_version += 1

    def sharers(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences of other requests that hold blocks which this sequence was to compute."""
        blocks = set(sequence.table[max(sequence.num_freed, sequence.num_hit_blocks) :])
        return [
            other
            for request in self.active
            if request is not sequence.request
            for other in request.placed_sequences
            if not blocks.isdisjoint(other.held_blocks)
        ]

    def withdraw(self, filled: Collection[tuple[int, int]]) -> list[Sequence]:
        """Make blocks unfindable that a step was to fill but did not; return the sequences that use their contents.

        Args:
            filled: The blocks with the hashes of their contents. Blocks that are used for other contents by now, or
                that a later step will compute, are left as they are.
        """
        cache = self.prefix_cache
        lost = {block for block, value in filled if cache.hash_of(block) == value and not cache.is_pending(block)}
        sequences = [sequence for request in self.active for sequence in request.placed_sequences]
        users = [sequence for sequence in sequences if not lost.isdisjoint(sequence.held_blocks)]
        if self.tables.has_window:  # sequences may have released the blocks since, so compare contents
            values = {value for _, value in filled}
            sharing = [sequence for sequence in sequences if self.tables.reuses(sequence.request)]
            users += [s for s in sharing if not values.isdisjoint(s.block_hashes(self.tokens_per_block))]
        for block in lost:
            self.blocks.withdraw(block)
        return users

    def release(self, request: Request) -> None:
        """Release the rows and blocks of all sequences of a request, so that nothing of it remains on the group."""
        for sequence in request.placed_sequences:
            if sequence.row is not None:
                self.release_sequence(sequence)
        if request.beams is not None:
            request.beams.forget_placement()
        del self.active[request]
        self.adapters.give_back(request.spec)
        request.leave_group()
        if not self.active:
            self.batch_size = 0

    def release_sequence(self, sequence: Sequence) -> None:
        """Release a sequence's row and blocks. Steps in flight may still write to the blocks, but run before any later
        step.
        """
        if sequence in self.context:
            self.context.remove(sequence)
            self.tables.break_promises(sequence)
        elif sequence in self.generating:
            self.end_generation(sequence)
        self.tables.release(sequence)
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        self.holdings.remove(sequence.request.spec.client_id, self._blocks_of_row(sequence.request))
        if sequence.is_on_worker:
            self._released_rows.append(sequence.row)
            self.num_on_worker -= 1
        self.num_waiting -= sequence.waits_for_result
        sequence.clear_placement()

    def held_tables(self) -> Iterable[Iterable[int]]:
        """Yield the blocks of each sequence on the group, for `BlockManager.check`."""
        for request in self.active:
            for sequence in request.placed_sequences:
                yield sequence.held_blocks
