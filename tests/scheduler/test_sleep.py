"""Worker groups that sleep, and the requests that wait meanwhile."""

from __future__ import annotations

from typing import Any

from scheduler.core.effects import SleepOrdered
from scheduler.core.events import SleepSet
from scheduler.core.request import FinishReason
from tests.scheduler.harness import MS, Harness

ABLE: Any = {"features": ("sleep",)}
S = 1000 * MS
UNLOAD_NS = 10 * S
PATIENT: Any = {"orphan_grace_ns": 1 << 60}  # requests without a client do not end


def started(**settings: Any) -> Harness:
    """Return a harness with a group, and a request of which it has computed 2 of 6 tokens."""
    harness = Harness(**PATIENT, **settings)
    harness.add_group("g", **ABLE)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    harness.step()
    harness.step()
    assert harness.tokens["r", 0] == [8, 9]
    return harness


def set_sleep(harness: Harness, level: int, *, is_held: bool | None = None) -> None:
    harness.handle(SleepSet(harness.now_ns, level, bool(level) if is_held is None else is_held))
    harness.turn()


def ordered(harness: Harness) -> list[int]:
    """Return the levels that groups were told to have since the last call."""
    levels = [effect.level for effect in harness.effects if isinstance(effect, SleepOrdered)]
    harness.effects.clear()
    return levels


def test_a_running_request_waits_and_continues_at_the_same_token() -> None:
    harness = started()
    set_sleep(harness, 1)
    assert ordered(harness) == [1]
    assert not harness.core.groups
    harness.add_group("g", sleep_level=1, **ABLE)
    harness.submit("late", [1, 2], 3)
    harness.run()
    assert not harness.ended
    harness.wait_until(harness.now_ns + 3600 * S)  # as long as the administrator wants
    assert not harness.ended
    set_sleep(harness, 0)
    assert ordered(harness) == [0]
    harness.run()
    assert not harness.ended  # the group has been told, and is not ready yet
    harness.add_group("g", **ABLE)
    harness.run()
    assert harness.tokens["r", 0] == [8, 9, 10, 11, 12, 13]
    assert {*harness.ended.values()} == {FinishReason.LENGTH}
    assert not ordered(harness)
    harness.check_is_empty()


def test_the_deadline_of_a_request_applies_during_the_sleep() -> None:
    harness = Harness(**PATIENT)
    harness.add_group("g", **ABLE)
    set_sleep(harness, 1)
    harness.submit("r", [5, 6, 7], 6, deadline_ns=harness.now_ns + S)
    harness.wait_until(harness.now_ns + 2 * S)
    assert "r" in harness.ended


def test_a_group_whose_process_was_restarted_is_told_to_sleep_again() -> None:
    harness = started()
    set_sleep(harness, 2)
    harness.add_group("g", sleep_level=2, **ABLE)
    assert ordered(harness) == [2]
    harness.cut("g")
    harness.add_group("g", **ABLE)
    assert ordered(harness) == [2]
    harness.run()
    assert not harness.ended
    assert len(harness.core.groups) == 1  # it leaves on its own


def test_a_group_that_registers_asleep_is_woken() -> None:
    """The scheduler was restarted while it slept because it was idle."""
    harness = Harness(**PATIENT)
    harness.submit("r", [5, 6, 7], 6)
    harness.add_group("g", sleep_level=1, **ABLE)
    assert ordered(harness) == [0]
    harness.run()
    assert not harness.ended
    harness.add_group("g", **ABLE)
    harness.run()
    assert "r" in harness.ended


def test_groups_that_cannot_sleep_are_left_alone() -> None:
    harness = Harness(**PATIENT, unload_after_ns=UNLOAD_NS)
    harness.add_group("g")
    harness.turn()
    harness.wait_until(harness.now_ns + 2 * UNLOAD_NS)
    assert not ordered(harness)
    harness.submit("r", [5, 6, 7], 6)
    harness.run()
    assert "r" in harness.ended


def test_with_the_weights_alone_no_step_runs() -> None:
    harness = started()
    set_sleep(harness, 1)
    harness.add_group("g", sleep_level=1, **ABLE)
    set_sleep(harness, 0, is_held=True)
    harness.add_group("g", **ABLE)
    harness.run()
    assert not harness.ended
    set_sleep(harness, 0)
    harness.run()
    assert harness.tokens["r", 0] == [8, 9, 10, 11, 12, 13]


def test_idle_groups_sleep_and_the_next_request_wakes_them() -> None:
    harness = started(unload_after_ns=UNLOAD_NS)
    harness.run()
    harness.wait_until(harness.now_ns + UNLOAD_NS - S)
    assert not ordered(harness)
    harness.submit("s", [5, 6, 7], 6)
    harness.run()
    harness.wait_until(harness.now_ns + UNLOAD_NS - S)
    assert not ordered(harness)  # the request was the start of another idle time
    harness.wait_until(harness.now_ns + 2 * S)
    assert ordered(harness) == [1]
    harness.add_group("g", sleep_level=1, **ABLE)
    harness.wait_until(harness.now_ns + 100 * S)
    assert not ordered(harness)
    harness.submit("t", [5, 6, 7], 6)
    harness.turn()
    assert ordered(harness) == [0]
    harness.wait_until(harness.now_ns + 100 * S)  # loading takes longer than the timeout without any worker
    assert "t" not in harness.ended
    harness.add_group("g", **ABLE)
    harness.run()
    assert harness.ended["t"] is FinishReason.LENGTH
    harness.check_is_empty()


def test_a_request_that_arrives_before_the_group_sleeps_wakes_it_afterwards() -> None:
    harness = Harness(**PATIENT, unload_after_ns=UNLOAD_NS)
    harness.add_group("g", **ABLE)
    harness.turn()
    harness.wait_until(harness.now_ns + UNLOAD_NS + S)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    assert ordered(harness) == [1, 0]
    harness.add_group("g", sleep_level=1, **ABLE)  # it has not seen the second order
    assert ordered(harness) == [0]
    harness.add_group("g", **ABLE)
    harness.run()
    assert "r" in harness.ended


def test_a_level_that_an_administrator_has_set_does_not_end_with_a_request() -> None:
    harness = Harness(**PATIENT, unload_after_ns=UNLOAD_NS)
    harness.add_group("g", **ABLE)
    set_sleep(harness, 2)
    harness.add_group("g", sleep_level=2, **ABLE)
    harness.submit("r", [5, 6, 7], 6)
    harness.wait_until(harness.now_ns + 5 * UNLOAD_NS)
    assert ordered(harness) == [2]
    assert "r" not in harness.ended
