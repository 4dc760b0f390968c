"""A policy that raises exceptions or answers nonsense costs the service nothing but the requests on which it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from scheduler.core.capacity_scheduler import CapacityScheduler, GuaranteedNoEvict
from scheduler.core.effects import PolicyFailed
from scheduler.core.events import Recovered
from scheduler.core.guarded_scheduler import GuardedScheduler
from scheduler.core.micro_batch_scheduler import InflightFused, MicroBatchScheduler, add_contexts
from scheduler.core.request import FinishReason, Request
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup
from scheduler.list_schedulers import CapacityScheduler as ListPolicy
from scheduler.list_schedulers import ListCapacity, LlmRequest, RequestList
from tests.scheduler.harness import Harness


def harness_of(
    capacity: CapacityScheduler | None = None, micro_batch: MicroBatchScheduler | None = None, **group: Any
) -> Harness:
    built_in = SimpleScheduler(GuaranteedNoEvict(), InflightFused())
    policy = SimpleScheduler(capacity or built_in.capacity_scheduler, micro_batch or built_in.micro_batch_scheduler)
    harness = Harness(scheduler=GuardedScheduler(policy, built_in))
    harness.add_group(**group)
    return harness


def failures(harness: Harness) -> list[PolicyFailed]:
    return [effect for effect in harness.effects if isinstance(effect, PolicyFailed)]


def check_only_b_failed(harness: Harness) -> None:
    assert harness.ended == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.ERROR,
        "c": FinishReason.LENGTH,
        "d": FinishReason.LENGTH,
    }
    failure = harness.core.lifecycle.requests["b"].failure
    assert failure is not None
    assert failure.message == "the scheduler plugin failed on this request (KeyError: 'b')"
    assert harness.core.totals.num_policy_faults > 0
    assert [str(failed.error) for failed in failures(harness)] == ["'b'"]
    harness.check_is_empty()


class ChokesOnStart(GuaranteedNoEvict):
    """Fails on `b` whenever it is asked about it alone."""

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        if request.request_id == "b":
            raise KeyError("b")
        return super().num_sequences_to_start(request, group)


class ChokesOnSelect(GuaranteedNoEvict):
    """Fails on any list that contains `b`."""

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        if any(request.request_id == "b" for request in queued):
            raise KeyError("b")
        return queued


class ChokesOnList(ListPolicy):
    """Fails on any list that contains `b`, once `b` has `after` tokens."""

    after = 0

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        if any(self._is_b(request) and request.num_generated_tokens >= self.after for request in active_requests):
            raise KeyError("b")
        return active_requests, []

    @staticmethod
    def _is_b(request: LlmRequest) -> bool:
        return request.request_id == "b"


class ChokesLater(ChokesOnList):
    """Fails on `b` while it runs."""

    after = 2


POLICIES: list[Callable[[], CapacityScheduler]] = [
    ChokesOnStart,
    ChokesOnSelect,
    lambda: ListCapacity(ChokesOnList),
    lambda: ListCapacity(ChokesLater),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["start", "select", "list", "list later"])
def test_the_request_on_which_a_policy_fails_ends_in_an_error(policy: Callable[[], CapacityScheduler]) -> None:
    harness = harness_of(policy())
    for request_id in "abcd":
        harness.submit(request_id, 5, 4)
    harness.run()
    check_only_b_failed(harness)


def test_a_request_from_the_journal_fails_too() -> None:
    harness = harness_of(ChokesOnStart())
    other = Harness()
    other.submit("b", 5, 4)
    request = other.core.lifecycle.requests["b"]
    harness.prompts["b"] = request.spec.prompt.tolist()
    harness.handle(Recovered(0, request.spec, tuple(sequence.output for sequence in request.sequences)))
    for request_id in "acd":
        harness.submit(request_id, 5, 4)
    harness.run()
    check_only_b_failed(harness)


class RaisesAlways(CapacityScheduler):
    """Fails in each method that gets no single request."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether there is a row."""
        return group.num_free_rows > 0

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Fail."""
        raise ZeroDivisionError("pause")


class RaisesInSteps(MicroBatchScheduler):
    """Fails after it has added some contexts, or generation."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fail."""
        if self._is_late:
            step.add_generation()
        add_contexts(group, step)
        raise ZeroDivisionError("schedule")


class AnswersNonsense(CapacityScheduler):
    """Pauses what does not run, and starts what does not fit."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return True although there may be no room."""
        return True

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return an active request twice."""
        return list(group.active)[:1] * 2


@pytest.mark.parametrize(
    ("capacity", "micro_batch", "error"),
    [
        (RaisesAlways(), None, "pause"),
        (None, RaisesInSteps(is_late=False), "schedule"),
        (None, RaisesInSteps(is_late=True), "schedule"),
        (AnswersNonsense(), None, "requests_to_pause must return active requests, each once"),
    ],
)
def test_without_a_culprit_the_built_in_policy_takes_every_turn(
    capacity: CapacityScheduler | None, micro_batch: MicroBatchScheduler | None, error: str
) -> None:
    harness = harness_of(capacity, micro_batch, num_blocks=8, max_batch_size=2)
    for request_id in "abcd":
        harness.submit(request_id, 5, 6, num_sequences=2)
    harness.run()
    assert harness.ended == dict.fromkeys("abcd", FinishReason.LENGTH)
    assert harness.core.totals.num_policy_faults > 1
    # Each text is reported once.
    assert [str(failed.error) for failed in failures(harness)] == [error]
    harness.check_is_empty()
