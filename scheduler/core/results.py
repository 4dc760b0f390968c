"""Apply step results: append tokens, end sequences that are complete, compute statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core.effects import BeamsAdvanced, Effect, Emitted, IterationDone
from scheduler.core.events import StepDone
from scheduler.core.failure import UNAVAILABLE, Failure
from scheduler.core.in_flight import InFlightStep
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.queue import RequestQueue
from scheduler.core.request import ExtraOutput, FinishReason, Request, Sequence, SequenceEnd
from scheduler.core.stats import IterationStats, KvStats, RequestCounts, StepStats, Totals
from scheduler.core.timers import Clock
from scheduler.core.worker_group import WorkerGroup

_SHARES_NOTHING = Failure(UNAVAILABLE, "blocks that it shares were not computed")


End = tuple[Sequence, SequenceEnd]


@dataclass(slots=True)
class Taken:
    """Summary of an applied result.

    Attributes:
        emitted: Sequences with new tokens.
        num_rows: Rows whose result was used. num_tokens: Tokens that they produced.
    """

    emitted: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0


class Results:
    """Applies results to sequences.

    Attributes:
        reports_iterations: Emit an IterationDone for each result.
    """

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        queue: RequestQueue,
        totals: Totals,
        clock: Clock,
        effects: list[Effect],
        try_again: Callable[[WorkerGroup, Request], None],
    ) -> None:
        """Call `try_again` to queue a request again that its worker could not run yet."""
        self.reports_iterations = True
        self._last: tuple[InFlightStep, StepDone, int] | None = None
        self._lifecycle = lifecycle
        self._queue = queue
        self._totals = totals
        self._clock = clock
        self._effects = effects
        self._try_again = try_again

    def problem(self, group: WorkerGroup, step: InFlightStep, event: StepDone, vocab_size: int) -> str:
        """Return why a result does not match its step; empty if it does.

        The message by itself has been checked before (scheduler/wire/worker_checks.py).
        """
        num_tokens = len(event.token_ids)
        if event.num_tokens:
            if len(event.num_tokens) != step.num_sampled or sum(event.num_tokens) != num_tokens:
                return f"{len(event.num_tokens)} rows with {num_tokens} tokens, {step.num_sampled} rows were asked for"
        elif num_tokens != step.num_sampled:
            return f"{num_tokens} tokens, {step.num_sampled} were asked for"
        if num_tokens and max(event.token_ids) >= vocab_size:
            return f"token {max(event.token_ids)} is not in the vocabulary"
        if not event.missing_blocks.issubset(step.adoption.blocks):
            return "a block is missing that was not asked for"
        if (event.failures or event.outputs) and (problem := self._rows_problem(step, event)):
            return problem
        if max(event.num_draft_tokens, event.num_accepted_tokens) > sum(step.draft_limits.values()):
            return f"{event.num_draft_tokens} drafts, {sum(step.draft_limits.values())} were allowed"
        if group.num_waiting or event.num_tokens or event.num_drafts or event.candidate_log_probs:
            return _runs_problem(step, event)
        return ""

    def _rows_problem(self, step: InFlightStep, event: StepDone) -> str:
        rows = self._rows(step)
        for row in [*(row for row, _ in event.failures), *(row for row, _ in event.outputs)]:
            if row not in rows:
                return f"row {row} was not in the step"
        return ""

    def commit(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> None:
        """Apply the result of the group's oldest step in flight, whose shape was checked."""
        first_sampled = [chunk[1] for chunk in step.context if chunk[3]]
        if event.outputs:
            self._keep_outputs(step, event)
        failed = self._failed_rows(group, step, event)
        ends: list[End] = []
        if group.num_waiting or event.num_tokens or failed:
            taken = self._take_runs(group, step, event, failed, ends)
            emitted = taken.emitted
        else:
            num_first = len(first_sampled)
            emitted = self._append_first(group, first_sampled, step, event.token_ids, ends)
            tokens = event.token_ids[num_first:] if num_first else event.token_ids
            emitted += self._append_next(group, step, tokens, ends)
            taken = Taken(emitted, len(emitted), len(emitted))
        self._totals.num_wasted_tokens += max(0, step.num_sampled - taken.num_rows)
        self._totals.num_generation_tokens += taken.num_tokens
        self._totals.num_draft_tokens += event.num_draft_tokens
        self._totals.num_accepted_tokens += event.num_accepted_tokens
        self._totals.num_prompt_tokens += sum(chunk[2] for chunk in step.context)
        if emitted:
            self._effects.append(Emitted(emitted, [len(sequence.output) for sequence in emitted]))
        for sequence, end in ends:
            if sequence.end is None:
                self._lifecycle.end_sequence(sequence, end)
        self._fail_rows(group, failed)
        self._report(group, step, event, taken.num_tokens)

    def _take_runs(
        self, group: WorkerGroup, step: InFlightStep, event: StepDone, failed: dict[Sequence, Failure], ends: list[End]
    ) -> Taken:
        """Apply a result row by row, for steps whose rows may produce other than one token.

        A speculative sequence's result is a run: the accepted drafts and one more token, cut at the sequence's end. A
        beam's result is a list of candidates; once all beams of its request have theirs, the search takes a step. Both
        kinds waited for this result and continue now.
        """
        taken = Taken()
        start = first_log_prob = 0
        counts = event.num_tokens or [1] * step.num_sampled
        drafts = event.num_drafts or [0] * step.num_sampled
        for sequence, count, num_drafts in zip(step.sampled(), counts, drafts, strict=True):
            tokens, start = event.token_ids[start : start + count], start + count
            request = sequence.request
            log_probs: list[float] = []
            if request.beams is not None:
                log_probs = event.candidate_log_probs[first_log_prob : first_log_prob + count]
                first_log_prob += count
            if sequence.first_ordinal > step.ordinal or sequence in failed:
                continue
            taken.num_rows += 1
            _note_step(sequence, step.ordinal)
            self._note_first_token(sequence)
            if request.beams is None:
                request.count_drafts(num_drafts, count - 1)
                self._take_run(group, sequence, tokens, ends, taken)
            elif request.beams.take(sequence, list(zip(tokens, log_probs, strict=True))):
                taken.num_tokens += len(request.beams.running)
                self._advance_beams(group, request, ends, taken)
        return taken

    def _take_run(
        self, group: WorkerGroup, sequence: Sequence, tokens: list[int], ends: list[End], taken: Taken
    ) -> None:
        taken.emitted.append(sequence)
        self._note_latency(sequence, len(tokens))
        num_ends = len(ends)
        for token in tokens:
            if len(ends) == num_ends:
                self._append(group, sequence, token, ends)
                taken.num_tokens += 1
        if sequence.waits_for_result and len(ends) == num_ends:
            sequence.compute_to(sequence.num_computed + len(tokens) - 1)
            group.resume_generation(sequence)

    def _advance_beams(self, group: WorkerGroup, request: Request, ends: list[End], taken: Taken) -> None:
        beams = request.beams
        assert beams is not None
        beams.advance()
        num_outputs = len(request.sequences[0].outputs)
        self._effects.append(BeamsAdvanced(request, len(beams.search.steps), num_outputs))
        if not beams.search.is_over:
            for lane in beams.running:
                group.resume_generation(lane)
            return
        for sequence, (tokens, end) in zip(request.sequences, beams.ends(len(request.sequences)), strict=True):
            sequence.take_output(tokens)
            if tokens:
                taken.emitted.append(sequence)
            ends.append((sequence, end))

    def _append_first(
        self, group: WorkerGroup, sequences: list[Sequence], step: InFlightStep, tokens: list[int], ends: list[End]
    ) -> list[Sequence]:
        """Append the first tokens after context phases."""
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
        """Append one token to each generating sequence. This is the hot loop of the scheduler."""
        emitted: list[Sequence] = []
        ordinal, now_ns = step.ordinal, self._clock.now_ns
        before_ns, num_alike = 0, 0  # most got their last token in the same step: count them together
        for sequence, token in zip(step.generation, tokens, strict=True):
            if sequence.first_ordinal > ordinal:
                continue  # ended or paused after the step was planned
            emitted.append(sequence)
            if sequence.last_token_ns != before_ns:
                self._totals.inter_token_latency.observe(now_ns - before_ns, num_alike)
                before_ns, num_alike = sequence.last_token_ns, 0
            num_alike += 1
            spec = sequence.request.spec
            num_output = sequence.append(token, now_ns)
            if num_output == sequence.next_publish or num_output == spec.max_tokens or token in spec.stop_token_ids:
                self._look_at_last(group, sequence, ends)
        self._totals.inter_token_latency.observe(now_ns - before_ns, num_alike)
        return emitted

    def _append(self, group: WorkerGroup, sequence: Sequence, token: int, ends: list[End]) -> None:
        """Append a token to a sequence, and record its end if it is complete."""
        sequence.append(token, self._clock.now_ns)
        self._look_at_last(group, sequence, ends)

    def _look_at_last(self, group: WorkerGroup, sequence: Sequence, ends: list[End]) -> None:
        """Publish the block that a sequence's last token has filled, and record its end if it is complete."""
        spec, num_output, token = sequence.request.spec, len(sequence.output), sequence.output[-1]
        if num_output == sequence.next_publish:
            group.tables.publish_generated(sequence)
        if token in spec.stop_token_ids and num_output >= spec.min_tokens:
            ends.append((sequence, SequenceEnd(FinishReason.STOP, num_output, stop_token_id=token)))
        elif num_output == spec.max_tokens:
            ends.append((sequence, SequenceEnd(FinishReason.LENGTH, num_output)))

    def _note_latency(self, sequence: Sequence, num_tokens: int) -> None:
        """Record the time since the sequence's last token, divided equally among the new ones."""
        if sequence.last_token_ns:
            since_ns = self._clock.now_ns - sequence.last_token_ns
            self._totals.inter_token_latency.observe(since_ns // num_tokens, num_tokens)

    def _note_first_token(self, sequence: Sequence) -> None:
        """Record that a sequence made progress."""
        request, now_ns = sequence.request, self._clock.now_ns
        if request.died_on:
            request.died_on.clear()
        request.num_silences = 0
        if request.times.first_token_ns == 0:
            request.note_first_token(now_ns)
            self._totals.prefix_cache_queries += len(request.spec.prompt)
            self._totals.prefix_cache_hits += request.num_cached_tokens
            self._totals.time_to_first_token.observe(now_ns - request.times.queued_ns)
            self._totals.request_queue_time.observe(request.times.first_scheduled_ns - request.times.queued_ns)

    def _rows(self, step: InFlightStep) -> dict[int, Sequence]:
        rows = {chunk[0]: chunk[1] for chunk in step.context}
        rows.update(zip(step.generation_rows, step.generation, strict=True))
        return rows

    def _keep_outputs(self, step: InFlightStep, event: StepDone) -> None:
        rows = self._rows(step)
        sampled = {chunk[0] for chunk in step.context if chunk[3]}.union(step.generation_rows)
        nums_before: dict[Sequence, int] = {}  # a run has outputs token by token
        for row, data in event.outputs:
            sequence = rows.get(row)
            if sequence is None or sequence.first_ordinal > step.ordinal:
                continue
            offset = len(sequence.output)
            if sequence in step.draft_limits:
                num_before = nums_before.get(sequence, 0)
                offset, nums_before[sequence] = offset + num_before, num_before + 1
            if sequence.request.beams is not None:
                if row in sampled:
                    sequence.request.beams.report(sequence, data)
                    continue
                sequence = sequence.request.sequences[0]  # outputs of the prompt belong to the first sequence
                offset = 0
            sequence.outputs.append(ExtraOutput(offset, data))

    def _failed_rows(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> dict[Sequence, Failure]:
        """Return failed sequences, and those that share blocks which a failed one was to compute: they start again."""
        if not event.failures:
            return {}
        rows = self._rows(step)
        failed = {
            rows[row]: failure
            for row, failure in event.failures
            if row in rows and rows[row].first_ordinal <= step.ordinal
        }
        for _, sequence, _, _ in step.context:
            if sequence in failed and failed[sequence].code != UNAVAILABLE:
                for sharer in group.sharers(sequence):
                    failed.setdefault(sharer, _SHARES_NOTHING)
        return failed

    def _fail_rows(self, group: WorkerGroup, failed: dict[Sequence, Failure]) -> None:
        for sequence, failure in failed.items():
            request = sequence.request
            is_here = request.group is group
            if is_here and (failure.code != UNAVAILABLE or failure is _SHARES_NOTHING):
                # It may have failed before anything of it was computed.
                for block in sequence.held_blocks:
                    group.prefix_cache.withdraw(block)
            if failure.code == UNAVAILABLE and is_here and sequence.end is None:
                self._try_again(group, request)
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
        """Return the state of some groups, with the counts of the last step."""
        totals = self._totals
        return IterationStats(
            time_ns=time_ns,
            iteration=totals.num_iterations,
            group_id=group_id,
            requests=RequestCounts(
                num_active=self._lifecycle.num_unfinished,
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
        queue_latency_ns=step.queue_latency_ns,
        num_context_requests=len({chunk[1].request for chunk in step.context}),
        num_generation_requests=len(step.generation),
        num_paused_requests=step.num_paused,
        num_context_tokens=sum(chunk[2] for chunk in step.context),
        num_generation_tokens=len(step.generation),
        num_decoded_tokens=num_decoded,
        empty_generation_slots=step.num_empty_slots,
        num_draft_tokens=event.num_draft_tokens,
        num_accepted_tokens=event.num_accepted_tokens,
    )


def kv_stats(groups: list[WorkerGroup]) -> KvStats:
    """Return the block counts of some groups together."""
    blocks = [group.blocks for group in groups]
    return KvStats(
        num_blocks=sum(b.num_blocks for b in blocks),
        num_free=sum(b.num_available for b in blocks),
        num_used=sum(b.num_held for b in blocks),
        num_cached=sum(b.num_cached for b in blocks),
        tokens_per_block=groups[0].tokens_per_block if groups else 0,
        allocated=sum(b.counts.allocated for b in blocks),
        allocated_new=sum(b.counts.allocated_new for b in blocks),
        reused=sum(b.counts.reused for b in blocks),
        missed=sum(b.counts.missed for b in blocks),
        evicted=sum(b.counts.evicted for b in blocks),
    )


def memory_of(groups: list[WorkerGroup]) -> tuple[int, int, int]:
    """Return the bytes that some groups use: (host, device, pinned)."""
    return (
        sum(group.memory[0] for group in groups),
        sum(group.memory[1] for group in groups),
        sum(group.memory[2] for group in groups),
    )


def _runs_problem(step: InFlightStep, event: StepDone) -> str:
    """Return what is wrong with runs and candidates whose total is right; empty if nothing is."""
    if len(event.num_drafts) not in (0, step.num_sampled):
        return f"{len(event.num_drafts)} numbers of drafts for {step.num_sampled} rows"
    num_candidates = start = 0
    counts, drafts = event.num_tokens or [1] * step.num_sampled, event.num_drafts or [0] * step.num_sampled
    for sequence, count, num_drafts in zip(step.sampled(), counts, drafts, strict=True):
        beams = sequence.request.beams
        tokens, start = event.token_ids[start : start + count], start + count
        if num_drafts > step.draft_limits.get(sequence, 0):
            return f"{num_drafts} drafts of a row that may verify {step.draft_limits.get(sequence, 0)}"
        if beams is None:
            if not 1 <= count <= 1 + num_drafts:
                return f"{count} tokens of a row that verified {num_drafts} drafts"
            continue
        num_candidates += count
        if count > beams.search.num_candidates or len(set(tokens)) != count:
            return f"{count} candidates for a beam, which takes {beams.search.num_candidates} different ones"
    if num_candidates != len(event.candidate_log_probs):
        return f"{len(event.candidate_log_probs)} log probabilities for {num_candidates} candidates"
    if not all(map(math.isfinite, event.candidate_log_probs)):
        return "a log probability is not finite"
    return ""


def _note_step(sequence: Sequence, ordinal: int) -> None:
    """Count a step of a sequence that is not planned ahead; others' steps are counted by their tokens."""
    if sequence.waits_for_result:
        sequence.request.count_step(ordinal)
