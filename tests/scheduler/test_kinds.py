"""Requests stay on the kind of worker groups on which they started."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.core.effects import KindSet
from scheduler.core.events import AbortRequested, Recovered, WeightsHashed
from scheduler.core.failure import UNAVAILABLE
from scheduler.core.kind import Kind
from scheduler.core.request import FinishReason, Request
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from tests.scheduler.harness import MS, Harness
from tests.scheduler.test_journal import JournaledCore

PLAIN = Kind("print", "", "plain")
INT8 = Kind("print", "", "int8")
WAIT_MS = 10_000


def new_harness(**settings: object) -> Harness:
    return Harness(no_worker_timeout_ns=WAIT_MS * MS, **settings)  # type: ignore[arg-type]


def kinds_set(harness: Harness) -> list[tuple[str, str, tuple[int, ...], bool]]:
    found = [effect for effect in harness.effects if isinstance(effect, KindSet)]
    return [(item.request.request_id, item.kind.arithmetic, item.changed_at, item.has_changed) for item in found]


def request_of(harness: Harness, request_id: str) -> Request:
    return harness.core.lifecycle.requests[request_id]


def started(**settings: object) -> Harness:
    """Return a harness with the group `a`, on which the request `r` has two of six tokens, and `b` of another kind."""
    harness = new_harness(**settings)
    harness.add_group("a", kind=PLAIN)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    harness.step("a")
    harness.step("a")
    harness.add_group("b", kind=INT8)
    assert harness.tokens["r", 0] == [8, 9]
    return harness


def wait(harness: Harness, milliseconds: int) -> None:
    harness.wait_until(harness.now_ns + milliseconds * MS)


def test_kinds_agree_unless_something_known_differs() -> None:
    assert PLAIN.agrees_with(Kind("print", "", "plain", "other words"))
    assert not PLAIN.agrees_with(INT8)
    assert not PLAIN.agrees_with(Kind("other", "", "plain"))
    hashed = Kind("print", "root", "plain")
    assert PLAIN.agrees_with(hashed)
    assert hashed.agrees_with(PLAIN)
    assert not hashed.agrees_with(Kind("print", "another", "plain"))


def test_a_request_waits_for_its_kind_and_continues_on_it() -> None:
    harness = started()
    harness.cut("a")
    wait(harness, WAIT_MS - 1_000)
    assert not harness.groups["b"].plans
    assert harness.core.kind_waits.num_waiting == 1
    harness.add_group("c", kind=Kind("print", "", "plain", "the same in other words"))
    harness.run()
    assert harness.group("c").num_placed == 1
    assert kinds_set(harness) == [("r", "plain", (), False)]
    assert (harness.core.kind_waits.num_waiting, harness.core.totals.num_kind_changes) == (0, 0)
    harness.check_is_empty()


def test_after_the_timeout_it_moves_to_another_kind_and_says_from_which_token_on() -> None:
    harness = started()
    harness.cut("a")
    wait(harness, WAIT_MS)
    harness.run()
    assert harness.group("b").num_placed == 1
    assert kinds_set(harness) == [("r", "plain", (), False), ("r", "int8", (2,), True)]
    request = request_of(harness, "r")
    assert (request.counters.num_kind_changes, harness.core.totals.num_kind_changes) == (1, 1)
    harness.check_is_empty()


def test_the_first_change_is_the_one_that_is_reported() -> None:
    harness = started()
    harness.cut("a")
    wait(harness, WAIT_MS)
    harness.step("b")
    harness.add_group("c", kind=Kind("print", "", "f8"))
    harness.cut("b")
    wait(harness, WAIT_MS)
    harness.run()
    assert kinds_set(harness)[1:] == [("r", "int8", (2,), True), ("r", "f8", (2,), True)]


def test_it_ends_or_waits_if_the_setting_says_so() -> None:
    harness = started(lost_kind="end")
    harness.cut("a")
    wait(harness, WAIT_MS)
    request = request_of(harness, "r")
    assert harness.ended["r"] is FinishReason.ERROR
    assert request.failure is not None
    assert (request.failure.code, "lost_kind" in request.failure.message) == (UNAVAILABLE, True)
    harness = started(lost_kind="wait")
    harness.cut("a")
    wait(harness, 2 * WAIT_MS)
    assert "r" not in harness.ended
    harness.add_group("a", kind=PLAIN)
    harness.run()
    assert harness.ended["r"] is FinishReason.LENGTH


def test_a_request_without_tokens_starts_on_any_kind() -> None:
    harness = new_harness()
    harness.add_group("a", kind=PLAIN)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    harness.cut("a")
    harness.add_group("b", kind=INT8)
    harness.run()
    assert kinds_set(harness) == [("r", "plain", (), False), ("r", "int8", (), False)]
    assert request_of(harness, "r").counters.num_kind_changes == 0


def test_requests_that_wait_for_their_kind_hold_up_no_others() -> None:
    harness = new_harness()
    harness.add_group("a", kind=PLAIN)
    for number in range(20):
        harness.submit(f"r{number}", [5, 6, 7 + number], 6)
    harness.turn()
    harness.step("a")
    harness.add_group("b", kind=INT8)
    harness.leave("a")
    harness.submit("new", [100, 101], 4)
    harness.turn()
    assert [request.request_id for request in harness.group("b").active] == ["new"]
    assert harness.core.kind_waits.num_waiting == 20


def test_a_group_of_the_kind_that_is_too_small_does_not_count() -> None:
    harness = started()
    harness.add_group("small", kind=PLAIN, num_blocks=1)
    harness.cut("a")
    wait(harness, WAIT_MS)
    harness.run()
    assert kinds_set(harness)[1:] == [("r", "int8", (2,), True)]


@pytest.mark.parametrize("capacity", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_each_policy_keeps_requests_on_their_kind(capacity: str) -> None:
    harness = started(capacity=capacity)
    harness.cut("a")
    harness.submit("s", [50, 51], 4)
    wait(harness, 2_000)
    harness.run()
    assert "s" in harness.ended
    assert "r" not in harness.ended
    harness.add_group("a", kind=PLAIN)
    harness.run()
    assert harness.core.totals.num_kind_changes == 0


def test_no_blocks_are_handed_over_to_another_kind() -> None:
    harness = new_harness()
    harness.add_group("p", role="prefill", kv_source="at p", kind=PLAIN)
    decode = harness.add_group("d", role="decode", kind=INT8)
    harness.submit("a", list(range(5, 30)), 6)
    harness.turn()
    harness.step("p")
    assert not decode.fetches


def hash_weights(harness: Harness, name: str, root: str) -> None:
    group = harness.groups[name]
    harness.handle(WeightsHashed(harness.now_ns, group.registration.connection, group.epoch, root, "blocks"))


def test_groups_with_equal_samples_are_told_apart_once_their_weights_are_hashed() -> None:
    harness = new_harness()
    harness.add_group("a", kind=PLAIN)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    harness.step("a")
    harness.add_group("b", kind=PLAIN)
    assert harness.group("a").kind.agrees_with(harness.group("b").kind)
    hash_weights(harness, "a", "one")
    hash_weights(harness, "b", "two")
    assert request_of(harness, "r").known_kind.weights_root == "one"
    harness.cut("a")
    harness.run()
    assert "r" not in harness.ended
    harness.add_group("c", kind=PLAIN)  # may have the weights of `a`, since it has not hashed them
    harness.run()
    assert harness.group("c").num_placed == 1
    assert harness.core.totals.num_kind_changes == 0


def test_a_move_between_groups_that_turn_out_to_differ_is_reported_afterwards() -> None:
    harness = new_harness()
    harness.add_group("a", kind=PLAIN)
    harness.submit("r", [5, 6, 7], 9)
    harness.turn()
    harness.step("a")
    harness.add_group("b", kind=PLAIN)
    old = harness.groups["a"]
    harness.cut("a")
    harness.step("b")
    hash_weights(harness, "b", "two")
    assert harness.core.totals.num_kind_changes == 0
    harness.add_group("a", kind=PLAIN, incarnation=old.registration.incarnation)
    hash_weights(harness, "a", "one")
    request = request_of(harness, "r")
    assert (request.known_kind.weights_root, request.kind_changed_at) == ("two", (0,))
    assert kinds_set(harness)[-1] == ("r", "plain", (0,), True)


def test_a_restarted_scheduler_keeps_the_kind(tmp_path: Path) -> None:
    settings = {"no_worker_timeout_ns": WAIT_MS * MS}
    first = JournaledCore(LogStore(LogFolder(tmp_path / "j")), **settings)
    first.harness.add_group("g", kind=PLAIN)
    first.submit("r", [5, 6, 7], 6)
    first.step()
    first.step()
    first.store.close()
    second = JournaledCore(LogStore(LogFolder(tmp_path / "j")), **settings)
    harness = second.harness
    request = request_of(harness, "r")
    assert request.kind == PLAIN
    harness.tokens["r", 0] = request.sequences[0].output.tolist()
    num_known = len(harness.tokens["r", 0])
    assert num_known
    harness.add_group("g", kind=INT8)
    harness.run()
    assert "r" not in harness.ended
    wait(harness, WAIT_MS)
    harness.run()
    assert kinds_set(harness) == [("r", "int8", (num_known,), True)]
    second.keep(harness.effects)
    second.store.close()
    third = JournaledCore(LogStore(LogFolder(tmp_path / "j")))
    assert request_of(third.harness, "r").kind_changed_at == (num_known,)
    assert request_of(third.harness, "r").counters.num_kind_changes == 1


def test_output_that_is_computed_again_after_a_restart_stays_on_its_kind() -> None:
    """The journal does not store the tokens of requests with tensors, but they may have been shown."""
    first = new_harness()
    first.add_group("a", kind=PLAIN)
    first.submit("r", [5, 6, 7], 6, tensor_bytes=8)
    first.turn()
    spec = request_of(first, "r").spec
    harness = new_harness()
    harness.handle(Recovered(harness.now_ns, spec, (spec.prompt[:0],), kind=PLAIN))
    harness.add_group("b", kind=INT8)
    harness.run()
    assert "r" not in harness.ended
    wait(harness, WAIT_MS)
    harness.run()
    assert request_of(harness, "r").kind_changed_at == (0,)


def test_a_stale_timer_gives_up_no_request_that_found_its_kind_in_between() -> None:
    harness = started()
    harness.cut("a")
    wait(harness, WAIT_MS - 1_000)
    harness.add_group("c", kind=PLAIN)
    harness.turn()
    harness.step("c")
    harness.cut("c")
    wait(harness, WAIT_MS - 1_000)
    assert harness.core.totals.num_kind_changes == 0
    wait(harness, 1_000)
    harness.run()
    assert harness.core.totals.num_kind_changes == 1


def test_requests_that_ended_while_they_waited_are_forgotten() -> None:
    harness = new_harness(lost_kind="wait")
    kinds = {"a": PLAIN, "c": Kind("print", "", "f8")}
    for name, kind in kinds.items():
        harness.add_group(name, kind=kind, num_blocks=1000, max_batch_size=100)
        for number in range(100):
            harness.submit(f"{name}{number}", [5, 6, 7 + number], 6)
        harness.turn()
        harness.step(name)
    harness.add_group("b", kind=INT8)
    harness.leave("a")
    harness.turn()
    assert harness.core.kind_waits.num_waiting == 100
    for number in range(100):
        harness.handle(AbortRequested(harness.now_ns, f"a{number}"))
    harness.leave("c")
    harness.turn()
    assert harness.core.kind_waits.num_waiting == 100
    assert request_of(harness, "a0") not in harness.core.kind_waits
