"""Installation steps run once; a failed step affects only the peers that need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.install import install, pending
from benchmarks.peers.install_requirements import without
from benchmarks.peers.peer import Paths, Runner, Step


@dataclass(frozen=True)
class FakePeer:
    name: str
    wanted: tuple[Step, ...]
    label: str = "Fake"
    workloads: Sequence[str] = ()

    def python(self, paths: Paths) -> Path:
        return Path(sys.executable)

    def steps(self, paths: Paths) -> Sequence[Step]:
        return self.wanted

    def open(self, paths: Paths) -> AbstractContextManager[Runner]:
        raise NotImplementedError


def append_to(file: Path, word: str) -> Step:
    return Step(f"Write {word}", (("/bin/sh", "-c", f"echo {word} >> {file}"),))


def test_an_installation_step_shared_by_two_peers_runs_once(tmp_path: Path) -> None:
    paths, file = Paths(tmp_path / "home", tmp_path), tmp_path / "written"
    shared = append_to(file, "shared")
    peers = [FakePeer("a", (shared, append_to(file, "a"))), FakePeer("b", (shared, append_to(file, "b")))]
    assert install(peers, paths) == {}
    assert install(peers, paths) == {}
    assert file.read_text().split() == ["shared", "a", "b"]
    assert pending(peers, paths) == []


def test_a_changed_step_runs_again(tmp_path: Path) -> None:
    paths, file = Paths(tmp_path / "home", tmp_path), tmp_path / "written"
    for word in ("old", "new"):
        install([FakePeer("a", (append_to(file, word),))], paths)
    assert file.read_text().split() == ["old", "new"]


def test_a_failed_step_stops_only_its_own_peers(tmp_path: Path) -> None:
    paths, file = Paths(tmp_path / "home", tmp_path), tmp_path / "written"
    broken = Step("Fail", (("/bin/sh", "-c", "exit 7"),))
    peers = [
        FakePeer("a", (broken, append_to(file, "a"))),
        FakePeer("b", (broken,)),
        FakePeer("c", (append_to(file, "c"),)),
    ]
    failed = install(peers, paths)
    assert sorted(failed) == ["a", "b"]
    assert "exit status 7" in failed["a"]
    assert file.read_text().split() == ["c"]


def test_requirements_without_extras_and_exclusions() -> None:
    wanted = ["torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchvision", "numpy>=2", 'pandas; extra == "bench"']
    assert without(wanted, ["torch", "torchvision"]) == ["numpy>=2"]
