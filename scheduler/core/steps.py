"""Steps of a worker group: policies choose what runs, the builder plans the step, and its result is applied.

Rows persist at the worker, and so does the set of generating rows: a steady-state step contains only a flag and the new
blocks of tables that grew. Its cost does not depend on sequences that do not run.

A result appends tokens to their sequences, ends the sequences that are complete, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.effects import AddedSequence, BeamsAdvanced, Emitted, Fork, IterationDone, StepPlan
from scheduler.core.events import StepDone
from scheduler.core.failure import UNAVAILABLE, Failure
from scheduler.core.in_flight import ContextChunk, InFlightStep
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.request import ExtraOutput, FinishReason, Request, Sequence, SequenceEnd
from scheduler.core.shared import Shared
from scheduler.core.stats import IterationStats, KvStats, RequestCounts, StepStats
from scheduler.core.timers import Clock
from scheduler.core.worker_group import WorkerGroup

_SHARES_NOTHING = Failure(UNAVAILABLE, "a sequence that shares its blocks failed before computing them")
# Number of rows for which a step with drafts may compute logits even if the group's batches are smaller; these logits
# take little memory.
_MIN_SAMPLED_ROWS = 64
End = tuple[Sequence, SequenceEnd]


class StepBuilder:
    """The next step of `group`, under construction.

    Attributes:
        paused_requests: Requests paused before the step.
        num_tokens_left: Remaining token budget.
        num_stalled: Number of sequences and of beam searches that lack a block.
    """

    def __init__(
        self, group: WorkerGroup, clock: Clock, paused_requests: list[Request], *, is_check: bool = False
    ) -> None:
        """Begin a step. `is_check` means that it computes tokens of another group again."""
        self.group = group
        self._is_check = is_check
        self._is_verified = group.verifies_next_step and not is_check
        self.paused_requests = paused_requests
        self.num_tokens_left = group.max_num_tokens
        self.num_stalled = 0
        self._clock = clock
        self._plan = StepPlan(group.connection, group.group_id, group.epoch, group.next_step_id)
        self._context: list[ContextChunk] = []
        self._planned_now: set[Sequence] = set()
        self._generation: list[Sequence] | None = None
        self._is_whole_generation = False
        self._draft_limits: dict[Sequence, int] = {}
        self._num_new_requests = self._queue_latency_ns = 0
        if group.adoptions:
            group.adoptions.keep(group.tables.still_wants)

    @property
    def fitting_requests(self) -> list[Request]:
        """Requests that hold blocks."""
        return list(self.group.active)

    @property
    def context_requests(self) -> list[Request]:
        """Requests with a chunk in the step, in order."""
        return list(dict.fromkeys(chunk.sequence.request for chunk in self._context))

    @property
    def generation_requests(self) -> list[Request]:
        """Requests with a generating sequence in the step, in the order of their rows."""
        return list(dict.fromkeys(sequence.request for sequence in self._generation or ()))

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to run."""
        return not (self._context or self._generation or self._plan.beam_rows or self.group.adoptions)

    def add_context(self, sequence: Sequence, max_tokens: int) -> int:
        """Add the next chunk of a sequence's known tokens.

        Args:
            sequence: One of `group.context`.
            max_tokens: Maximum tokens in the chunk.

        Returns:
            The number of tokens in the chunk; 0 if the sequence must wait for blocks that another one is about to
            compute, or if `max_tokens` is too small.
        """
        most = min(max_tokens, self.num_tokens_left)
        if most <= 0 or sequence in self._planned_now or not self._is_ready(sequence):
            return 0
        remaining = sequence.num_context_tokens
        length = min(self.group.num_to_compute(sequence), most)
        if length <= 0 or (length < remaining and not self.group.splits(remaining)):
            return 0
        self._add_chunk(sequence, length, is_last=length == remaining)
        return length

    def _is_ready(self, sequence: Sequence) -> bool:
        """Skip blocks that other sequences have computed; return False if another sequence still has to compute the
        next block.
        """
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
            False while that sequence has not computed the block; copies are made before a step's forward pass.
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
        first_block, end_block = start // group.tokens_per_block, sequence.num_computed // group.tokens_per_block
        self._settle_blocks(sequence, first_block, end_block)
        hashes = sequence.block_hashes(group.tokens_per_block)
        filled = tuple(zip(sequence.table[first_block:end_block], hashes[first_block:end_block], strict=False))
        self._plan.context_rows.append(row)
        self._plan.context_starts.append(start)
        self._plan.context_lengths.append(length)
        self._context.append(ContextChunk(row, sequence, length, is_last, filled))
        self._planned_now.add(sequence)
        self.num_tokens_left -= length

    def _note_first_scheduled(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.times.first_scheduled_ns == 0:
            # The skipped tokens were in the pool, or have been fetched from tiers or another worker by now.
            request.note_scheduled(self._clock.now_ns, min(sequence.num_computed, len(request.spec.prompt)))
            self._num_new_requests += 1
            self._queue_latency_ns += self._clock.now_ns - request.times.queued_ns

    def _settle_blocks(self, sequence: Sequence, first: int, end: int) -> None:
        """Mark the blocks [first, end) as computed by this step, so that sequences that wait for them may also run in
        it.
        """
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
        """Add one generation step for each sequence.

        Args:
            sequences: Some of `group.generating`; None means all of them, up to the token budget.

        Returns:
            The number of sequences that run; those without an available block, or whose tokens are all planned, are
            left out.
        """
        group = self.group
        chosen = group.generating
        if sequences is not None:
            wanted = set(sequences)
            chosen = [s for s in chosen if s in wanted]
        if group.num_micro_batches > 1:
            chosen = self._micro_batch(chosen)
        if group.num_waiting:
            chosen = self._without_stalled_beams(chosen)
        due = [s for s in chosen if s.num_computed == s.checkpoint]
        if due and (left_out := self._extend_tables(due)):
            chosen = [s for s in chosen if s not in left_out]
        if len(chosen) > self.num_tokens_left:
            chosen = self._least_advanced(chosen)
        self._is_whole_generation = chosen is group.generating
        self._generation = list(chosen)
        self.num_tokens_left -= len(chosen)
        # A recurrent state cannot be reset to before rejected drafts.
        # A verified step computes one token for each row, as its check does; drafts do not change the tokens.
        if group.num_waiting and not group.has_state and not self._is_verified:
            self._plan_drafts(chosen)
        Sequence.compute_next(chosen)
        return len(chosen)

    def _micro_batch(self, chosen: list[Sequence]) -> list[Sequence]:
        """Return the sequences that this step runs while the stages of a pipeline still compute the preceding steps.

        Only sequences that are in none of those steps are returned, and at most an equal share of all generating
        sequences. If there are none, sequences of the preceding steps may run again, as in a group without stages.
        """
        group = self.group
        before = list(group.in_flight)[-(group.num_micro_batches - 1) :]
        running = {sequence for step in before for sequence in step.sampled()}
        limit = -(-len(running.union(group.generating)) // group.num_micro_batches)
        free = [sequence for sequence in chosen if sequence not in running]
        if not free and len(group.in_flight) < self.group.config.pipeline_depth:
            free = chosen
        return free[:limit]

    def _without_stalled_beams(self, chosen: list[Sequence]) -> list[Sequence]:
        """Fork beams that have diverged; leave out beams if there are not enough blocks for their forks."""
        stalled = {
            request
            for request in dict.fromkeys(sequence.request for sequence in chosen)
            if request.beams is not None and request.beams.has_news and not self._fork_beams(request)
        }
        self.num_stalled += len(stalled)
        return [sequence for sequence in chosen if sequence.request not in stalled] if stalled else chosen

    def _fork_beams(self, request: Request) -> bool:
        """Apply the outcome of a beam search's last step: fork rows, and append a token to each.

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
        """Let speculative sequences verify draft tokens, within the token, row and block budgets.

        A worker computes a row of logits for each draft, and has memory for as many rows of logits as a batch has rows,
        or for _MIN_SAMPLED_ROWS if that is more.

        The worker makes the drafts and verifies them in the step's one forward pass; the result contains the accepted
        drafts and one more token. A sequence's table must therefore cover all its drafts. Blocks allocated for rejected
        drafts stay in the table, for the tokens that replace them.

        Args:
            chosen: Sequences of the step, whose own next token is not counted as computed yet.
        """
        num_used = self.group.max_batch_size - self.group.num_free_rows
        num_rows_left = max(self.group.max_batch_size, _MIN_SAMPLED_ROWS) - num_used
        for sequence in chosen:
            spec, num_own = sequence.request.spec, sequence.num_computed + 1
            limit = min(spec.num_draft_tokens, self.num_tokens_left, num_rows_left, spec.max_num_tokens - num_own)
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
            num_rows_left -= limit

    def _grow_for_drafts(self, sequence: Sequence, num_tokens: int) -> int:
        """Extend a table to `num_tokens` tokens unless other sequences may need the blocks; return how many tokens the
        table can hold.
        """
        group, block_size = self.group, self.group.tokens_per_block
        while len(sequence.table) * block_size < num_tokens and group.blocks.num_available > len(group.active):
            group.tables.free_behind_windows([sequence])
            if group.tables.has_window and len(sequence.held_blocks) >= sequence.num_reserved:
                break  # other blocks are reserved for other sequences
            self._grow([sequence])
        return len(sequence.table) * block_size

    def _extend_tables(self, due: list[Sequence]) -> set[Sequence]:
        """Extend the full tables of sequences at their checkpoint; return the sequences that cannot run: all of their
        tokens are planned, or no block is available.
        """
        group, growing, left_out = self.group, list[Sequence](), set[Sequence]()
        group.tables.free_behind_windows(due)
        num_available = group.blocks.num_available
        for sequence in due:
            if sequence.num_computed >= sequence.max_num_tokens:
                group.end_generation(sequence)
                left_out.add(sequence)
            elif len(growing) == num_available:
                self.num_stalled += 1
                left_out.add(sequence)
            else:
                growing.append(sequence)
        self._grow(growing)
        return left_out

    def _grow(self, sequences: list[Sequence]) -> None:
        """Add a block to each table. Precondition: enough blocks are available."""
        self._plan.block_ids += self.group.tables.grow(sequences)
        for sequence in sequences:
            assert sequence.row is not None
            self._plan.block_rows.append(sequence.row)
            self.group.set_checkpoint(sequence)

    def _least_advanced(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return as many sequences as the budget allows, those with the fewest planned output tokens, so that no
        sequence starves.
        """

        def num_planned(sequence: Sequence) -> int:
            return sequence.num_computed - len(sequence.request.spec.prompt)

        chosen = set(sorted(sequences, key=num_planned)[: self.num_tokens_left])
        return [sequence for sequence in sequences if sequence in chosen]

    def finish(self) -> StepPlan:
        """Complete the step and add it to the steps in flight. Precondition: it is not empty."""
        group, plan = self.group, self._plan
        plan.released_rows = group.take_released_rows()
        for block, value in group.prefix_cache.take_news():
            plan.hashed_blocks.append(block)
            plan.block_hashes.append(value)
        for value, retention in group.blocks.take_retained().items():
            plan.retained_hashes.append(value)
            plan.retained_priorities.append(retention.priority)
            plan.retained_ms.append(retention.num_ms)
        adoption = group.adoptions.take()
        if adoption.entries:
            plan.adopted_blocks, plan.adopted_hashes = adoption.blocks, adoption.hashes
        plan.ahead_hashes = group.take_hashes_ahead()
        generation, rows = self._write_generation()
        num_scheduled = len(self._context) + len(generation)
        step = InFlightStep(
            step_id=plan.step_id,
            ordinal=self._clock.num_steps,
            planned_ns=self._clock.now_ns,
            context=self._context,
            generation=generation,
            generation_rows=rows,
            num_paused=len(self.paused_requests),
            num_new_requests=self._num_new_requests,
            queue_latency_ns=self._queue_latency_ns,
            num_empty_slots=max(0, -(-group.batch_size // group.num_micro_batches) - num_scheduled),
            draft_limits=self._draft_limits,
            adoption=adoption,
        )
        step.is_verified = self._is_verified and step.num_sampled > 0
        plan.reports_digests = self._is_check or step.is_verified
        if self._is_check:
            group.send_check(step)
        else:
            group.send(step)
        if group.num_waiting:
            group.rest(generation)
        for chunk in self._context:
            if chunk.is_last:
                group.begin_generation(chunk.sequence)
            else:
                chunk.sequence.request.count_step()  # sampling rows are counted by their results
        return plan

    def _write_generation(self) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
        """Encode which rows generate, as the difference from the previous step."""
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


@dataclass(slots=True)
class Applied:
    """Summary of a result that was applied.

    Attributes:
        emitted: Sequences with new tokens.
        num_rows: Number of rows whose result was used. num_tokens: Number of tokens that they produced.
    """

    emitted: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0


class Results:
    """Applies results to sequences.

    Attributes:
        reports_iterations: Whether to emit an IterationDone for each result.
    """

    def __init__(
        self, shared: Shared, lifecycle: Lifecycle, try_again: Callable[[WorkerGroup, Request, int], None]
    ) -> None:
        """Create the object; `try_again` is called to requeue a request that its worker could not run yet, with a
        delay in nanoseconds.
        """
        self.reports_iterations = True
        self._last: tuple[InFlightStep, StepDone, int] | None = None
        self._lifecycle, self._try_again = lifecycle, try_again
        self._queue, self._totals = shared.queue, shared.totals
        self._clock, self._effects = shared.clock, shared.effects

    def problem(self, group: WorkerGroup, step: InFlightStep, event: StepDone, vocab_size: int) -> str:
        """Return why a result does not match its step; empty if it matches.

        The message itself has been checked before (scheduler/wire/worker_checks.py).
        """
        num_tokens = len(event.token_ids)
        if event.num_tokens:
            if len(event.num_tokens) != step.num_sampled or sum(event.num_tokens) != num_tokens:
                return (
                    f"{len(event.num_tokens)} rows with {num_tokens} tokens; the step samples {step.num_sampled} rows"
                )
        elif num_tokens != step.num_sampled:
            return f"{num_tokens} tokens, but {step.num_sampled} were requested"
        if num_tokens and max(event.token_ids) >= vocab_size:
            return f"token {max(event.token_ids)} is not in the vocabulary"
        if len(event.logit_digests) not in (0, step.num_sampled):
            return f"{len(event.logit_digests)} digests, but {step.num_sampled} rows"
        if event.missing_blocks and not event.missing_blocks.issubset(step.adoption.blocks):
            return "missing_blocks names a block that the step did not ask for"
        if (event.failures or event.outputs) and (problem := self._rows_problem(step, event)):
            return problem
        num_drafts = event.num_draft_tokens or event.num_accepted_tokens
        if num_drafts and max(num_drafts, event.num_accepted_tokens) > sum(step.draft_limits.values()):
            return f"{event.num_draft_tokens} draft tokens, but at most {sum(step.draft_limits.values())} were allowed"
        if (
            group.num_waiting
            or event.num_tokens
            or event.num_drafts
            or event.candidate_log_probs
            or event.candidate_stop_words
        ):
            return _runs_problem(step, event)
        return ""

    def _rows_problem(self, step: InFlightStep, event: StepDone) -> str:
        rows = self._rows(step)
        for row in [*(row for row, _ in event.failures), *(row for row, _ in event.outputs)]:
            if row not in rows:
                return f"row {row} is not in the step"
        return ""

    def commit(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> None:
        """Apply the result of the group's oldest step in flight, whose format has been checked."""
        if group.can_verify:
            group.note_committed(step, len(event.token_ids))
        failed = self._failed_rows(group, step, event)
        if event.outputs:
            self._keep_outputs(step, event, failed)
        ends: list[End] = []
        if group.num_waiting or event.num_tokens or failed:
            applied = self._apply_runs(group, step, event, failed, ends)
            emitted = applied.emitted
        else:
            emitted, tokens = [], event.token_ids
            first = [chunk.sequence for chunk in step.context if chunk.is_last]
            if first:
                emitted = self._append_first(group, first, step, tokens, ends)
                tokens = tokens[len(first) :]
            emitted += self._append_next(group, step, tokens, ends)
            applied = Applied(emitted, len(emitted), len(emitted))
        self._totals.num_wasted_tokens += max(0, step.num_sampled - applied.num_rows)
        self._totals.num_generation_tokens += applied.num_tokens
        self._totals.num_draft_tokens += event.num_draft_tokens
        self._totals.num_accepted_tokens += event.num_accepted_tokens
        self._totals.num_prompt_tokens += step.num_context_tokens
        if emitted:
            self._effects.append(Emitted(emitted, [len(sequence.output) for sequence in emitted]))
        for sequence, end in ends:
            if sequence.end is None:
                self._lifecycle.end_sequence(sequence, end)
        if failed:
            self._fail_rows(group, failed)
        self._report(group, step, event, applied.num_tokens)

    def _apply_runs(
        self, group: WorkerGroup, step: InFlightStep, event: StepDone, failed: dict[Sequence, Failure], ends: list[End]
    ) -> Applied:
        """Apply a result row by row, for steps in which a row may produce any number of tokens.

        A speculative sequence's result is a run: the accepted drafts and one more token, truncated at the sequence's
        end. A beam's result is a list of candidates; once all beams of its request have theirs, the search takes a
        step. Both kinds of sequence waited for this result, and continue now.
        """
        applied = Applied()
        start = first_log_prob = 0
        counts = event.num_tokens or [1] * step.num_sampled
        drafts = event.num_drafts or [0] * step.num_sampled
        for sequence, count, num_drafts in zip(step.sampled(), counts, drafts, strict=True):
            tokens, start = event.token_ids[start : start + count], start + count
            request = sequence.request
            log_probs: list[float] = []
            stop_words: list[int] = []
            if request.beams is not None:
                log_probs = event.candidate_log_probs[first_log_prob : first_log_prob + count]
                stop_words = event.candidate_stop_words[first_log_prob : first_log_prob + count]
                first_log_prob += count
            if sequence.first_ordinal > step.ordinal or sequence in failed:
                continue
            applied.num_rows += 1
            _note_step(sequence, step.ordinal)
            self._note_first_token(sequence)
            if request.beams is None:
                request.count_drafts(num_drafts, count - 1)
                self._apply_run(group, sequence, tokens, ends, applied)
            elif request.beams.take(
                sequence,
                list(zip(tokens, log_probs, strict=True)),
                {token: word for token, word in zip(tokens, stop_words, strict=False) if word},
            ):
                applied.num_tokens += len(request.beams.running)
                self._advance_beams(group, request, ends, applied)
        return applied

    def _apply_run(
        self, group: WorkerGroup, sequence: Sequence, tokens: list[int], ends: list[End], applied: Applied
    ) -> None:
        applied.emitted.append(sequence)
        self._note_latency(sequence, len(tokens))
        num_ends = len(ends)
        for token in tokens:
            if len(ends) == num_ends:
                self._append(group, sequence, token, ends)
                applied.num_tokens += 1
        if sequence.waits_for_result and len(ends) == num_ends:
            sequence.compute_to(sequence.num_computed + len(tokens) - 1)
            group.resume_generation(sequence)

    def _advance_beams(self, group: WorkerGroup, request: Request, ends: list[End], applied: Applied) -> None:
        beams = request.beams
        assert beams is not None
        beams.advance()
        search, best, now_ns = beams.search, request.sequences[0], self._clock.now_ns
        self._effects.append(BeamsAdvanced(request, len(search.steps), len(best.outputs), len(best.output)))
        if not search.is_over:
            if best.extend_to(search.decided.tokens, search.num_decided, now_ns):
                applied.emitted.append(best)
            for lane in beams.running:
                group.resume_generation(lane)
            return
        for sequence, (tokens, end) in zip(request.sequences, beams.ends(len(request.sequences)), strict=True):
            if sequence.extend_to(tokens, len(tokens), now_ns):
                applied.emitted.append(sequence)
            ends.append((sequence, end))

    def _append_first(
        self, group: WorkerGroup, sequences: list[Sequence], step: InFlightStep, tokens: list[int], ends: list[End]
    ) -> list[Sequence]:
        """Append the first tokens of sequences that have completed their context phase."""
        emitted: list[Sequence] = []
        for sequence, token in zip(sequences, tokens, strict=False):
            if sequence.first_ordinal <= step.ordinal:
                self._note_first_token(sequence)
                emitted.append(sequence)
                self._append(group, sequence, token, ends)
        return emitted

    def _append_next(
        self, group: WorkerGroup, step: InFlightStep, tokens: list[int], ends: list[End]
    ) -> list[Sequence]:
        """Append one token to each generating sequence. This is the scheduler's hot loop."""
        ordinal, now_ns = step.ordinal, self._clock.now_ns
        # The sequences that are left out ended or were paused after the step was planned.
        emitted = [sequence for sequence in step.generation if sequence.first_ordinal <= ordinal]
        if len(emitted) < len(step.generation):
            pairs = zip(step.generation, tokens, strict=True)
            tokens = [token for sequence, token in pairs if sequence.first_ordinal <= ordinal]
        before_ns, num_alike = 0, 0  # most gaps are equal, so they are counted together
        for sequence in emitted:
            if sequence.last_token_ns != before_ns:
                self._totals.inter_token_latency.observe(now_ns - before_ns, num_alike)
                before_ns, num_alike = sequence.last_token_ns, 0
            num_alike += 1
        self._totals.inter_token_latency.observe(now_ns - before_ns, num_alike)
        for sequence in Sequence.append_next(emitted, tokens, now_ns):
            self._check_last_token(group, sequence, ends)
        return emitted

    def _append(self, group: WorkerGroup, sequence: Sequence, token: int, ends: list[End]) -> None:
        """Append a token to a sequence, and record its end if it is complete."""
        sequence.append(token, self._clock.now_ns)
        self._check_last_token(group, sequence, ends)

    def _check_last_token(self, group: WorkerGroup, sequence: Sequence, ends: list[End]) -> None:
        """Publish the block that a sequence's last token has filled; record the sequence's end if it is complete."""
        spec, num_output, token = sequence.request.spec, len(sequence.output), sequence.output[-1]
        if num_output == sequence.next_publish:
            group.tables.publish_generated(sequence)
        if not spec.max_tokens:
            ends.append((sequence, SequenceEnd(FinishReason.LENGTH, 0)))
        elif token in spec.stop_token_ids and num_output >= spec.min_tokens:
            ends.append((sequence, SequenceEnd(FinishReason.STOP, num_output, stop_token_id=token)))
        elif spec.stop_sequences and num_output >= spec.min_tokens and spec.ends_with_stop_sequence(sequence.output):
            ends.append((sequence, SequenceEnd(FinishReason.STOP, num_output)))
        elif num_output == spec.max_tokens:
            ends.append((sequence, SequenceEnd(FinishReason.LENGTH, num_output)))

    def _note_latency(self, sequence: Sequence, num_tokens: int) -> None:
        """Record the time since the sequence's last token, divided equally among the new tokens."""
        if sequence.last_token_ns:
            since_ns = self._clock.now_ns - sequence.last_token_ns
            self._totals.inter_token_latency.observe(since_ns // num_tokens, num_tokens)

    def _note_first_token(self, sequence: Sequence) -> None:
        """Record that a sequence has made progress, and the time of its request's first token."""
        request, now_ns = sequence.request, self._clock.now_ns
        request.note_progress()
        if request.times.first_token_ns == 0:
            request.note_first_token(now_ns)
            self._totals.prefix_cache_queries += len(request.spec.prompt)
            self._totals.prefix_cache_hits += request.counters.num_cached_tokens
            self._totals.time_to_first_token.observe(now_ns - request.times.queued_ns)
            self._totals.request_queue_time.observe(request.times.first_scheduled_ns - request.times.queued_ns)

    def _rows(self, step: InFlightStep) -> dict[int, Sequence]:
        rows = {chunk.row: chunk.sequence for chunk in step.context}
        rows.update(zip(step.generation_rows, step.generation, strict=True))
        return rows

    def _keep_outputs(self, step: InFlightStep, event: StepDone, failed: dict[Sequence, Failure]) -> None:
        rows = self._rows(step)
        sampled = {chunk.row for chunk in step.context if chunk.is_last}.union(step.generation_rows)
        nums_before: dict[Sequence, int] = {}  # a run reports its outputs token by token
        for row, data in event.outputs:
            sequence = rows.get(row)
            if sequence is None or sequence.first_ordinal > step.ordinal:
                continue
            if failed.get(sequence) is _SHARES_NOTHING:  # its token is computed again, with its outputs
                continue
            offset = len(sequence.output)
            if sequence in step.draft_limits:
                num_before = nums_before.get(sequence, 0)
                offset, nums_before[sequence] = offset + num_before, num_before + 1
            if sequence.request.beams is not None:
                if row in sampled:
                    sequence.request.beams.report(sequence, data)
                    continue
                sequence = sequence.request.sequences[0]  # outputs for the prompt belong to the first sequence
                offset = 0
            sequence.outputs.append(ExtraOutput(offset, data))

    def _failed_rows(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> dict[Sequence, Failure]:
        """Return the failed sequences, and those that must restart because they share blocks that a failed one was to
        compute.
        """
        if not event.failures:
            return {}
        rows = self._rows(step)
        failed = {
            rows[row]: failure
            for row, failure in event.failures
            if row in rows and rows[row].first_ordinal <= step.ordinal
        }
        codes = {row: failure.code for row, failure in event.failures}
        for chunk in step.context:
            if codes.get(chunk.row, UNAVAILABLE) == UNAVAILABLE:
                continue
            sharers = group.withdraw(chunk.blocks)
            if chunk.sequence in failed:  # and was not released after the step was planned
                sharers += group.sharers(chunk.sequence)
            for sharer in sharers:
                failed.setdefault(sharer, _SHARES_NOTHING)
        return failed

    def _fail_rows(self, group: WorkerGroup, failed: dict[Sequence, Failure]) -> None:
        for sequence, failure in failed.items():
            request = sequence.request
            is_here = request.group is group
            if is_here and (failure.code != UNAVAILABLE or failure is _SHARES_NOTHING):
                # The sequence may have failed before any of its tokens were computed.
                for block in sequence.held_blocks:
                    group.prefix_cache.withdraw(block)
            if failure.code == UNAVAILABLE and is_here and sequence.end is None:
                self._try_again(group, request, 0 if failure is _SHARES_NOTHING else request.next_delay_ns())
            elif failure.code != UNAVAILABLE and sequence.end is None:
                self._lifecycle.end(request, FinishReason.ERROR, failure)

    def _report(self, group: WorkerGroup, step: InFlightStep, event: StepDone, num_decoded: int) -> None:
        self._totals.num_iterations += 1
        if not group.blocks.is_conserved:
            self._totals.num_conservation_violations += 1
        self._last = step, event, num_decoded
        if self.reports_iterations:
            self._effects.append(IterationDone(self.statistics([group], event.time_ns, group.group_id)))

    def statistics(self, groups: list[WorkerGroup], time_ns: int, group_id: str) -> IterationStats:
        """Return the combined state of some groups, with the counts of the last step."""
        totals = self._totals
        return IterationStats(
            time_ns=time_ns,
            iteration=totals.num_iterations,
            group_id=group_id,
            requests=RequestCounts(
                num_active=self._lifecycle.num_unfinished - len(self._queue),
                num_queued=len(self._queue),
                num_completed=totals.num_completed,
                max_num_active=totals.max_num_active_requests,
            ),
            kv=kv_stats(groups),
            step=step_stats(*self._last) if self._last is not None else StepStats(),
            memory=memory_of(groups),
            num_finished_by_reason=dict(totals.num_finished_by_reason),
            num_stale_messages=totals.num_stale_messages,
            num_conservation_violations=totals.num_conservation_violations,
            num_preemptions=totals.num_preemptions,
        )


def step_stats(step: InFlightStep, event: StepDone, num_decoded: int) -> StepStats:
    """Return the counts of a step and its result."""
    return StepStats(
        micro_batch_id=step.step_id,
        latency_ns=event.time_ns - step.planned_ns,
        num_new_requests=step.num_new_requests,
        queue_latency_ns=step.queue_latency_ns,
        num_context_requests=len({chunk.sequence.request for chunk in step.context}),
        num_generation_requests=len(step.generation),
        num_paused_requests=step.num_paused,
        num_context_tokens=step.num_context_tokens,
        num_generation_tokens=len(step.generation),
        num_decoded_tokens=num_decoded,
        empty_generation_slots=step.num_empty_slots,
        num_draft_tokens=event.num_draft_tokens,
        num_accepted_tokens=event.num_accepted_tokens,
    )


def kv_stats(groups: list[WorkerGroup]) -> KvStats:
    """Return the combined block counts of some groups, in blocks of the scheduler's size."""
    blocks = [(group.blocks, group.units_per_block) for group in groups]
    return KvStats(
        num_blocks=sum(n * b.num_blocks for b, n in blocks),
        num_free=sum(n * b.num_available for b, n in blocks),
        num_used=sum(n * b.num_held for b, n in blocks),
        num_cached=sum(n * b.num_cached for b, n in blocks),
        tokens_per_block=groups[0].config.tokens_per_block if groups else 0,
        allocated=sum(n * b.counts.allocated for b, n in blocks),
        allocated_new=sum(n * b.counts.allocated_new for b, n in blocks),
        reused=sum(n * b.counts.reused for b, n in blocks),
        missed=sum(n * b.counts.missed for b, n in blocks),
        evicted=sum(n * b.counts.evicted for b, n in blocks),
    )


def memory_of(groups: list[WorkerGroup]) -> tuple[int, int, int]:
    """Return the memory that some groups use, in bytes, as (host, device, pinned)."""
    return (
        sum(group.memory[0] for group in groups),
        sum(group.memory[1] for group in groups),
        sum(group.memory[2] for group in groups),
    )


def _runs_problem(step: InFlightStep, event: StepDone) -> str:
    """Check runs and candidates, whose total number was checked before; return the problem, empty if there is none."""
    if len(event.num_drafts) not in (0, step.num_sampled):
        return f"num_drafts has {len(event.num_drafts)} entries for {step.num_sampled} rows"
    start = 0
    counts, drafts = event.num_tokens or [1] * step.num_sampled, event.num_drafts or [0] * step.num_sampled
    for sequence, count, num_drafts in zip(step.sampled(), counts, drafts, strict=True):
        beams = sequence.request.beams
        tokens, start = event.token_ids[start : start + count], start + count
        if num_drafts > step.draft_limits.get(sequence, 0):
            return f"{num_drafts} drafts for a row; must be at most {step.draft_limits.get(sequence, 0)}"
        if beams is None:
            if not 1 <= count <= 1 + num_drafts:
                return f"{count} tokens for a row with {num_drafts} drafts; must be 1 to {1 + num_drafts}"
            continue
        if count > beams.search.num_candidates or len(set(tokens)) != count:
            return f"{count} candidates for a beam; must be at most {beams.search.num_candidates}, all different"
    return _candidates_problem(step, event, counts)


def _candidates_problem(step: InFlightStep, event: StepDone, counts: list[int]) -> str:
    """Check what is reported with candidates; return the problem, empty if there is none."""
    num_candidates, words = 0, event.candidate_stop_words
    for sequence, count in zip(step.sampled(), counts, strict=True):
        if sequence.request.beams is not None:
            last, num_words = max(words[num_candidates:][:count], default=0), len(sequence.request.spec.stop_words)
            if last > num_words:
                return f"a candidate completes stop word {last} of {num_words}"
            num_candidates += count
    if num_candidates != len(event.candidate_log_probs):
        return f"{len(event.candidate_log_probs)} log probabilities for {num_candidates} candidates"
    if len(words) not in (0, num_candidates):
        return f"{len(words)} stop words for {num_candidates} candidates"
    if not all(map(math.isfinite, event.candidate_log_probs)):
        return "a log probability is not finite"
    if max(event.candidate_log_probs, default=0.0) > 0:
        return "a log probability is above 0; must be at most 0"
    return ""


def _note_step(sequence: Sequence, ordinal: int) -> None:
    """Count a step for a sequence that waits for each result; steps of other sequences are counted by their tokens."""
    if sequence.waits_for_result:
        sequence.request.count_step(ordinal)
