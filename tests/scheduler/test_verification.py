"""A share of the steps is computed again by another group, before their results are applied."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from midstream.config import SchedulerConfig
from midstream.errors import ConfigError
from protos.status_pb2 import GetCellStatusRequest
from scheduler.core.effects import StepPlan, WorkerWrong
from scheduler.core.kind import Kind
from scheduler.core.request import FinishReason
from scheduler.edge.engine import log_wrong_worker, what_is_verified
from scheduler.edge.metrics import SchedulerCollector
from scheduler.edge.status import CellStatusReport
from scheduler.replay.replay import replay
from scheduler.service import check
from tests.scheduler.harness import Harness
from tests.scheduler.test_recording import RecordedHarness

ALL = 1_000_000


def started(*names: str, verify_ppm: int = ALL) -> Harness:
    """Return a core with these groups; the first request runs on the first one."""
    harness = Harness(verify_ppm=verify_ppm)
    for name in names:
        harness.add_group(name)
    return harness


def submit(harness: Harness, max_tokens: int = 3) -> None:
    harness.submit("r", [500, 501, 502], max_tokens, is_detached=True)


def totals(harness: Harness) -> tuple[int, int, int]:
    found = harness.core.totals
    return found.num_verified_steps, found.num_unverifiable_steps, found.num_wrong_workers


def condemned(harness: Harness) -> dict[str, WorkerWrong]:
    return {effect.group_id: effect for effect in harness.effects if isinstance(effect, WorkerWrong)}


def test_a_token_is_delivered_once_another_group_has_computed_it_again() -> None:
    harness = started("a", "b")
    submit(harness)
    assert harness.turn() == ["+r[0:3]", "r"]  # two steps are in flight
    plans = [effect for effect in harness.effects if isinstance(effect, StepPlan)]
    assert [plan.reports_digests for plan in plans] == [True, True]
    harness.finish_step("a")
    assert harness.tokens == {}
    assert harness.turn() == ["+r?[0:3]"]
    harness.finish_step("a")  # the second step's result waits for the first
    assert harness.tokens == {}
    assert harness.turn() == []
    assert harness.step("b") == ["+r?[0:4]", "r"]
    assert harness.tokens == {("r", 0): [503]}
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert totals(harness) == (3, 0, 0)
    harness.check_is_empty()


def test_later_checks_find_the_blocks_of_earlier_ones() -> None:
    """Blocks have 4 tokens: the checks of tokens 4 to 7 compute [0:4] once, since the last token is always computed."""
    harness = started("a", "b")
    submit(harness, max_tokens=5)
    harness.run()
    checks = [plan for plan in harness.plans if "?" in plan]
    assert checks == ["+r?[0:3]", "+r?[0:4]", "+r?[4:5]", "+r?[4:6]", "+r?[4:7]"]


def wrong_at(harness: Harness, name: str, token: int) -> None:
    harness.groups[name].model.followers[token] = 7


@pytest.mark.parametrize("how", ["token", "logits"])
def test_a_wrong_group_is_held_off_and_its_tokens_are_computed_elsewhere(how: str) -> None:
    harness = started("a", "b", "c")
    submit(harness)
    if how == "token":
        wrong_at(harness, "a", 503)
    else:
        harness.groups["a"].model.digest_shift = 1 << 40
    harness.turn()
    harness.finish_step("a")
    harness.finish_step("a")
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert harness.ended == {"r": FinishReason.LENGTH}
    (found,) = condemned(harness).values()
    assert found.group_id == "a"
    shown = (
        "token 1 of sequence 0 of r is 7 with logits" if how == "token" else "token 0 of sequence 0 of r is 503 with"
    )
    assert shown in found.reason
    assert (found.num_unproved_tokens, found.unproved_requests) == (0, ())
    assert harness.core.totals.num_wrong_workers == 1
    harness.check_is_empty()


def test_a_wrong_checker_is_held_off_and_not_the_group_that_it_checked() -> None:
    harness = started("a", "b", "c")
    wrong_at(harness, "b", 503)
    submit(harness)
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert set(condemned(harness)) == {"b"}
    harness.check_is_empty()


def test_two_groups_that_differ_are_both_held_off_until_one_more_process_starts() -> None:
    harness = started("a", "b")
    wrong_at(harness, "b", 502)
    submit(harness)
    harness.turn()
    harness.step("a")
    harness.step("b")
    assert harness.tokens == {}
    assert set(condemned(harness)) == {"a", "b"}
    # The worker registers again after its epoch has ended; it is the same process, and gets nothing to run.
    for name in "ab":
        incarnation = harness.groups[name].registration.incarnation
        harness.add_group(name, incarnation=incarnation)
        assert harness.group(name).is_held_off
    harness.advance(10_000_000)
    for name in "ab":
        harness.add_group(name, incarnation=77)  # a new process
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert totals(harness)[2] == 2


def test_a_group_alone_gives_its_tokens_unverified() -> None:
    harness = started("a")
    submit(harness)
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert totals(harness) == (0, 3, 0)


def test_results_that_nobody_can_verify_do_not_wait_for_another_event() -> None:
    harness = started("a")
    submit(harness)
    harness.turn()
    harness.finish_step("a")
    harness.finish_step("a")
    assert harness.tokens == {}
    harness.turn()
    assert harness.tokens == {("r", 0): [503, 504]}


def test_a_group_that_is_wrong_decides_nothing_else() -> None:
    """`b` differs in the first of two rows of a check, so its opinion on the second does not count either."""
    harness = started("a", "b", "c")
    harness.submit("q", [300, 301], 3, is_detached=True, num_sequences=2)
    harness.groups["b"].model.digest_shift = 5
    harness.run()
    assert set(condemned(harness)) == {"b"}
    assert harness.tokens == {("q", index): [302, 303, 304] for index in range(2)}
    assert totals(harness)[1] == 0
    harness.check_is_empty()


@pytest.mark.parametrize("other", [{"device": "cuda:0"}, {"kind": Kind(arithmetic="another")}])
def test_groups_whose_bits_may_differ_check_nothing(other: dict[str, Any]) -> None:
    harness = started("a")
    harness.add_group("b", **other)
    submit(harness)
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert not any("?" in plan for plan in harness.plans)


def test_the_share_picks_every_fourth_step() -> None:
    harness = started("a", "b", verify_ppm=ALL // 4)
    submit(harness, max_tokens=12)
    harness.run()
    assert harness.tokens == {("r", 0): list(range(503, 515))}
    verified = [effect.step_id for effect in harness.effects if isinstance(effect, StepPlan) and effect.reports_digests]
    checks = [plan for plan in harness.plans if "?" in plan]
    assert checks == ["+r?[0:6]", "+r?[4:10]", "+r?[8:14]"]
    assert len(verified) == 6
    assert totals(harness) == (3, 0, 0)


def test_tokens_since_the_last_verified_step_are_counted_as_unproved() -> None:
    """Steps 4 and 8 are verified; the group is wrong from its seventh token on, and those after the fourth unproved."""
    harness = started("a", "b", "c", verify_ppm=ALL // 4)
    submit(harness, max_tokens=20)
    harness.turn()
    while len(harness.tokens.get(("r", 0), ())) < 6:
        for group in list(harness.groups.values()):
            if group.plans:
                harness.step(group.name)
    harness.groups["a"].model.digest_shift = 9
    harness.run()
    (found,) = condemned(harness).values()
    assert (found.group_id, found.num_unproved_tokens, found.unproved_requests) == ("a", 3, ("r",))
    assert harness.core.totals.num_unproved_tokens == 3
    assert harness.tokens == {("r", 0): list(range(503, 523))}


def test_groups_that_verify_each_other_do_not_wait_for_each_other() -> None:
    """All rows and blocks are in use on both groups, so checks pause requests."""
    dice = random.Random(5)
    harness = Harness(verify_ppm=ALL, capacity="max_utilization")
    for name in "ab":
        harness.add_group(name, num_blocks=10, max_batch_size=3, max_num_tokens=8)
    for number in range(12):
        harness.submit(f"r{number}", dice.randint(1, 11), dice.randint(1, 12), is_detached=True)
    harness.run(max_steps=20_000)
    assert set(harness.ended.values()) == {FinishReason.LENGTH}
    assert len(harness.ended) == 12
    assert totals(harness)[2] == 0
    assert totals(harness)[0] > 10 * max(totals(harness)[1], 1)
    harness.check_is_empty()


def test_several_sequences_speculation_and_beams() -> None:
    """Beams are not checked, and a verified step verifies no drafts."""
    harness = started("a", "b")
    harness.submit("n", [300, 301], 4, is_detached=True, num_sequences=3)
    harness.submit("d", [400, 401], 6, is_detached=True, num_draft_tokens=3)
    harness.submit("w", [600, 601], 4, is_detached=True, beam_width=2)
    harness.run()
    assert len(harness.ended) == 3
    assert not any(effect.draft_rows for effect in harness.effects if isinstance(effect, StepPlan))
    assert totals(harness)[2] == 0
    harness.check_is_empty()


def test_a_check_moves_to_another_group_if_its_group_is_lost() -> None:
    harness = started("a", "b", "c")
    submit(harness)
    harness.turn()
    harness.step("a")
    (checker,) = (name for name in "bc" if harness.groups[name].plans)
    harness.cut(checker)
    (other,) = {"b", "c"} - {checker}
    assert len(harness.groups[other].plans) == 1
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    assert totals(harness)[1:] == (0, 0)


def test_the_checked_group_may_be_lost() -> None:
    harness = started("a", "b", "c")
    submit(harness)
    harness.turn()
    harness.step("a")
    harness.cut("a")
    harness.run()
    assert harness.tokens == {("r", 0): [503, 504, 505]}
    harness.check_is_empty()


def test_blocks_do_not_pass_from_group_to_group() -> None:
    harness = Harness(verify_ppm=ALL)
    for name in "ab":
        harness.add_group(name, kv_store="shared", has_tiers=True, block_bytes=1)
    submit(harness, max_tokens=9)
    harness.turn()
    while len(harness.tokens.get(("r", 0), ())) < 3:
        for group in list(harness.groups.values()):
            if group.plans:
                harness.step(group.name)
    harness.cut("a")
    harness.run()
    assert not any(effect.adopted_blocks for effect in harness.effects if isinstance(effect, StepPlan))
    assert harness.tokens == {("r", 0): list(range(503, 512))}


def test_a_wrong_worker_is_shown_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    harness = started("a", "b", "c")
    harness.groups["b"].model.digest_shift = 1
    submit(harness)
    harness.run()
    again = harness.groups["b"].registration
    harness.add_group("b", incarnation=again.incarnation)
    status = CellStatusReport(harness.core, Mock(feeds=[]), "cell").answer(GetCellStatusRequest(), harness.now_ns)
    assert {group.group_id: group.is_wrong for group in status.groups} == {"a": False, "b": True, "c": False}
    counters = {
        family.name.rpartition(":")[2]: family.samples[0].value
        for family in SchedulerCollector(harness.core, Mock(), Mock(), Mock()).collect()
        if family.samples
    }
    assert (counters["num_verified_steps"], counters["num_unverifiable_steps"]) == (3, 0)
    assert (counters["num_wrong_workers"], counters["num_unproved_tokens"]) == (1, 0)
    assert counters["num_worker_groups_held_off"] == 1
    log_wrong_worker(condemned(harness)["b"])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        "worker b is held off until its process restarts: wrong results: token 0 of sequence 0 of r is"
    )
    assert line.endswith("0 tokens that it gave since its last verified step were delivered, of the requests (none)")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ((), "nothing can be verified: a is the only worker of its kind"),
        (("b",), "two workers verify each other"),
        (("b", "c"), None),
        (("cuda:0",), "results of worker cuda:0 are not verified"),
    ],
)
def test_what_can_be_verified_is_said_when_a_worker_joins(others: tuple[str, ...], words: str | None) -> None:
    harness = started("a")
    for name in others:
        harness.add_group(name, device=name)
    text = what_is_verified(harness.core.groups[-1], harness.core.groups)
    assert text is None if words is None else (text is not None and words in text)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan")])
def test_the_share_is_checked(share: float) -> None:
    with pytest.raises(ConfigError, match="verify"):
        check(SchedulerConfig(verify=share))


def test_a_recording_with_verification_replays(tmp_path: Path) -> None:
    life = RecordedHarness(tmp_path / "life", capacity="max_utilization", verify_ppm=ALL // 2)
    for name in "abc":
        life.add_group(name)
    for number in range(6):
        life.submit(f"r{number}", 5, 6, is_detached=True)
    life.groups["b"].model.digest_shift = 3
    life.run()
    life.recorder.close()
    assert set(condemned(life)) == {"b"}
    assert replay(tmp_path / "life").difference == ""
