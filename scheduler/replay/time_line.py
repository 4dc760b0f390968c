"""What a recording holds about one token: its step, the sequences in the same step, and the request's times.

A recording holds what the scheduler's core was told and decided. It has neither the text nor the times at which routers
and detokenizers passed it on.
"""

from __future__ import annotations

from collections.abc import Sequence as TypingSequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Effect, RequestEnded, StepPlan
from scheduler.core.events import (
    AbortRequested,
    Attached,
    Detached,
    Event,
    Recovered,
    StepDone,
    StopWordFound,
    Submitted,
)
from scheduler.core.in_flight import InFlightStep
from scheduler.core.request import Request, Sequence
from scheduler.core.worker_group import WorkerGroup

MISSING = "text, logits, and the times at which routers and detokenizers passed the token on are not in a recording"


@dataclass(frozen=True, slots=True)
class Mate:
    """A sequence in the token's step.

    Attributes:
        num_context_tokens: Number of known tokens that the step computes for it; 0 if it generates.
    """

    request_id: str
    sequence: int
    num_context_tokens: int


@dataclass(frozen=True, slots=True)
class TokenStep:
    """The step that computed the token.

    Attributes:
        num_context_tokens: Number of known tokens that it computed for this sequence; 0 if it only generated.
        num_given: Number of tokens of the sequence that this step's result gave, of which it is one.
        planned_ns: When the step was sent. done_ns: When its result was applied.
        forward_us, waiting_us: As the worker reported them.
    """

    group_id: str
    epoch: int
    step_id: int
    row: int | None
    num_context_tokens: int
    num_given: int
    mates: tuple[Mate, ...]
    planned_ns: int
    done_ns: int
    forward_us: int
    waiting_us: int


@dataclass(slots=True)
class TimeLine:
    """Follows one token of a request through a replay.

    Attributes:
        entries: (time in nanoseconds, what happened), as they were found.
        step: None until the token was computed, and if a recovered request had it already.
        num_cached_tokens: Number of prompt tokens that were in the cache when the request was first scheduled.
    """

    request_id: str
    index: int
    sequence: int = 0
    entries: list[tuple[int, str]] = field(default_factory=list)
    step: TokenStep | None = None
    num_cached_tokens: int = 0
    _before: tuple[WorkerGroup, list[InFlightStep], int] | None = None
    _results: dict[tuple[int, int], StepDone] = field(default_factory=dict)

    @property
    def ordered(self) -> list[tuple[int, str]]:
        """The entries in order of their times."""
        return sorted(self.entries, key=lambda entry: entry[0])

    def to_json(self) -> dict[str, Any]:
        """Return the findings as an object."""
        return {
            "step": None if self.step is None else asdict(self.step),
            "num_cached_tokens": self.num_cached_tokens,
            "time_line": [{"time_ns": time_ns, "event": text} for time_ns, text in self.ordered],
            "missing": MISSING,
        }

    def before(self, core: SchedulerCore, event: Event) -> None:
        """Note the state before an event."""
        self._before = None
        found = self._find(core)
        if found is None or self.step is not None or not isinstance(found.request.group, WorkerGroup):
            return
        group = found.request.group
        if isinstance(event, StepDone) and event.epoch == group.epoch:
            self._results[event.epoch, event.step_id] = event
        # A result may be applied at a later event, when another group has verified it.
        self._before = group, list(group.in_flight), len(found.output)

    def after(self, core: SchedulerCore, event: Event, effects: TypingSequence[Effect]) -> None:
        """Note what an event has caused."""
        found = self._find(core)
        if found is not None:
            self._note_event(event, found.request)
            if self._before is not None:
                self._note_result(event, found, *self._before)
        for effect in effects:
            if isinstance(effect, StepPlan):
                self._note_plan(event, effect)
            elif isinstance(effect, RequestEnded) and effect.request.request_id == self.request_id:
                self._note_end(event, effect.request)

    def _find(self, core: SchedulerCore) -> Sequence | None:
        request = core.lifecycle.requests.get(self.request_id)
        return (
            request.sequences[self.sequence] if request is not None and self.sequence < len(request.sequences) else None
        )

    def _note_event(self, event: Event, request: Request) -> None:
        if isinstance(event, Submitted | Recovered) and event.spec.request_id == self.request_id:
            if isinstance(event, Submitted) and request.times.arrival_ns:
                self.entries.append((request.times.arrival_ns, "arrived at the router"))
            text = "accepted by the scheduler"
            if isinstance(event, Recovered):
                text = f"recovered from the journal with {len(event.outputs[self.sequence])} tokens"
            self.entries.append((event.time_ns, text))
        elif isinstance(event, Attached | Detached | AbortRequested) and event.request_id == self.request_id:
            names = {Attached: "a detokenizer attached", Detached: "a detokenizer detached", AbortRequested: "aborted"}
            self.entries.append((event.time_ns, names[type(event)]))
        elif isinstance(event, StopWordFound) and event.request_id == self.request_id:
            self.entries.append((event.time_ns, f"stop word found after {event.num_tokens} tokens"))

    def _note_plan(self, event: Event, plan: StepPlan) -> None:
        for added in plan.added:
            request = added.sequence.request
            if request.request_id == self.request_id and not request.is_check and added.sequence.index == self.sequence:
                known = len(request.spec.prompt) + added.num_output_tokens
                starts = dict(zip(plan.context_rows, plan.context_starts, strict=True))
                num_cached = starts.get(added.row, 0)
                self.num_cached_tokens = request.counters.num_cached_tokens
                place = f"row {added.row} of {plan.group_id} (epoch {plan.epoch})"
                text = f"placed in {place} with {known} known tokens, {num_cached} of them cached"
                self.entries.append((event.time_ns, f"{text}; step {plan.step_id}"))

    def _note_end(self, event: Event, request: Request) -> None:
        reason = request.sequences[self.sequence].end
        counters = request.counters
        moves = f"{counters.num_preemptions} pauses, {counters.num_recoveries} recoveries"
        self.entries.append((event.time_ns, f"ended: {reason.reason.name.lower() if reason else ''} ({moves})"))

    def _note_result(
        self, event: Event, found: Sequence, group: WorkerGroup, before: list[InFlightStep], num_before: int
    ) -> None:
        if not num_before <= self.index < len(found.output) or self.step is not None:
            return
        left = set(map(id, group.in_flight))
        steps = [step for step in before if id(step) not in left and found in step.sampled()]
        if not steps:
            return
        # Results are applied in order; all but the last one gave at least one token.
        step = steps[min(self.index - num_before, len(steps) - 1)]
        result = self._results.get((group.epoch, step.step_id))
        chunks = {chunk.sequence: chunk.num_tokens for chunk in step.context}
        members = dict.fromkeys([*chunks, *step.generation])
        self.step = TokenStep(
            group.group_id,
            group.epoch,
            step.step_id,
            dict(zip(step.generation, step.generation_rows, strict=True)).get(found, _row_of(step, found)),
            chunks.get(found, 0),
            len(found.output) - num_before,
            tuple(
                Mate(mate.request.request_id, mate.index, chunks.get(mate, 0)) for mate in members if mate is not found
            ),
            step.planned_ns,
            event.time_ns,
            result.forward_us if result is not None else 0,
            result.waiting_us if result is not None else 0,
        )
        self.entries.append((step.planned_ns, f"step {step.step_id} of {group.group_id} sent, for token {self.index}"))
        self.entries.append((event.time_ns, f"token {self.index} received"))


def _row_of(step: InFlightStep, sequence: Sequence) -> int | None:
    return next((chunk.row for chunk in step.context if chunk.sequence is sequence), None)
