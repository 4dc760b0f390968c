"""All peers get the same tokens, and figures are parsed from their output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.peers import rounds
from benchmarks.peers.peer import (
    ALL_WORKLOADS,
    Figures,
    Paths,
    Request,
    Runner,
    Step,
    Workload,
    parse_figures,
    parse_workload,
    workload_line,
)
from midstream.cli.bench import workloads


@dataclass(frozen=True)
class FakePeer:
    """A peer whose interpreter is a shell script that prints `output` and exits with `code`."""

    script: Path
    name: str = "fake"
    label: str = "Fake"
    workloads: Sequence[str] = ("single",)

    def python(self, paths: Paths) -> Path:
        return self.script

    def steps(self, paths: Paths) -> Sequence[Step]:
        return ()

    def open(self, paths: Paths) -> AbstractContextManager[Runner]:
        raise NotImplementedError


def fake_peer(folder: Path, lines: str) -> FakePeer:
    script = folder / "interpreter"
    script.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
    script.chmod(0o755)
    return FakePeer(script)


LINE = '{"workload": "single", "tokens_per_s": 64.0, "duration_s": 2.0, "ttft_ms": null, "inter_token_ms": [1, 2.5]}'


def test_a_round_has_the_tokens_of_midstream_bench() -> None:
    expected = workloads.single(random.Random(3))
    assert rounds.round_workload("single", 3).requests == (Request(expected.requests[0].token_ids, 128),)


def test_a_round_is_the_same_each_time_and_differs_from_the_next() -> None:
    def prompts(number: int) -> set[tuple[int, ...]]:
        return {it.token_ids for name in ALL_WORKLOADS for it in rounds.round_workload(name, number).requests}

    assert prompts(0) == prompts(0)
    assert prompts(0).isdisjoint(prompts(1))
    assert prompts(0).isdisjoint(it.token_ids for it in rounds.warm_up().requests)


def test_a_quick_round_has_a_quarter_of_the_requests() -> None:
    whole, quick = (rounds.round_workload("mixed", 0, is_quick=is_quick) for is_quick in (False, True))
    assert [it.token_ids for it in quick.requests] == [it.token_ids for it in whole.requests]
    assert {it.max_tokens for it in quick.requests} == {32}
    assert len(rounds.round_workload("prefill", 0, is_quick=True).requests) == 4
    assert rounds.round_workload("single", 0, is_quick=True) == rounds.round_workload("single", 0)


@pytest.mark.parametrize("name", ALL_WORKLOADS)
def test_workloads_survive_json(name: str) -> None:
    workload = rounds.round_workload(name, 1)
    assert parse_workload(workload_line(workload)) == workload


def test_throughput_counts_output_or_input() -> None:
    requests = (Request((1, 2, 3), 5), Request((4,), 6))
    assert Workload("mixed", requests, 2, counts_input=False).num_counted_tokens == 11
    assert Workload("prefill", requests, 2, counts_input=True).num_counted_tokens == 4


def test_a_line_of_results_is_read() -> None:
    assert parse_figures(LINE) == Figures("single", 64.0, 2.0, None, (1.0, 2.5))


@pytest.mark.parametrize("line", ["Loading the model", '{"tokens_per_s": 1}', "[]"])
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own, or ours)
        parse_figures(line)


def answering(folder: Path, name: str, times: int = 100) -> FakePeer:
    """Return a peer that records each workload that it receives in `order`, and exits after `times` workloads."""
    note = f"echo {name} >> {folder / 'order'}"
    (folder / name).mkdir()
    lines = f"for i in $(seq {times}); do read -r line || exit 0; {note}; echo '{LINE}'; done"
    return FakePeer(fake_peer(folder / name, f"{lines}; echo 'no AVX-512 here' >&2; exit 3").script, name)


def test_a_peer_stays_loaded_and_reports_its_results(tmp_path: Path) -> None:
    with rounds.PeerProcess(answering(tmp_path, "fake"), Paths(tmp_path, tmp_path)) as process:
        assert process.run(rounds.warm_up()) == parse_figures(LINE)
        assert process.run(rounds.warm_up()) == parse_figures(LINE)


def test_a_peer_that_fails_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    peers = [answering(tmp_path, "one", times=2), answering(tmp_path, "other")]
    loaded: list[str] = []
    measured, failed = rounds.run_rounds(
        peers, ["single"], range(3), Paths(tmp_path, tmp_path), lambda _: None, lambda peer: loaded.append(peer.name)
    )
    assert failed == {"one": "exit status 3: no AVX-512 here"}
    assert loaded == ["one", "other"]
    assert [(it.round, it.peer) for it in measured] == [(0, "one"), (0, "other"), (1, "other"), (2, "other")]


def test_a_peer_killed_by_a_signal_is_reported_as_such(tmp_path: Path) -> None:
    with (
        rounds.PeerProcess(fake_peer(tmp_path, "kill -ILL $$"), Paths(tmp_path, tmp_path)) as process,
        pytest.raises(rounds.PeerFailedError, match=r"^ended by SIGILL: it printed nothing$"),
    ):
        process.run(rounds.warm_up())


def test_peers_take_turns_and_each_begins_a_round(tmp_path: Path) -> None:
    peers = [answering(tmp_path, name) for name in ("first", "second")]
    measured, failed = rounds.run_rounds(
        peers, ["single"], range(2), Paths(tmp_path, tmp_path), lambda _: None, lambda _: None
    )
    assert not failed
    names = ["first", "second", "second", "first"]
    assert [it.peer for it in measured] == names
    assert [it.round for it in measured] == [0, 0, 1, 1]
    assert (tmp_path / "order").read_text(encoding="utf-8").split() == ["first", "second", *names]


def test_no_round_begins_that_would_exceed_the_time_limit(tmp_path: Path) -> None:
    measured, _ = rounds.run_rounds(
        [answering(tmp_path, "fake")],
        ["single"],
        range(9),
        Paths(tmp_path, tmp_path),
        lambda _: None,
        lambda _: None,
        limit_s=0.0,
    )
    assert [it.round for it in measured] == [0]
