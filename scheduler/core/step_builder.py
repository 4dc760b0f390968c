"""Builds one step of a worker group: policies choose what runs; the builder does the bookkeeping and writes the plan.

Rows persist at the worker, and so does the set of generating rows: a steady-state step sends only a flag and the new
blocks of tables that grew. The cost is independent of sequences that do not run.
"""

from __future__ import annotations

from scheduler.core.effects import AddedSequence, Fork, StepPlan
from scheduler.core.in_flight import InFlightStep
from scheduler.core.request import Request, Sequence
from scheduler.core.worker_group import WorkerGroup


class StepBuilder:
    """The next step of `group`, under construction.

    Attributes:
        paused_requests: Requests paused before the step.
        num_tokens_left: Remaining token budget of the step.
        num_stalled: Sequences that no block is available for.
    """

    def __init__(self, group: WorkerGroup, time_ns: int, ordinal: int, paused_requests: list[Request]) -> None:
        self.group = group
        self.paused_requests = paused_requests
        self.num_tokens_left = group.max_num_tokens
        self.num_stalled = 0
        self._time_ns = time_ns
        self._ordinal = ordinal
        self._plan = StepPlan(group.connection, group.group_id, group.epoch, group.next_step_id)
        self._context: list[tuple[int, Sequence, int, bool]] = []
        self._planned_now: set[Sequence] = set()
        self._generation: list[Sequence] | None = None
        self._is_whole_generation = False
        self._draft_limits: dict[Sequence, int] = {}
        self._queue_latency_ns = 0
        if group.adoptions:
            group.adoptions.keep(group.tables.still_wants)

    @property
    def fitting_requests(self) -> list[Request]:
        """Requests that hold blocks."""
        return list(self.group.active)

    @property
    def context_requests(self) -> list[Request]:
        """Requests with a chunk in the step, in order."""
        return list(dict.fromkeys(chunk[1].request for chunk in self._context))

    @property
    def generation_requests(self) -> list[Request]:
        """Requests with a generating sequence in the step, in the order of their rows."""
        return list(dict.fromkeys(sequence.request for sequence in self._generation or ()))

    @property
    def is_empty(self) -> bool:
        """The step has nothing to run."""
        return not (self._context or self._generation or self._plan.beam_rows or self.group.adoptions)

    def add_context(self, sequence: Sequence, max_tokens: int) -> int:
        """Add the next chunk of a sequence's known tokens.

        Args:
            sequence: One of `group.context`.
            max_tokens: Most tokens in the chunk.

        Returns:
            Tokens in the chunk; 0 if the sequence must wait for blocks that another one is about to compute, or if
            `max_tokens` is too small.
        """
        most = min(max_tokens, self.num_tokens_left)
        if most <= 0 or sequence in self._planned_now or not self._is_ready(sequence):
            return 0
        remaining = sequence.num_context_tokens
        length = min(remaining, most)
        if length < remaining and not self.group.splits(remaining):
            return 0
        self._add_chunk(sequence, length, is_last=length == remaining)
        return length

    def _is_ready(self, sequence: Sequence) -> bool:
        """Skip blocks that others have computed; return False while another sequence still has to compute the next."""
        cache, block_size = self.group.prefix_cache, self.group.tokens_per_block
        while (index := sequence.num_computed // block_size) < sequence.num_hit_blocks:
            writer = cache.wait_for(sequence.table[index], sequence)
            if writer is sequence:
                sequence.limit_hits(index)
                return True
            if writer is not None:
                return False
            sequence.compute_to((index + 1) * block_size)
        return sequence.index == 0 or self.group.has_state or self._copy_from_leader(sequence)

    def _copy_from_leader(self, sequence: Sequence) -> bool:
        """Copy the prompt's last, partly filled block from another sequence of the request (copy-on-write).

        Returns:
            False while that sequence has not computed it; copies happen before a step's forward pass.
        """
        block_size, num_prompt = self.group.tokens_per_block, len(sequence.request.spec.prompt)
        index, num_partial = divmod(num_prompt - 1, block_size)
        leader = next((s for s in sequence.request.placed_sequences if s.row is not None), sequence)
        if leader is sequence or num_partial == 0 or sequence.num_computed != index * block_size:
            return True
        if leader.num_computed < num_prompt or leader in self._planned_now:
            return False
        if leader.num_freed <= index:
            self._plan.copy_source_blocks.append(leader.table[index])
            self._plan.copy_target_blocks.append(sequence.table[index])
            sequence.compute_to(num_prompt - 1)
        return True

    def _add_chunk(self, sequence: Sequence, length: int, *, is_last: bool) -> None:
        group, row = self.group, sequence.row
        assert row is not None
        if group.mark_sent(sequence):
            self._plan.added.append(AddedSequence(row, sequence, len(sequence.output), tuple(sequence.table)))
            self._note_first_scheduled(sequence)
        start = sequence.num_computed
        sequence.compute_to(start + length)
        self._settle_blocks(sequence, start // group.tokens_per_block, sequence.num_computed // group.tokens_per_block)
        self._plan.context_rows.append(row)
        self._plan.context_starts.append(start)
        self._plan.context_lengths.append(length)
        self._context.append((row, sequence, length, is_last))
        self._planned_now.add(sequence)
        self.num_tokens_left -= length

    def _note_first_scheduled(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.times.first_scheduled_ns == 0:
            # What it skips was in the pool, or has been fetched from tiers or another worker by now.
            request.note_scheduled(self._time_ns, min(sequence.num_computed, len(request.spec.prompt)))
            self._queue_latency_ns += self._time_ns - request.times.queued_ns

    def _settle_blocks(self, sequence: Sequence, first: int, end: int) -> None:
        """Mark the blocks [first, end) as computed by this step: sequences waiting for them may run in it."""
        cache, group = self.group.prefix_cache, self.group
        run = first
        for index in range(first, end):
            if not cache.settle(sequence.table[index]):
                if run < index:
                    cache.note_stored(sequence, run, index - run, group.tokens_per_block)
                run = index + 1
        if run < end:
            cache.note_stored(sequence, run, end - run, group.tokens_per_block)

    def add_generation(self, sequences: list[Sequence] | None = None) -> int:
        """Add one generation step of sequences.

        Args:
            sequences: Some of `group.generating`; None: all, up to the token budget.

        Returns:
            How many run; sequences whose tokens are all planned, or that no block is available for, are left out.
        """
        group = self.group
        chosen = group.generating
        if sequences is not None:
            wanted = set(sequences)
            chosen = [s for s in chosen if s in wanted]
        if group.num_waiting:
            chosen = self._without_stalled_beams(chosen)
        due = [s for s in chosen if s.num_computed == s.checkpoint]
        leave_out = {s for s in due if not self._settle_checkpoint(s)}
        if leave_out:
            chosen = [s for s in chosen if s not in leave_out]
        if len(chosen) > self.num_tokens_left:
            chosen = self._least_advanced(chosen)
        self._is_whole_generation = chosen is group.generating
        self._generation = list(chosen)
        self.num_tokens_left -= len(chosen)
        if group.num_waiting:
            self._plan_drafts(chosen)
        Sequence.compute_next(chosen)
        return len(chosen)

    def _without_stalled_beams(self, chosen: list[Sequence]) -> list[Sequence]:
        """Fork diverged beams; leave out those whose forks have no blocks available."""
        stalled = {
            request
            for request in dict.fromkeys(sequence.request for sequence in chosen)
            if request.beams is not None and request.beams.has_news and not self._fork_beams(request)
        }
        self.num_stalled += len(stalled)
        return [sequence for sequence in chosen if sequence.request not in stalled] if stalled else chosen

    def _fork_beams(self, request: Request) -> bool:
        """Write the outcome of a beam search's last step: which rows fork, and the token appended to each.

        Returns:
            False, with nothing changed, if there are not enough blocks.
        """
        group, plan, beams = self.group, self._plan, request.beams
        assert beams is not None
        if group.tables.num_missing_for_forks(beams.forks) > group.blocks.num_available:
            return False
        for source_block, target_block in group.tables.fork(beams.forks):
            plan.copy_source_blocks.append(source_block)
            plan.copy_target_blocks.append(target_block)
        for source, target in beams.forks:
            assert source.row is not None
            assert target.row is not None
            plan.forks.append(Fork(source.row, target.row, tuple(target.table)))
            group.mark_sent(target)
            group.set_checkpoint(target)
        for lane in beams.spare:
            if lane.table:
                group.tables.empty(lane)
        for lane in beams.running:
            assert lane.row is not None
            plan.beam_rows.append(lane.row)
            plan.beam_token_ids.append(lane.output[-1])
        beams.mark_forked()
        return True

    def _plan_drafts(self, chosen: list[Sequence]) -> None:
        """Let speculative sequences verify drafts, within the token and block budgets.

        The worker makes the drafts and verifies them in the step's one forward pass; the result holds the accepted ones
        and one more token. So a sequence's table must cover all its drafts. Blocks allocated for rejected drafts stay
        in the table, for the tokens that replace them.

        Args:
            chosen: Sequences of the step, whose own token is not counted as computed yet.
        """
        for sequence in chosen:
            spec, num_own = sequence.request.spec, sequence.num_computed + 1
            limit = min(spec.num_draft_tokens, self.num_tokens_left, spec.max_num_tokens - num_own)
            if limit <= 0:
                continue
            limit = min(limit, self._grow_for_drafts(sequence, num_own + limit) - num_own)
            if limit <= 0:
                continue
            assert sequence.row is not None
            self._plan.draft_rows.append(sequence.row)
            self._plan.draft_limits.append(limit)
            self._draft_limits[sequence] = limit
            self.num_tokens_left -= limit

    def _grow_for_drafts(self, sequence: Sequence, num_tokens: int) -> int:
        """Grow a table to hold `num_tokens`, unless others may need the blocks; return how many it can hold."""
        group, block_size = self.group, self.group.tokens_per_block
        assert sequence.row is not None
        while len(sequence.table) * block_size < num_tokens and group.blocks.num_available > len(group.active):
            self._plan.block_rows.append(sequence.row)
            self._plan.block_ids.append(group.tables.grow(sequence))
            group.set_checkpoint(sequence)
        return len(sequence.table) * block_size

    def _settle_checkpoint(self, sequence: Sequence) -> bool:
        """Grow a full table; return False if all tokens of the sequence are planned, or no block is available."""
        group = self.group
        if sequence.num_computed >= sequence.request.spec.max_num_tokens:
            group.end_generation(sequence)
            return False
        if group.blocks.num_available == 0:
            self.num_stalled += 1
            return False
        assert sequence.row is not None
        self._plan.block_rows.append(sequence.row)
        self._plan.block_ids.append(group.tables.grow(sequence))
        group.set_checkpoint(sequence)
        return True

    def _least_advanced(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return as many as the budget allows, those with the fewest planned output tokens, so that none starves."""

        def num_planned(sequence: Sequence) -> int:
            return sequence.num_computed - len(sequence.request.spec.prompt)

        chosen = set(sorted(sequences, key=num_planned)[: self.num_tokens_left])
        return [sequence for sequence in sequences if sequence in chosen]

    def finish(self) -> StepPlan:
        """Complete the step and put it in flight. Precondition: it is not empty."""
        group, plan = self.group, self._plan
        plan.released_rows = group.take_released_rows()
        for block, value in group.prefix_cache.take_news():
            plan.hashed_blocks.append(block)
            plan.block_hashes.append(value)
        adoption = group.adoptions.take()
        plan.adopted_blocks, plan.adopted_hashes = adoption.blocks, adoption.hashes
        generation, rows = self._write_generation()
        num_scheduled = len(self._context) + len(generation)
        group.send(
            InFlightStep(
                step_id=plan.step_id,
                ordinal=self._ordinal,
                planned_ns=self._time_ns,
                context=self._context,
                generation=generation,
                generation_rows=rows,
                num_paused=len(self.paused_requests),
                queue_latency_ns=self._queue_latency_ns,
                num_empty_slots=max(0, group.batch_size - num_scheduled),
                draft_limits=self._draft_limits,
                adoption=adoption,
            )
        )
        if group.num_waiting:
            group.rest(generation)
        for _, sequence, _, is_last in self._context:
            if is_last:
                group.begin_generation(sequence)
            else:
                sequence.request.count_step()  # sampling rows are counted by their tokens
        return plan

    def _write_generation(self) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
        """Write which rows generate, as the difference from the previous step."""
        group, plan, last = self.group, self._plan, self.group.last_generation
        if self._is_whole_generation and last.version == group.generation_version:
            plan.repeats_generation = bool(last.rows)
            return last.sequences, last.rows
        chosen = self._generation or []
        rows = tuple(s.row for s in chosen if s.row is not None)
        before = set(last.rows).difference(plan.released_rows)
        now = set(rows)
        if now and len(before & now) * 2 >= len(now):
            plan.repeats_generation = True
            plan.generation_rows = sorted(now - before)
            plan.idle_rows = sorted(before - now)
        else:
            plan.generation_rows = list(rows)
        version = group.generation_version if self._is_whole_generation else -1
        last = group.note_generation(version, tuple(chosen), rows)
        return last.sequences, rows
