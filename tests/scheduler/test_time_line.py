"""What a recording holds about a token: its step, the sequences in the same step, and the request's times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler.core.events import Attached, Detached
from scheduler.replay.replay import main as run_replay
from scheduler.replay.replay import replay
from scheduler.replay.time_line import Mate, TimeLine
from tests.scheduler.test_recording import RecordedHarness, live


def recorded(path: Path) -> RecordedHarness:
    """Record two requests: `a` with 5 prompt tokens, and `b` with 3, which is one step behind."""
    life = RecordedHarness(path, capacity="max_utilization")
    life.add_group("g")
    life.submit("a", 5, 4, is_detached=True)
    life.handle(Attached(life.now_ns, "a"))
    life.turn()
    life.submit("b", 3, 4, is_detached=True)
    life.run()
    life.handle(Detached(life.now_ns, "a"))
    life.recorder.close()
    return life


def test_the_step_of_a_token_and_its_mates(tmp_path: Path) -> None:
    life = recorded(tmp_path / "life")
    first, later = TimeLine("a", 0), TimeLine("a", 3)
    for line in (first, later):
        assert replay(tmp_path / "life", time_line=line).difference == ""
    assert first.step is not None
    assert (first.step.group_id, first.step.step_id, first.step.num_context_tokens) == ("g", 1, 5)
    assert (first.step.num_given, first.step.mates) == (1, ())
    assert later.step is not None
    assert (later.step.num_context_tokens, later.step.row) == (0, first.step.row)
    assert later.step.mates == (Mate("b", 0, 0),)
    assert later.step.planned_ns <= later.step.done_ns <= life.now_ns
    assert later.ordered == sorted(later.ordered, key=lambda entry: entry[0])
    texts = [text for _, text in later.ordered]
    assert texts[1:4] == [
        "accepted by the scheduler",
        "a detokenizer attached",
        f"placed in row {later.step.row} of g (epoch {later.step.epoch}) with 5 known tokens, 0 of them cached; step 1",
    ]
    assert f"step {later.step.step_id} of g sent, for token 3" in texts
    assert texts[-2:] == ["ended: length (0 pauses, 0 recoveries)", "a detokenizer detached"]


def test_a_token_of_a_verified_step(tmp_path: Path) -> None:
    """Its result is applied at the result of the other group."""
    life = RecordedHarness(tmp_path / "life", capacity="max_utilization", verify_ppm=1_000_000)
    for name in "gh":
        life.add_group(name)
    life.submit("a", 5, 4, is_detached=True)
    life.run()
    life.recorder.close()
    line = TimeLine("a", 2)
    assert replay(tmp_path / "life", time_line=line).difference == ""
    assert line.step is not None
    assert (line.step.group_id, line.step.num_context_tokens, line.step.num_given) == ("g", 0, 1)
    assert [text for _, text in line.ordered if text.startswith("placed")] == [
        f"placed in row 0 of g (epoch {line.step.epoch}) with 5 known tokens, 0 of them cached; step 1"
    ]


def test_every_token_of_a_busy_life_has_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With preemptions and two deaths: what was computed again has the step that gave the token."""
    life = live(tmp_path / "life")
    for number in (3, 29, 50):
        request = life.core.lifecycle.requests[f"r{number}"]
        for index in {0, len(request.sequences[0].output) - 1}:
            line = TimeLine(f"r{number}", index)
            replay(tmp_path / "life", time_line=line)
            assert line.step is not None
            assert line.step.done_ns >= line.step.planned_ns
    last = ("--request", "r3", "--at-token", "0")
    assert run_replay([str(tmp_path / "life"), *last]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["group_id"] in "gh"
    assert (found["difference"], found["time_line"][-1]["event"][:5]) == ("", "ended")
    assert run_replay([str(tmp_path / "life"), "--request", "unknown"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] is None
