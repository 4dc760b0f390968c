from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest

from scheduler.core.effects import EpochEnded, GroupRefused
from scheduler.core.events import StepDone, Turn, WorkerBeat, WorkerLeft
from scheduler.core.failure import Failure
from scheduler.core.request import FinishReason
from tests.scheduler.harness import MS, Harness


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("tokens_per_block", 6),  # a multiple of 4 would be accepted
        ("tokens_per_block", 0),
        ("vocab_size", 7),
        ("protocol_version", 2),
        ("num_blocks", 0),
        ("max_sequence_length", 0),
        ("max_attention_window", 64),
        ("sink_token_length", 4),
    ],
)
def test_an_incompatible_worker_is_told_the_field(field: str, value: object) -> None:
    harness = Harness(model_fingerprint="ours")
    settings: dict[str, object] = {"model_fingerprint": "ours", field: value}
    harness.add_group(**settings)  # type: ignore[arg-type]
    (refused,) = harness.effects
    assert isinstance(refused, GroupRefused)
    assert refused.field == field
    assert harness.core.groups == []


@pytest.mark.parametrize("windows", [(0,), (8, 9), (8, 0)])
def test_a_worker_that_attends_to_more_than_the_setting_is_refused(windows: tuple[int, ...]) -> None:
    harness = Harness(max_attention_window=8)
    harness.add_group(attention_windows=windows)
    (refused,) = harness.effects
    assert isinstance(refused, GroupRefused)
    assert refused.field == "attention_windows"
    harness.add_group(attention_windows=(8, 3))
    assert len(harness.core.groups) == 1


@pytest.mark.parametrize(
    ("windows", "widest"), [((), 0), ((16, 0, 16), 0), ((16, 8), 16), ((16, 100), 0), ((16, 99), 99)]
)
def test_blocks_are_given_back_behind_the_widest_window_of_all_layers(windows: tuple[int, ...], widest: int) -> None:
    harness = Harness()
    harness.add_group(attention_windows=windows, max_sequence_length=100)
    assert harness.group().registration.attention_window == widest
    assert harness.group().tables.has_window == (widest > 0)


def test_epochs_grow_with_each_registration_and_with_the_scheduler() -> None:
    harness = Harness(scheduler_epoch=7)
    first = harness.add_group().epoch
    second = harness.add_group().epoch
    assert first < second
    assert [group.epoch for group in harness.core.groups] == [second]
    assert Harness(scheduler_epoch=8).add_group().epoch > second


def test_a_silent_worker_is_replaced_and_its_requests_continue_elsewhere() -> None:
    harness = Harness()
    harness.add_group("g")
    harness.submit("a", 3, 6)
    harness.turn()
    harness.step()
    harness.step()
    harness.add_group("h")
    dead = harness.groups["g"]
    harness.kill("g")
    assert [group.group_id for group in harness.core.groups] == []  # `h` was silent for the same time
    harness.add_group("h")
    harness.run()
    harness.check_is_empty()
    assert harness.ended == {"a": FinishReason.LENGTH}
    assert harness.core.lifecycle.requests["a"].counters.num_recoveries == 1
    # Messages from the dead worker are dropped and counted.
    effects = harness.handle(dead.run(harness.now_ns))
    assert [type(effect) for effect in effects] == [EpochEnded]
    assert harness.core.totals.num_stale_messages == 1


def test_heartbeats_keep_a_worker_but_not_one_that_makes_no_progress() -> None:
    harness = Harness(progress_timeout_ns=5_000 * MS)
    group = harness.add_group()
    harness.submit("a", 3, 6)
    harness.turn()
    for _ in range(4):
        harness.advance(1_000)
        harness.handle(WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, 0))
    harness.turn()
    assert len(harness.core.groups) == 1
    harness.advance(1_000)
    assert harness.core.groups == []
    assert harness.core.totals.num_worker_deaths == 1


def test_an_event_from_the_past_does_not_set_the_clock_back() -> None:
    harness = Harness()
    group = harness.add_group()  # after 2 s without a heartbeat, it is lost
    for time_ns in (2_500 * MS, 0):
        harness.handle(WorkerBeat(time_ns, group.registration.connection, group.epoch, 0))
    for time_ns, num_groups in ((4_499 * MS, 1), (4_500 * MS, 0)):
        harness.handle(Turn(time_ns))
        assert len(harness.core.groups) == num_groups


def test_an_idle_worker_needs_no_progress() -> None:
    harness = Harness(progress_timeout_ns=5_000 * MS)
    group = harness.add_group()
    for _ in range(20):
        harness.advance(1_000)
        harness.handle(WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, 0))
    assert len(harness.core.groups) == 1


def test_a_lost_result_ends_the_epoch() -> None:
    harness = Harness(pipeline_depth=1)
    group = harness.add_group()
    harness.submit("a", 3, 6)
    harness.turn()
    group.run(harness.now_ns)  # the result is never delivered
    beat = WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, 1)
    harness.handle(beat)
    assert len(harness.core.groups) == 1  # the result may still be in transit
    harness.handle(beat)
    assert harness.core.groups == []
    harness.add_group()
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH}


@pytest.mark.parametrize("tokens", [[], [1, 2], [1000]])
def test_a_result_of_the_wrong_shape_ends_the_epoch(tokens: list[int]) -> None:
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", 3, 6)
    harness.turn()
    result = group.run(harness.now_ns)
    harness.handle(dataclasses.replace(result, token_ids=tokens))
    assert harness.core.groups == []
    assert harness.tokens == {}
    harness.add_group()
    harness.run()
    harness.check_is_empty()


def test_an_abandoned_group_releases_its_memory() -> None:
    harness = Harness()
    harness.add_group()
    group = weakref.ref(harness.group())
    harness.leave("g")
    harness.effects.clear()
    gc.collect()
    assert group() is None


def test_a_row_that_fails_ends_only_its_own_request() -> None:
    harness = Harness()
    harness.add_group(fail_token=77)
    harness.submit("bad", [1, 77], 4)
    harness.submit("good", 3, 4)
    harness.run()
    harness.check_is_empty()
    assert harness.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert harness.core.lifecycle.requests["bad"].failure == Failure(2, "the row failed")


def die_of(harness: Harness, poison: str) -> None:
    """Run all steps; in each step with the poison request, the worker dies, and another one registers."""
    incarnation = 100
    harness.turn()
    for _ in range(200):
        plans = harness.groups["g"].plans
        if not plans:
            return
        step_id = plans[0].step_id
        step = next(step for step in harness.group().in_flight if step.step_id == step_id)
        if any(request.request_id == poison for request in step.requests()):
            incarnation += 1
            harness.cut("g")
            harness.add_group(incarnation=incarnation)
            harness.wait_until(harness.group().standing.held_until_ns)
            harness.turn()
        else:
            harness.step()


def test_a_request_that_kills_workers_alone_is_ended_after_two() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("poison", 3, 4)
    die_of(harness, "poison")
    assert harness.ended == {"poison": FinishReason.ERROR}
    assert harness.core.totals.num_worker_deaths == 2
    failure = harness.core.lifecycle.requests["poison"].failure
    assert failure is not None
    assert "2 workers" in failure.message


def test_a_request_that_kills_workers_does_not_end_its_neighbours() -> None:
    harness = Harness(max_worker_deaths=2)
    harness.add_group()
    for number in range(5):
        harness.submit(f"good{number}", 3, 6)
        if number == 2:
            harness.submit("poison", 3, 6)
    die_of(harness, "poison")
    harness.check_is_empty()
    assert harness.ended.pop("poison") is FinishReason.ERROR
    assert harness.ended == {f"good{number}": FinishReason.LENGTH for number in range(5)}
    assert harness.core.totals.num_quarantined == 1
    assert harness.core.totals.num_worker_deaths == 3


def test_workers_that_die_of_other_causes_quarantine_nobody() -> None:
    harness = Harness()
    harness.add_group()
    for number in range(5):
        harness.submit(f"r{number}", 3, 12)
    harness.turn()
    for incarnation in range(2, 8):
        harness.cut("g")
        harness.add_group(incarnation=incarnation)
        harness.turn()
        harness.step()  # each worker generates a token before it dies
    harness.run()
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    assert harness.core.totals.num_worker_deaths == 6


def test_a_worker_that_exits_normally_is_not_a_death() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", 3, 6)
    harness.turn()
    harness.leave("g")
    assert harness.core.lifecycle.requests["a"].died_on == ()
    assert harness.core.totals.num_worker_deaths == 0


def test_a_closed_link_is_a_death_that_is_forgiven_when_the_same_worker_comes_back() -> None:
    harness = Harness(max_worker_deaths=2)
    harness.submit("a", 3, 50)
    for _ in range(5):
        harness.add_group("g", incarnation=7)
        harness.turn()
        harness.cut("g")
        assert harness.core.lifecycle.requests["a"].died_on == ("g",)
    harness.add_group("g", incarnation=8)
    harness.turn()
    assert harness.core.lifecycle.requests["a"].died_on == ("g",)
    harness.cut("g")
    assert harness.core.lifecycle.requests["a"].failure is not None
    assert harness.core.totals.num_worker_deaths == 6


def test_a_request_is_blamed_from_the_second_silent_worker_on() -> None:
    harness = Harness(max_worker_deaths=2, orphan_grace_ns=10**18, no_worker_timeout_ns=10**18)
    harness.submit("a", 3, 50)
    request = harness.core.lifecycle.requests["a"]
    blamed = []
    for number in range(3):
        name = f"g{number}"
        harness.add_group(name, incarnation=number + 1)
        harness.turn()
        assert harness.groups[name].plans
        harness.advance(harness.config.worker_timeout_ns // MS + 1)
        blamed.append(list(request.died_on))
    assert blamed == [[], ["g1"], ["g1", "g2"]]
    assert request.failure is not None
    assert harness.core.totals.num_worker_deaths == 3
    # The deaths are attributed to the request, so to none of the groups, not even to the first, which is missing from
    # `died_on`.
    for number in range(3):
        harness.add_group(f"g{number}", incarnation=number + 4)
    assert [group.standing.num_deaths for group in harness.core.groups] == [0, 0, 0]


def test_a_new_link_begins_a_new_epoch() -> None:
    harness = Harness()
    harness.add_group("g", incarnation=7)
    harness.submit("a", 3, 50)
    harness.turn()
    (group,) = harness.core.groups
    effects = harness.handle(WorkerBeat(harness.now_ns, b"another", group.epoch, 0))
    assert effects == [EpochEnded(b"another", group.epoch)]
    harness.add_group("g", incarnation=7)
    (successor,) = harness.core.groups
    assert successor.epoch > group.epoch
    assert harness.core.lifecycle.requests["a"].died_on == ()


def test_a_worker_cannot_impersonate_another() -> None:
    harness = Harness()
    victim, liar = harness.add_group("g"), harness.add_group("h")
    harness.submit("a", 3, 4)
    harness.turn()
    (busy,) = [group for group in (victim, liar) if group.plans]
    other = liar if busy is victim else victim
    link = other.registration.connection
    wrong = StepDone(harness.now_ns, link, busy.epoch, 1, [5, 6, 7])
    assert harness.handle(wrong) == [EpochEnded(link, busy.epoch)]
    harness.handle(WorkerBeat(harness.now_ns, link, busy.epoch, 50))
    harness.handle(WorkerBeat(harness.now_ns, link, busy.epoch, 50))
    harness.handle(WorkerLeft(harness.now_ns, link, busy.epoch))
    assert len(harness.core.groups) == 2
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH}
