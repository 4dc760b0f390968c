"""Fault attribution: a faulty worker is held off without failing any request; a request that crashes workers is
ended.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from scheduler.core.events import StepDone, WorkerBeat, WorkerFailed, WorkerLost
from scheduler.core.failure import UNAVAILABLE, Failure
from scheduler.core.request import FinishReason
from scheduler.core.standing import MAX_PAUSE_NS, NUM_STEPS_ON_TRIAL, Standing
from tests.scheduler.harness import MS, Harness

Lie = Callable[[StepDone], StepDone]

LIES: dict[str, Lie] = {
    "too many tokens": lambda event: dataclasses.replace(event, token_ids=[*event.token_ids, 1]),
    "no tokens": lambda event: dataclasses.replace(event, token_ids=[]),
    "not in the vocabulary": lambda event: dataclasses.replace(event, token_ids=[1000] * len(event.token_ids)),
    "drafts of too many rows": lambda event: dataclasses.replace(event, num_drafts=[0] * (len(event.token_ids) + 1)),
    "drafts of too few rows": lambda event: dataclasses.replace(
        event, num_tokens=[1] * len(event.token_ids), num_drafts=[0] * (len(event.token_ids) - 1 or 2)
    ),
    "runs of too many rows": lambda event: dataclasses.replace(event, num_tokens=[1] * len(event.token_ids) + [0]),
    "drafts that were not allowed": lambda event: dataclasses.replace(
        event, num_tokens=[1] * len(event.token_ids), num_drafts=[1] * len(event.token_ids)
    ),
    "more drafts than were allowed": lambda event: dataclasses.replace(event, num_draft_tokens=1),
    "log probabilities that were not requested": lambda event: dataclasses.replace(event, candidate_log_probs=[-1.0]),
    "outputs of a row that did not run": lambda event: dataclasses.replace(event, outputs=((4000, b""),)),
    "a failed row that did not run": lambda event: dataclasses.replace(event, failures=((4000, Failure(13, "no")),)),
    "a missing block that was not requested": lambda event: dataclasses.replace(event, missing_blocks=frozenset({1})),
    "a step that was not sent": lambda event: dataclasses.replace(event, step_id=event.step_id + 9),
}

# Invalid results for requests with drafts, and for beam searches.
RUN_LIES: dict[str, tuple[dict[str, int], Lie]] = {
    "more accepted tokens than drafts were allowed": (
        {"num_draft_tokens": 2},
        lambda event: dataclasses.replace(event, num_draft_tokens=1, num_accepted_tokens=1 << 31),
    ),
    "more drafts of a row than were allowed": (
        {"num_draft_tokens": 2},
        lambda event: dataclasses.replace(event, num_draft_tokens=0, num_drafts=[3]),
    ),
    "more tokens of a row than drafts": (
        {"num_draft_tokens": 2},
        lambda event: dataclasses.replace(event, token_ids=[1] * 4, num_tokens=[4], num_drafts=[2]),
    ),
    "a row without a token": (
        {"num_draft_tokens": 2},
        lambda event: dataclasses.replace(event, token_ids=[], num_tokens=[0], num_drafts=[2]),
    ),
    "a candidate that is more than certain": (
        {"beam_width": 2},
        lambda event: dataclasses.replace(event, candidate_log_probs=[0.5, *event.candidate_log_probs[1:]]),
    ),
    "a candidate whose log probability is not finite": (
        {"beam_width": 2},
        lambda event: dataclasses.replace(event, candidate_log_probs=[-math.inf, *event.candidate_log_probs[1:]]),
    ),
    "a candidate without a log probability": (
        {"beam_width": 2},
        lambda event: dataclasses.replace(event, candidate_log_probs=event.candidate_log_probs[1:]),
    ),
    "the same candidate twice": (
        {"beam_width": 2},
        lambda event: dataclasses.replace(event, token_ids=[7] * len(event.token_ids)),
    ),
    "too many candidates": (
        {"beam_width": 2},
        lambda event: dataclasses.replace(
            event, token_ids=[*range(100)], num_tokens=[100], candidate_log_probs=[-1.0] * 100
        ),
    ),
}


def run_beside(harness: Harness, fail: Callable[[], None], max_steps: int = 3_000) -> None:
    """Run until all requests have ended; whenever the group `bad` has a step, `fail` makes it fail."""
    harness.turn()
    for _ in range(max_steps):
        if not harness.core.lifecycle.num_unfinished:
            return
        if "bad" in harness.groups and harness.groups["bad"].plans:
            fail()
        elif harness.groups["good"].plans:
            harness.wait_until(harness.now_ns + 25 * MS)
            harness.step("good")
        else:
            harness.wait_until(harness.now_ns + 500 * MS)
        harness.check()
    raise AssertionError("the requests do not finish")


def test_an_invalid_message_of_a_worker_is_no_evidence_against_its_requests() -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", [1, 2], max_tokens=4)
    harness.turn()
    assert group.plans
    harness.handle(WorkerFailed(harness.now_ns, group.registration.connection, "wrong message"))
    assert harness.core.lifecycle.requests["a"].died_on == ()
    assert (harness.core.totals.num_worker_faults, harness.core.totals.num_worker_deaths) == (1, 0)


def test_a_missing_result_is_a_fault_of_the_worker() -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", 3, 40)
    harness.turn()
    finished = WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, last_step_id=1)
    harness.handle(finished)
    assert len(harness.core.groups) == 1  # the heartbeat may have overtaken the result
    harness.handle(finished)
    assert harness.core.groups == []
    assert harness.core.lifecycle.requests["a"].died_on == ()
    assert (harness.core.totals.num_worker_faults, harness.core.totals.num_worker_deaths) == (1, 0)


def test_a_worker_on_trial_runs_one_request_until_it_has_completed_some_steps() -> None:
    harness = Harness()
    group = harness.add_group()
    harness.handle(WorkerFailed(harness.now_ns, group.registration.connection, "wrong message"))
    harness.add_group(incarnation=7)
    for name in "abc":
        harness.submit(name, 3, 40)
    assert harness.turn() == []  # the worker is held off
    harness.wait_until(harness.now_ns + 1_000 * MS)
    for _ in range(NUM_STEPS_ON_TRIAL):
        assert harness.core.num_active_requests == 1
        harness.step()
    assert harness.core.num_active_requests == 3


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_worker_with_invalid_responses_ends_no_request(lie: Lie) -> None:
    harness = Harness(orphan_grace_ns=10**18)
    harness.add_group("good", max_batch_size=4)
    harness.add_group("bad")
    num_lies = 0

    def answer_wrongly() -> None:
        nonlocal num_lies
        num_lies += 1
        harness.handle(lie(harness.groups["bad"].run(harness.now_ns)))
        harness.add_group("bad", incarnation=7)
        harness.turn()

    for number in range(24):
        harness.submit(f"r{number}", 3, 40)
    run_beside(harness, answer_wrongly)
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    assert harness.core.totals.num_worker_faults == num_lies > 1
    assert harness.core.totals.num_worker_deaths == harness.core.totals.num_quarantined == 0
    # The scheduler tried the faulty group less and less often.
    assert harness.group("bad").standing.num_faults == num_lies < 8


@pytest.mark.parametrize(("spec", "lie"), RUN_LIES.values(), ids=RUN_LIES.keys())
def test_invalid_runs_and_candidates_are_faults_of_the_worker(spec: dict[str, int], lie: Lie) -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", 3, 40, **spec)
    harness.turn()
    if "num_draft_tokens" in spec:
        harness.step()  # the first token, from the prompt, has no drafts
    harness.handle(lie(group.run(harness.now_ns)))
    assert harness.core.totals.num_worker_faults == 1
    assert harness.core.groups == []


def test_a_worker_that_dies_at_every_request_ends_no_request() -> None:
    harness = Harness(orphan_grace_ns=10**18)
    harness.add_group("good", max_batch_size=4)
    harness.add_group("bad")
    num_lives = 1

    def die() -> None:
        nonlocal num_lives
        num_lives += 1
        harness.cut("bad")
        harness.add_group("bad", incarnation=1000 + num_lives)
        harness.turn()

    for number in range(24):
        harness.submit(f"r{number}", 3, 40)
    run_beside(harness, die)
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    assert 1 < harness.core.totals.num_worker_deaths < 10
    assert harness.core.totals.num_quarantined == 0


def test_a_request_that_kills_workers_is_ended_and_the_workers_are_exonerated() -> None:
    harness = Harness(orphan_grace_ns=10**18)
    for name in ("one", "two"):
        harness.add_group(name)
    for number in range(6):
        harness.submit(f"good{number}", 3, 30)
    harness.submit("poison", 3, 30)
    harness.turn()
    incarnation = 1000
    for _ in range(2_000):
        busy = [name for name, group in harness.groups.items() if group.plans]
        if not busy and not harness.core.lifecycle.num_unfinished:
            break
        for name in busy:
            step = harness.group(name).in_flight[0]
            if any(request.request_id == "poison" for request in step.requests()):
                incarnation += 1
                harness.cut(name)
                harness.add_group(name, incarnation=incarnation)
                harness.turn()
            elif harness.groups[name].plans:
                harness.step(name)
        if not busy:
            harness.wait_until(harness.now_ns + 500 * MS)
    assert harness.ended.pop("poison") is FinishReason.ERROR
    assert len(harness.ended) == 6
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    assert harness.core.totals.num_quarantined == 1
    assert harness.core.totals.num_worker_deaths <= 4
    assert not any(group.is_held_off for group in harness.core.groups)


def test_a_request_is_not_the_cause_while_another_worker_could_try_it() -> None:
    harness = Harness(orphan_grace_ns=10**18, max_worker_deaths=1)
    for name in ("one", "two"):
        harness.add_group(name)
    harness.cut("two")
    harness.submit("a", 3, 4)
    harness.turn()
    harness.cut("one")
    harness.add_group("one", incarnation=1001)
    harness.turn()
    assert harness.groups["one"].plans
    harness.add_group("two", incarnation=1002)
    harness.cut("one")
    assert harness.core.lifecycle.requests["a"].died_on == ("one", "one")
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH}


def test_a_request_avoids_the_worker_that_died_while_running_it() -> None:
    harness = Harness(orphan_grace_ns=10**18)
    for name in ("one", "two"):
        harness.add_group(name)
    for number in range(3):
        harness.submit(f"r{number}", 3, 40)
    harness.turn()
    first = next(name for name in ("one", "two") if len(harness.group(name).active) == 1)
    (request,) = harness.group(first).active
    harness.handle(WorkerLost(harness.now_ns, harness.groups[first].registration.connection))
    harness.add_group(first, incarnation=1001)  # this group has no work now, and the other one has three requests
    harness.turn()
    assert request.group is not None
    assert request.group.group_id != first


def test_workers_that_a_request_has_killed_are_exonerated() -> None:
    harness = Harness(orphan_grace_ns=10**18, max_worker_deaths=2)
    for name in ("one", "two"):
        harness.add_group(name)
    harness.submit("poison", 3, 4)
    harness.turn()
    for _ in range(2):
        (name,) = (name for name, group in harness.groups.items() if group.plans)
        harness.cut(name)
    assert harness.ended == {"poison": FinishReason.ERROR}
    harness.add_group("one", incarnation=1001)
    harness.submit("a", 3, 4)
    harness.turn()
    harness.cut("one")
    harness.add_group("one", incarnation=1002)
    assert not harness.group("one").is_held_off  # as after its first death


def test_invalid_responses_of_the_only_worker_blame_no_request() -> None:
    harness = Harness(orphan_grace_ns=10**18, no_worker_timeout_ns=5_000 * MS)
    harness.add_group("bad")
    harness.submit("a", 3, 40)
    harness.turn()
    for _ in range(200):
        if harness.ended:
            break
        if harness.groups["bad"].plans:
            harness.handle(dataclasses.replace(harness.groups["bad"].run(harness.now_ns), token_ids=[]))
            harness.add_group("bad", incarnation=7)
        harness.wait_until(harness.now_ns + 500 * MS)
    failure = harness.core.lifecycle.requests["a"].failure
    assert failure is not None
    assert (failure.code, failure.message) == (UNAVAILABLE, "all workers are held off")


def test_the_only_worker_is_blamed_if_it_dies_at_every_request() -> None:
    harness = Harness(orphan_grace_ns=10**18, no_worker_timeout_ns=600_000 * MS)
    harness.add_group("bad")
    for number in range(4):
        harness.submit(f"r{number}", 3, 40)
    harness.turn()
    for incarnation in range(1000, 1060):
        if harness.groups["bad"].plans:
            harness.cut("bad")
            harness.add_group("bad", incarnation=incarnation)
        harness.wait_until(harness.now_ns + 20_000 * MS)
    assert harness.core.totals.num_quarantined <= 1


def test_pauses_double_up_to_a_minute_and_are_forgotten_after_many_good_steps() -> None:
    standing = Standing()
    pauses = []
    for _ in range(8):
        standing.note_fault(0, "wrong")
        pauses.append(standing.held_until_ns // 1_000_000_000)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert standing.held_until_ns == MAX_PAUSE_NS
    assert standing.is_on_trial
    for _ in range(8):
        standing.note_good_step()
    assert not standing.is_on_trial
    for _ in range(248):
        standing.note_good_step()
    assert standing.num_faults == 0


def test_the_first_death_causes_no_backoff_and_a_successful_step_clears_it() -> None:
    standing = Standing()
    for _ in range(5):
        standing.note_death(0, "gone")
        assert not standing.is_held(0)
        standing.note_good_step()
    standing.note_death(0, "gone")
    standing.note_death(0, "gone")
    assert standing.is_held(0)
