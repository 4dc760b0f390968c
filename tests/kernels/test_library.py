"""Selection and self-check of the CPU kernel builds."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import build as build_module
from kernels.build import ISA_NEEDS, build, builds_for
from kernels.cpu import Library, load_library, loading
from kernels.cpu.self_check import find_difference


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    loading._load.cache_clear()
    yield
    loading._load.cache_clear()


@pytest.fixture
def avx512_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path where the AVX-512 build is expected, for a test to create it; the AVX2 build is the real one."""
    path = tmp_path / "midstream-avx512-0.so"
    monkeypatch.setattr(loading, "processor_flags", lambda: frozenset(ISA_NEEDS["avx512"] | ISA_NEEDS["avx2"]))
    monkeypatch.setattr(loading, "build", lambda isa: path if isa == "avx512" else build(isa))
    return path


def test_a_build_that_crashes_is_skipped_with_a_warning(avx512_path: Path) -> None:
    program = "__attribute__((constructor)) static void start() { __builtin_trap(); }"
    subprocess.run(["g++", "-shared", "-xc++", "-", "-o", str(avx512_path)], input=program, text=True, check=True)
    with pytest.warns(UserWarning, match="running the avx2 kernels .*avx512: its check ended with SIGILL"):
        chosen = load_library()
    assert chosen is not None
    assert chosen.isa == "avx2"


def test_a_build_with_wrong_results_is_skipped(avx512_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_crash", lambda path, isa: "its Q4_1 linear layer differs from the reference")
    with pytest.warns(UserWarning, match="running the avx2 kernels .*avx512: its Q4_1 linear layer differs"):
        chosen = load_library()
    assert chosen is not None
    assert chosen.isa == "avx2"


def test_a_compilation_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "library_path", lambda isa, flags: tmp_path / "midstream-avx2-0.so")
    monkeypatch.setattr(build_module, "_compile", lambda *arguments: arguments[3].touch())
    monkeypatch.setenv("CXX", "c++")
    with caplog.at_level("INFO", build_module.logger.name):
        build("avx2")
        build("avx2")
    assert [record.message for record in caplog.records] == ["compiling the avx2 kernels once, for a minute or more"]


def test_the_compilation_of_a_process_that_was_killed_is_used_by_the_next(tmp_path: Path) -> None:
    calls, go_on = tmp_path / "calls", tmp_path / "go_on"
    os.mkfifo(calls)
    os.mkfifo(go_on)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho x > {calls}\nread line < {go_on}\nwhile [ "$1" != -o ]; do shift; done\necho y > "$2"\n'
    )
    compiler.chmod(0o700)
    program = (
        "import pathlib; from kernels import build as module; "
        f"module.library_path = lambda isa, flags: pathlib.Path({str(tmp_path)!r}, 'midstream-avx2-0.so'); "
        "print(module.build('avx2').read_text())"
    )

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "CXX": str(compiler)}
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)

    first = start()
    assert calls.read_text() == "x\n"
    first.kill()
    first.communicate()
    # If the compiler were called again, it would wait for a reader of its fifo.
    second = start()
    go_on.write_text("\n")
    assert second.communicate(timeout=240)[0].strip() == "y"


@pytest.mark.parametrize(("name", "found"), [("pack", "linear layer"), ("decoder_forward", "decoder")])
def test_the_check_detects_skipped_work(name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = Library(build("avx2"), "avx2")
    assert find_difference(lazy) is None
    monkeypatch.setattr(lazy, name, lambda *_: None)
    assert found in str(find_difference(lazy))


def test_a_check_that_passed_is_not_run_again(avx512_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert loading.find_crash(avx512_path, "avx512") is None
    assert loading.find_crash(avx512_path, "avx512") is None
    assert [command[1:] for command in commands] == [["-P", "-m", "kernels.cpu.self_check", str(avx512_path), "avx512"]]


def test_the_build_can_be_selected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_library("reference") is None
        selected = load_library("avx2")
    assert selected is not None
    assert selected.isa == "avx2"
    with pytest.warns(UserWarning, match="PyTorch reference .*neon: not an instruction set of this architecture"):
        assert load_library("neon") is None


def test_setup_builds_for_the_processor() -> None:
    assert builds_for(ISA_NEEDS["amx"] | ISA_NEEDS["avxvnni"]) == ["avx512", "avx2"]
    assert builds_for(ISA_NEEDS["avxvnni"]) == ["avxvnni", "avx2"]
    assert builds_for(ISA_NEEDS["avx2"]) == builds_for(frozenset()) == ["avx2"]
