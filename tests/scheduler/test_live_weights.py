"""Weights that change under running requests, and pauses of generation."""

from __future__ import annotations

from array import array
from dataclasses import replace

from protos import journal_pb2
from scheduler.core.effects import EpochEnded, KindSet
from scheduler.core.events import (
    AbortRequested,
    GenerationPaused,
    GenerationResumed,
    Recovered,
    WeightsChanged,
    WeightsHashed,
)
from scheduler.core.failure import UNAVAILABLE
from scheduler.core.kind import EarlierKind, Kind
from scheduler.core.pause_mode import PauseMode
from scheduler.core.request import FinishReason, Request
from scheduler.journal.records import add_kind
from scheduler.wire.kinds import earlier_from_proto, kind_from_proto
from tests.scheduler.harness import Harness

OLD = Kind("old", "root-old", "plain")
NEW = Kind("new", "root-new", "plain", "", "step-2")
NEXT = Kind("next", "root-next", "plain", "", "step-3")


def change(harness: Harness, kind: Kind) -> None:
    event = WeightsChanged(harness.now_ns, kind.model_fingerprint, kind.weights_root, kind.weights_version)
    harness.handle(event)


def started(*names: str) -> Harness:
    """Return a harness with these groups of OLD, and a request of which the first group has computed 2 of 6 tokens."""
    harness = Harness(model_fingerprint="old")
    for name in names:
        harness.add_group(name, kind=OLD)
    harness.submit("r", [5, 6, 7], 6)
    harness.turn()
    harness.step(names[0])
    harness.step(names[0])
    assert harness.tokens["r", 0] == [8, 9]
    return harness


def request_of(harness: Harness, request_id: str = "r") -> Request:
    return harness.core.lifecycle.requests[request_id]


def test_a_running_request_continues_under_the_new_weights_from_its_tokens() -> None:
    harness = started("a")
    change(harness, NEW)
    assert [effect.reason for effect in harness.effects if isinstance(effect, EpochEnded)] == [
        "its weights are replaced"
    ]
    harness.add_group("a", kind=NEW)
    assert harness.turn() == ["a: context r[0:5]"] or "r" in harness.plans[-1]
    harness.run()
    assert harness.ended["r"] is FinishReason.LENGTH
    assert harness.tokens["r", 0] == [8, 9, 10, 11, 12, 13]
    request = request_of(harness)
    assert request.kind_parts == ((EarlierKind(OLD, (2,)),), NEW)
    assert request.known_kind.weights_version == "step-2"
    harness.check_is_empty()


def test_each_change_is_recorded_with_its_place_and_committed_before_the_tokens_that_follow() -> None:
    harness = started("a")
    change(harness, NEW)
    harness.add_group("a", kind=NEW)
    harness.turn()
    harness.step("a")
    change(harness, NEXT)
    harness.add_group("a", kind=NEXT)
    harness.run()
    assert request_of(harness).kind_parts == ((EarlierKind(OLD, (2,)), EarlierKind(NEW, (3,))), NEXT)
    kinds = [effect for effect in harness.effects if isinstance(effect, KindSet)]
    assert [(item.kind, item.earlier) for item in kinds] == [
        (OLD, ()),
        (NEW, (EarlierKind(OLD, (2,)),)),
        (NEXT, (EarlierKind(OLD, (2,)), EarlierKind(NEW, (3,)))),
    ]


def test_results_that_come_after_the_change_are_dropped() -> None:
    harness = started("a")
    group = harness.groups["a"]
    assert group.plans
    change(harness, NEW)
    stale = harness.core.totals.num_stale_messages
    harness.finish_step("a")
    assert harness.core.totals.num_stale_messages == stale + 1
    assert harness.tokens["r", 0] == [8, 9]


def test_a_group_with_old_weights_gets_nothing_to_run_until_it_has_changed_them() -> None:
    harness = started("a", "b")
    change(harness, NEW)
    harness.add_group("b", kind=OLD)
    harness.submit("s", [50, 51], 2)
    harness.turn()
    assert not harness.groups["b"].plans
    assert harness.group("b").is_outdated
    assert harness.group("b").reason_held_off == "it changes its weights"
    harness.add_group("b", kind=NEW)
    harness.run()
    assert {*harness.ended} == {"r", "s"}
    assert harness.group("b").reason_held_off == ""
    # A group may also find out that its weights are the right ones.
    harness.add_group("c", kind=Kind("new", "", "plain"))
    assert harness.group("c").is_outdated
    registration = harness.groups["c"].registration
    harness.handle(WeightsHashed(harness.now_ns, registration.connection, harness.groups["c"].epoch, "root-new"))
    assert not harness.group("c").is_outdated


def test_weights_of_another_model_may_join_only_once_they_are_named() -> None:
    harness = started("a")
    harness.add_group("b", kind=NEW)
    assert [group.group_id for group in harness.core.groups] == ["a"]
    change(harness, NEW)
    harness.add_group("b", kind=NEW)
    assert [group.group_id for group in harness.core.groups] == ["b"]


def test_a_group_may_return_with_the_weights_before_the_last_ones() -> None:
    """A worker that was away during the second change, and has those of the first."""
    harness = started("a")
    change(harness, NEW)
    change(harness, NEXT)
    harness.add_group("a", kind=NEW)
    assert harness.group("a").is_outdated
    harness.add_group("a", kind=NEXT)
    harness.run()
    assert {*harness.ended} == {"r"}


def test_requests_wait_while_workers_change_their_weights() -> None:
    harness = Harness(model_fingerprint="old")
    harness.add_group("a", kind=OLD)
    change(harness, NEW)
    harness.submit("r", [50, 51], 2, is_detached=True)
    for _ in range(4):  # more than the time after which requests fail without a worker
        harness.advance(20_000)
    harness.add_group("a", kind=OLD)  # it was restarted, and is told to change its weights
    harness.turn()
    assert not harness.ended
    harness.add_group("a", kind=NEW)
    harness.run()
    assert {*harness.ended} == {"r"}
    # A worker that does not return has been lost.
    change(harness, NEXT)
    harness.submit("s", [50, 51], 2, is_detached=True)
    harness.advance(700_000)
    assert "s" in harness.ended


def test_a_group_that_has_the_weights_already_is_not_disturbed() -> None:
    harness = started("a")
    epoch = harness.groups["a"].epoch
    change(harness, OLD)
    harness.run()
    assert harness.group("a").epoch == epoch
    assert request_of(harness).kind_parts == ((), OLD)


def test_a_request_without_tokens_has_only_the_new_version() -> None:
    harness = Harness(model_fingerprint="old")
    harness.add_group("a", kind=OLD)
    harness.submit("r", [5, 6, 7], 2)
    harness.turn()
    change(harness, NEW)
    harness.add_group("a", kind=NEW)
    harness.run()
    assert request_of(harness).kind_parts == ((), NEW)
    assert request_of(harness).kind_changed_at == ()


def test_the_place_of_a_change_in_a_beam_search_is_its_number_of_steps() -> None:
    harness = Harness(model_fingerprint="old")
    harness.add_group("a", kind=OLD)
    harness.submit("r", [5, 6, 7], 6, beam_width=2, num_sequences=2)
    harness.turn()
    for _ in range(3):
        harness.step("a")
    beams = request_of(harness).beams
    assert beams is not None
    num_steps = len(beams.search.steps)
    assert num_steps > 0
    change(harness, NEW)
    harness.add_group("a", kind=NEW)
    harness.run()
    assert request_of(harness).kind_parts == ((EarlierKind(OLD, (num_steps, num_steps)),), NEW)


def test_the_parts_survive_the_scheduler() -> None:
    commit = journal_pb2.JournalCommit()
    earlier = (EarlierKind(OLD, (2,)), EarlierKind(NEW, (3,)))
    add_kind(commit, 1, NEXT, (2,), earlier)
    (record,) = journal_pb2.JournalCommit.FromString(commit.SerializeToString()).kinds
    assert earlier_from_proto(record.earlier) == earlier
    assert [item.kind.weights_version for item in record.earlier] == ["", "step-2"]
    first = started("a")
    harness = Harness(model_fingerprint="old")
    spec = request_of(first).spec
    outputs = (array("I", [8, 9, 10]),)
    kind = kind_from_proto(record.kind)
    harness.handle(Recovered(harness.now_ns, spec, outputs, kind=kind, kind_changed_at=(2,), earlier_kinds=earlier))
    assert request_of(harness).kind_parts == (earlier, NEXT)


def test_output_that_is_not_in_the_journal_is_not_repeated_with_other_weights() -> None:
    harness = Harness(model_fingerprint="old")
    spec = request_of(started("a")).spec
    from dataclasses import replace

    spec = replace(spec, tensor_bytes=1)
    harness.handle(Recovered(harness.now_ns, spec, (array("I"),), kind=OLD))
    change(harness, NEW)
    assert harness.ended["r"] is FinishReason.ERROR
    failure = request_of(harness).failure
    assert failure is not None
    assert failure.code == UNAVAILABLE


def pause(harness: Harness, mode: PauseMode) -> None:
    harness.handle(GenerationPaused(harness.now_ns, mode))


def resume(harness: Harness) -> None:
    harness.handle(GenerationResumed(harness.now_ns))


def test_a_pause_that_keeps_blocks_ends_with_the_steps_in_flight() -> None:
    harness = started("a")
    pause(harness, PauseMode.KEEP)
    pauses = harness.core.pauses
    assert pauses.is_paused
    assert not pauses.is_settled
    while harness.groups["a"].plans:
        assert harness.step("a") == []
    assert pauses.is_settled
    num_tokens = len(harness.tokens["r", 0])
    harness.submit("s", [50, 51], 2)
    assert harness.turn() == []
    assert harness.group("a").active
    resume(harness)
    harness.run()
    assert (len(harness.tokens["r", 0]), num_tokens < 6) == (6, True)
    assert request_of(harness).counters.num_preemptions == 0
    assert harness.ended == {"r": FinishReason.LENGTH, "s": FinishReason.LENGTH}
    harness.check_is_empty()


def test_a_pause_that_recomputes_frees_all_blocks() -> None:
    harness = started("a")
    pause(harness, PauseMode.RECOMPUTE)
    assert not harness.group("a").active
    while harness.groups["a"].plans:
        harness.step("a")
    assert harness.core.pauses.is_settled
    resume(harness)
    harness.run()
    assert harness.tokens["r", 0] == [8, 9, 10, 11, 12, 13]
    harness.check_is_empty()


def test_requests_may_finish_before_a_pause_while_new_ones_wait() -> None:
    harness = started("a")
    pause(harness, PauseMode.FINISH)
    harness.submit("s", [50, 51], 2)
    harness.turn()
    assert not harness.core.pauses.is_settled
    harness.run()
    assert harness.ended == {"r": FinishReason.LENGTH}
    assert harness.core.pauses.is_settled
    assert harness.core.lifecycle.num_unfinished == 1
    resume(harness)
    harness.run()
    assert {*harness.ended} == {"r", "s"}
    harness.check_is_empty()


def test_requests_may_be_aborted_by_a_pause() -> None:
    harness = started("a")
    harness.submit("s", [50, 51], 2)
    pause(harness, PauseMode.ABORT)
    assert harness.ended == {"r": FinishReason.ABORT, "s": FinishReason.ABORT}
    harness.submit("t", [60, 61], 2)
    assert harness.turn() == []
    resume(harness)
    harness.run()
    assert harness.ended["t"] is FinishReason.LENGTH


def test_groups_that_have_the_weights_already_take_their_new_name() -> None:
    """An update to the folder with which the workers were started, or to the same weights under another name."""
    harness = Harness(model_fingerprint="old")
    harness.add_group("a", kind=OLD)
    change(harness, replace(OLD, weights_version="step-0"))
    assert harness.group("a").kind.weights_version == "step-0"
    harness.submit("r", [5, 6, 7], 6)
    harness.run()
    assert request_of(harness).known_kind.weights_version == "step-0"
    # The worker itself knows no name, or an earlier one.
    for name in ("", "step-9"):
        harness.add_group("a", kind=replace(OLD, weights_version=name))
        assert harness.group("a").kind.weights_version == "step-0"
    harness.add_group("b", kind=NEW)
    assert harness.group("b").is_outdated
    assert harness.group("b").kind.weights_version == "step-2"


def test_requests_that_end_while_they_are_held_back_are_forgotten() -> None:
    harness = started("a")
    pause(harness, PauseMode.FINISH)
    for number in range(1000):
        harness.submit(f"held-{number}", [5, 6, 7], 6)
        harness.handle(AbortRequested(harness.now_ns, f"held-{number}"))
    assert harness.core.pauses.num_held < 200
