"""Verification: a share of the steps is computed again by another group, before their results are applied.

1. A step is picked when it is planned (`WorkerGroup.verifies_next_step`). It reports digests of its logits.
2. Its result is held back (`holds_back`), and with it the results of the group's later steps. Each of its sampled rows
   becomes a *check*: a request with the known tokens that computes only the next one.
3. The next turn sends the checks to other groups of the same kind, in steps of their own (`advance`). These are
   planned, and their rows and blocks released, at once; they are in addition to the group's other steps, so that groups
   which verify each other never wait for each other.
4. A check's result (`take`) is a second opinion on the row: a token and a digest. If both are equal, the row is right.
   Otherwise a third group is asked, and the one that disagrees with the two others is wrong; without a third group, or
   if all differ, all who were asked count as wrong.
5. A wrong group is held off, and its requests go on elsewhere with their committed tokens. Once all rows of a step are
   right, its result is applied.

Beams are not checked. A check for which there is no group is given up, and its step is applied and counted as
unverifiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from scheduler.core.capacity_scheduler import next_to_pause
from scheduler.core.effects import Effect
from scheduler.core.events import StepDone
from scheduler.core.failure import UNAVAILABLE
from scheduler.core.in_flight import InFlightStep
from scheduler.core.membership import Membership
from scheduler.core.request import Request, Sequence
from scheduler.core.shared import Shared
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup

# How often a check may be postponed by its worker (until its grammar is compiled) before it is given up.
_MAX_POSTPONEMENTS = 200


@dataclass(frozen=True, slots=True)
class _Opinion:
    """What a group computed for a row; `failure` is the status code if it failed, and `digest` may be missing."""

    group: WorkerGroup
    token: int
    digest: int | None
    failure: int = 0

    def agrees_with(self, other: _Opinion) -> bool:
        if (self.token, self.failure) != (other.token, other.failure):
            return False
        return None in (self.digest, other.digest) or self.digest == other.digest


@dataclass(slots=True, eq=False)
class _Check:
    """A sampled row of a held step.

    Attributes:
        num_output_tokens: Number of the sequence's output tokens before the sampled one.
        opinions: That of the step's group, and those of groups that have computed the row again.
        useless: Ids of groups that could not compute it.
        asked: The epoch of the group that is computing it; 0 if none is.
    """

    sequence: Sequence
    num_output_tokens: int
    opinions: list[_Opinion]
    useless: set[str] = field(default_factory=set)
    asked: int = 0
    num_postponements: int = 0


@dataclass(slots=True, eq=False)
class _HeldStep:
    """A step whose result is held back, and its checks that are open; `num_checks` is their number at the beginning."""

    group: WorkerGroup
    step_id: int
    checks: list[_Check]
    num_checks: int = 0
    is_unverifiable: bool = False

    def __post_init__(self) -> None:
        self.num_checks = len(self.checks)


class Verifier:
    """The steps that are being verified."""

    def __init__(
        self, shared: Shared, membership: Membership, pause: Callable[[WorkerGroup, list[Request]], None]
    ) -> None:
        """Create the object; `pause` is called to release requests whose rows or blocks a check needs."""
        self._membership, self._pause = membership, pause
        self._clock, self._totals = shared.clock, shared.totals
        self._effects: list[Effect] = shared.effects
        self._held: dict[int, _HeldStep] = {}  # by epoch
        self._asked: dict[Sequence, tuple[_HeldStep, _Check]] = {}
        self._num_checks = 0

    @property
    def is_busy(self) -> bool:
        """Whether a step is held back."""
        return bool(self._held)

    def holds_back(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> bool:
        """Return whether a picked step's result must wait; False once all of its rows are right or given up."""
        held = self._held.get(group.epoch)
        if held is None:
            held = self._held[group.epoch] = _HeldStep(group, step.step_id, _checks(group, step, event))
            held.is_unverifiable = _has_beams(step)
        if held.checks:
            return True
        del self._held[group.epoch]
        if held.is_unverifiable:
            self._totals.num_unverifiable_steps += 1
            step.is_verified = False
        elif held.num_checks:
            self._totals.num_verified_steps += 1
        return False

    def settled_groups(self) -> list[WorkerGroup]:
        """Return the groups whose held results may be applied."""
        return [held.group for held in self._held.values() if not held.checks and self._is_current(held.group)]

    def take(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> None:
        """Use the result of a group's step that consists of checks."""
        failures = dict(event.failures)
        place = 0
        for chunk in step.context:
            if chunk.row in failures:
                group.withdraw(chunk.blocks)
            if not chunk.is_last:
                continue
            digest = event.logit_digests[place] if event.logit_digests else None
            token, place = event.token_ids[place], place + 1
            held, check = self._asked.pop(chunk.sequence, (None, None))
            if held is None or check is None or not self._is_current(held.group):
                continue
            check.asked = 0
            if not self._is_current(group):  # an earlier row has shown that it is wrong
                continue
            failure = failures.get(chunk.row)
            if failure is None:
                check.opinions.append(_Opinion(group, token, digest))
                self._judge(held, check)
            elif failure.code == UNAVAILABLE and check.num_postponements < _MAX_POSTPONEMENTS:
                check.num_postponements += 1
            else:
                check.useless.add(group.group_id)

    def advance(self) -> None:
        """Send the open checks to groups that can compute them, and give up those for which there is none."""
        for epoch, held in list(self._held.items()):
            if not self._is_current(held.group):
                del self._held[epoch]
        for sequence, (held, check) in list(self._asked.items()):
            if check.asked not in self._membership.groups or not self._is_current(held.group):
                check.asked = 0
                del self._asked[sequence]
        for held in list(self._held.values()):
            for check in held.checks:
                check.opinions = [opinion for opinion in check.opinions if not _is_wrong(opinion.group)]
            while self._is_current(held.group) and (todo := [check for check in held.checks if not check.asked]):
                group = self._choose(held, todo[0])
                if group is None:
                    self._give_up(held, todo[0])
                else:
                    same = [check for check in todo if not self._has_been_at(check, group)]
                    self._send(group, held, same)

    def _is_current(self, group: WorkerGroup) -> bool:
        return self._membership.groups.get(group.epoch) is group

    def _has_been_at(self, check: _Check, group: WorkerGroup) -> bool:
        return group.group_id in check.useless or any(item.group.group_id == group.group_id for item in check.opinions)

    def _choose(self, held: _HeldStep, check: _Check) -> WorkerGroup | None:
        """Return the group that has least to do for a check; None if no group can compute it."""
        request = Request.check_of(check.sequence, check.num_output_tokens, self._next_ordinal())

        def work(group: WorkerGroup) -> int:
            cost = group.start_cost(request)
            return cost.num_tokens - cost.num_cached_tokens + group.num_context_tokens + len(group.active)

        able = [
            group
            for group in self._membership.groups.values()
            if group.can_verify
            and not group.is_held_off
            and group.kind.agrees_with(held.group.kind)
            and not self._has_been_at(check, group)
            and group.is_large_enough(request)
        ]
        return min(able, key=work) if able else None

    def _next_ordinal(self) -> int:
        """Return a number in place of a request's, which no request has."""
        self._num_checks += 1
        return -self._num_checks

    def _send(self, group: WorkerGroup, held: _HeldStep, checks: list[_Check]) -> None:
        """Send checks to a group, in as few steps as possible."""
        started: list[tuple[Request, _Check]] = []
        for check in checks:
            request = Request.check_of(check.sequence, check.num_output_tokens, self._next_ordinal())
            if not group.is_large_enough(request):
                check.useless.add(group.group_id)
                continue
            if not _fits(group, request):
                self._plan(group, held, started)
                started = []
            while not _fits(group, request):
                paused = next_to_pause(list(group.active), group) if len(group.active) > 1 else None
                if paused is None:
                    check.useless.add(group.group_id)
                    break
                self._pause(group, [paused])
            else:
                group.start(request, 1)
                started.append((request, check))
        self._plan(group, held, started)

    def _plan(self, group: WorkerGroup, held: _HeldStep, started: list[tuple[Request, _Check]]) -> None:
        left = list(started)
        while left:
            step = StepBuilder(group, self._clock, [], is_check=True)
            for request, _ in left:
                step.add_context(request.sequences[0], group.max_num_tokens)
            if step.is_empty:
                break
            self._effects.append(step.finish())
            self._clock.num_steps += 1
            done = [(request, check) for request, check in left if request.sequences[0] not in group.context]
            for request, check in done:
                check.asked = group.epoch
                self._asked[request.sequences[0]] = held, check
            left = [item for item in left if item not in done]
        for _, check in left:
            check.useless.add(group.group_id)
        for request, _ in started:
            # Their rows and blocks may be used again in later steps.
            group.release(request)

    def _judge(self, held: _HeldStep, check: _Check) -> None:
        """Settle a check if there is a majority: those who disagree with it are wrong."""
        opinions = check.opinions
        if len(opinions) == 1:
            return
        for opinion in opinions:
            others = [other for other in opinions if not other.agrees_with(opinion)]
            if len(opinions) - len(others) >= 2:
                held.checks.remove(check)
                for other in others:
                    self._condemn(other, opinion, check)
                return

    def _give_up(self, held: _HeldStep, check: _Check) -> None:
        """Settle a check for which there is no other group."""
        held.checks.remove(check)
        first, *others = check.opinions
        if not others:
            held.is_unverifiable = True
            return
        # Nobody can say which one is right, so none of their tokens is delivered.
        for opinion in check.opinions:
            self._condemn(opinion, first if opinion is not first else others[0], check)

    def _condemn(self, wrong: _Opinion, other: _Opinion, check: _Check) -> None:
        sequence = check.sequence
        what = f"token {check.num_output_tokens} of sequence {sequence.index} of {sequence.request.request_id}"
        values = f"{_value(wrong)}, {_value(other)} on {other.group.group_id}"
        self._membership.condemn(wrong.group, f"wrong results: {what} is {values}")


def _checks(group: WorkerGroup, step: InFlightStep, event: StepDone) -> list[_Check]:
    """Return the checks of a step's rows, except those of beams, postponed ones, and those that were released since."""
    failures = dict(event.failures)
    rows = [chunk.row for chunk in step.context if chunk.is_last] + list(step.generation_rows)
    found = []
    for place, (row, sequence, token) in enumerate(zip(rows, step.sampled(), _first_tokens(step, event), strict=True)):
        failure = failures.get(row)
        is_left_out = sequence.request.beams is not None or sequence.first_ordinal > step.ordinal
        if is_left_out or (failure is not None and failure.code == UNAVAILABLE):
            continue
        digest = event.logit_digests[place] if event.logit_digests and failure is None else None
        opinion = _Opinion(group, token if failure is None else 0, digest, failure.code if failure is not None else 0)
        found.append(_Check(sequence, len(sequence.output), [opinion]))
    return found


def _has_beams(step: InFlightStep) -> bool:
    """Return whether a step has rows that are used but not checked."""
    return any(
        sequence.request.beams is not None and sequence.first_ordinal <= step.ordinal for sequence in step.sampled()
    )


def _first_tokens(step: InFlightStep, event: StepDone) -> Iterator[int]:
    """Yield one token for each sampled row. Only beams have more, since a verified step has no drafts."""
    place = 0
    for count in event.num_tokens or [1] * step.num_sampled:
        yield event.token_ids[place] if count else 0
        place += count


def _is_wrong(group: WorkerGroup) -> bool:
    return group.standing.wrong_incarnation == group.registration.incarnation


def _fits(group: WorkerGroup, request: Request) -> bool:
    cost = group.start_cost(request)
    has_room = cost.num_rows <= group.num_free_rows and cost.num_blocks <= group.blocks.num_available
    return has_room and group.adapters.fits(request.spec)


def _value(opinion: _Opinion) -> str:
    if opinion.failure:
        return f"an error ({opinion.failure})"
    return f"{opinion.token}" if opinion.digest is None else f"{opinion.token} with logits {opinion.digest:016x}"
