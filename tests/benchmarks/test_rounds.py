"""All peers get the same tokens, and what they print comes back as figures."""

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
    read_workloads,
    write_workloads,
)
from midstream.cli.bench import workloads


@dataclass(frozen=True)
class FakePeer:
    """Its interpreter is a shell script that prints `output` and ends with `code`."""

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
    (single,) = rounds.round_workloads(["single"], 3)
    expected = workloads.single(random.Random(3))
    assert single.requests == (Request(expected.requests[0].token_ids, 128),)


def test_a_round_is_the_same_each_time_and_differs_from_the_next() -> None:
    first = rounds.round_workloads(ALL_WORKLOADS, 0)
    assert first == rounds.round_workloads(ALL_WORKLOADS, 0)
    prompts = [
        {it.token_ids for workload in rounds.round_workloads(ALL_WORKLOADS, n) for it in workload.requests}
        for n in (0, 1)
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert prompts[0].isdisjoint(it.token_ids for it in rounds.warm_up().requests)


def test_workloads_survive_json(tmp_path: Path) -> None:
    written = rounds.round_workloads(ALL_WORKLOADS, 1)
    write_workloads(written, tmp_path / "workloads.json")
    assert read_workloads(tmp_path / "workloads.json") == written


def test_throughput_counts_output_or_input() -> None:
    requests = (Request((1, 2, 3), 5), Request((4,), 6))
    assert Workload("mixed", requests, 2, counts_input=False).num_counted_tokens == 11
    assert Workload("prefill", requests, 2, counts_input=True).num_counted_tokens == 4


def test_a_line_of_figures_is_read() -> None:
    assert parse_figures(LINE) == Figures("single", 64.0, 2.0, None, (1.0, 2.5))


@pytest.mark.parametrize("line", ["Loading the model", '{"tokens_per_s": 1}', "[]"])
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own, or ours)
        parse_figures(line)


def test_a_peer_that_ends_well_gives_its_figures(tmp_path: Path) -> None:
    got: list[Figures] = []
    peer = fake_peer(tmp_path, f"echo '{LINE}'")
    assert rounds.run_peer(peer, [], Paths(tmp_path, tmp_path), got.append) == ""
    assert got == [parse_figures(LINE)]


def test_a_peer_that_fails_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path, f"echo '{LINE}'; echo 'no AVX-512 here' >&2; exit 3")
    started: list[int] = []
    measured, failed = rounds.run_rounds(
        [peer],
        ["single"],
        range(3),
        Paths(tmp_path, tmp_path),
        lambda _: None,
        lambda number, _: started.append(number),
    )
    assert failed == {"fake": "exit status 3: no AVX-512 here"}
    assert started == [0]
    assert [it.round for it in measured] == [0]


def test_a_peer_killed_by_a_signal_is_named_so(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path, "kill -ILL $$")
    assert rounds.run_peer(peer, [], Paths(tmp_path, tmp_path), lambda _: None) == "ended by SIGILL: it said nothing"


def test_peers_take_turns(tmp_path: Path) -> None:
    names = []
    peers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        peers.append(FakePeer(fake_peer(tmp_path / name, f"echo '{LINE}'").script, name))
    measured, _ = rounds.run_rounds(
        peers, ["single"], range(2), Paths(tmp_path, tmp_path), lambda it: names.append(it.peer), lambda *_: None
    )
    assert names == ["first", "second", "first", "second"]
    assert [it.round for it in measured] == [0, 0, 1, 1]
