"""Results of rows that give something else than one token: runs of accepted drafts, candidates for beams, failures.

A speculative sequence's result is a run: the drafts that were accepted and one token more. It counts up to its end,
should that lie within. A beam's result are candidates; once all beams of its request have theirs, the search takes a
step. Both kinds have waited for this, and go on from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.core.effects import BeamsAdvanced, Effect
from scheduler.core.events import StepDone
from scheduler.core.failure import Failure
from scheduler.core.in_flight import InFlightStep
from scheduler.core.request import Request, Sequence, SequenceEnd
from scheduler.core.worker_group import WorkerGroup

End = tuple[Sequence, SequenceEnd]


class Appender(Protocol):
    """Appends single tokens."""

    def append(self, group: WorkerGroup, sequence: Sequence, token: int, ends: list[End]) -> None:
        """Appends a token to a sequence, and notes its end where it is one."""

    def note_first_token(self, sequence: Sequence) -> None:
        """Notes that a sequence made progress."""

    def note_latency(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes the time since the sequence's last token."""


@dataclass(slots=True)
class Taken:
    """What a step gave.

    Attributes:
        emitted: Sequences with new tokens.
        num_rows: Rows that were of use. num_tokens: Tokens that they gave.
    """

    emitted: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    num_tokens: int = 0


def runs_problem(step: InFlightStep, event: StepDone) -> str:
    """What is wrong with runs and candidates, whose total is right; empty when nothing is."""
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


def take_runs(
    group: WorkerGroup,
    step: InFlightStep,
    event: StepDone,
    failed: dict[Sequence, Failure],
    appender: Appender,
    ends: list[End],
    effects: list[Effect],
) -> Taken:
    """Takes in the result of a step row by row; ends are noted, not carried out."""
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
        appender.note_first_token(sequence)
        if request.beams is None:
            request.num_draft_tokens += num_drafts
            request.num_accepted_tokens += count - 1
            _take_run(group, sequence, tokens, appender, ends, taken)
        elif request.beams.take(sequence, list(zip(tokens, log_probs, strict=True))):
            taken.num_tokens += len(request.beams.running)
            _advance(group, request, ends, effects, taken)
    return taken


def _take_run(
    group: WorkerGroup, sequence: Sequence, tokens: list[int], appender: Appender, ends: list[End], taken: Taken
) -> None:
    taken.emitted.append(sequence)
    appender.note_latency(sequence, len(tokens))
    num_ends = len(ends)
    for token in tokens:
        if len(ends) == num_ends:
            appender.append(group, sequence, token, ends)
            taken.num_tokens += 1
    if sequence.waits_for_result and len(ends) == num_ends:
        sequence.num_computed += len(tokens) - 1
        group.resume_generation(sequence)


def _advance(group: WorkerGroup, request: Request, ends: list[End], effects: list[Effect], taken: Taken) -> None:
    beams = request.beams
    assert beams is not None
    beams.advance()
    effects.append(BeamsAdvanced(request, len(beams.search.steps), len(request.sequences[0].outputs)))
    if not beams.search.is_over:
        for lane in beams.running:
            group.resume_generation(lane)
        return
    for sequence, (tokens, end) in zip(request.sequences, beams.ends(len(request.sequences)), strict=True):
        sequence.output = tokens
        if tokens:
            taken.emitted.append(sequence)
        ends.append((sequence, end))


def _note_step(sequence: Sequence, ordinal: int) -> None:
    """Steps of sequences that are not planned ahead are counted here; those of others by their tokens."""
    request = sequence.request
    if sequence.waits_for_result and request.last_ordinal != ordinal:
        request.last_ordinal = ordinal
        request.num_steps += 1
