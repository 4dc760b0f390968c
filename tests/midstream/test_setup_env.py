from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.setup_env import CPU_INDEX, SetupError, Steps, has_environment, set_up, torch_source

ROOT = Path(__file__).parents[2]


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_steps_are_numbered_and_their_output_goes_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    steps = Steps(2, log)
    steps.run("First", [script("print('noise')"), script("import sys; print('warning', file=sys.stderr)")])
    steps.run("Second", [])
    printed = capsys.readouterr()
    # If a step takes long, the output also contains indented lines with the elapsed time.
    lines = [re.sub(r"\d+ s$", "N s", line) for line in printed.out.splitlines() if not line.startswith(" ")]
    assert lines == ["[1/2] First", "[1/2] First: N s", "[2/2] Second", "[2/2] Second: N s"]
    assert printed.err == ""
    assert [line for line in log.read_text().splitlines() if not line.startswith("$")] == ["noise", "warning"]


def test_a_step_that_fails_shows_the_end_of_its_output_and_names_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with pytest.raises(SetupError, match=rf"\[1/1\] Build failed with exit status 3.*{log}"):
        Steps(1, log).run("Build", [script("print('no such compiler'); raise SystemExit(3)"), script("print('later')")])
    assert "no such compiler" in capsys.readouterr().err
    assert "later" not in log.read_text()


def test_a_folder_without_an_interpreter_is_not_an_environment(tmp_path: Path) -> None:
    assert not has_environment(tmp_path)
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "python"
    broken.write_text("#!/bin/false\n")
    broken.chmod(0o755)
    assert not has_environment(tmp_path)


def test_pytorch_for_cpus_comes_from_its_own_index_unless_pip_has_another_source() -> None:
    from_index = ["--extra-index-url", CPU_INDEX]
    assert torch_source("global.cert='/etc/ssl/ca.crt'\n:env:.timeout='180'\n", None, has_gpu=False) == from_index
    assert torch_source("", None, has_gpu=True) == []
    for setting in ("global.index-url", "global.extra-index-url", ":env:.find-links", "install.no-index"):
        assert torch_source(f"{setting}='x'\n", None, has_gpu=False) == []


def test_the_index_of_pytorch_can_be_chosen() -> None:
    assert torch_source("global.index-url='x'", "https://mirror/cpu", has_gpu=True) == [
        "--extra-index-url",
        "https://mirror/cpu",
    ]
    assert torch_source("", "", has_gpu=False) == []


def test_what_tests_need_is_not_installed_without_an_environment(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no environment yet; run this command without --tests first"):
        set_up(tmp_path / "venv", ROOT, with_tests=True)
    assert not (tmp_path / "venv").exists()


def test_a_build_with_cuda_on_a_machine_without_a_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Steps, "run", lambda *_: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "/nonexistent")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    set_up(tmp_path, ROOT)
    assert "TORCH_INDEX" not in capsys.readouterr().out
    (packages / "nvidia").mkdir()
    set_up(tmp_path, ROOT)
    assert f"make clean demo TORCH_INDEX={CPU_INDEX}" in capsys.readouterr().out


def test_the_demo_installs_only_what_services_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` adds what tests need, in one step."""
    titles: list[str] = []
    commands: list[str] = []

    def note(_: Steps, title: str, more: Sequence[Sequence[str]]) -> None:
        titles.append(title)
        commands.extend(" ".join(words) for words in more)

    monkeypatch.setattr(Steps, "run", note)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("CXX", "/nonexistent")
    set_up(tmp_path / "venv", ROOT)
    assert len(titles) == 3
    installed = [line for line in commands if f"--editable {ROOT}[" in line]
    assert [line.partition(f"{ROOT}")[2].partition("[")[2] for line in installed if "dev" in line] == []
    assert any("[router,scheduler,detokenizer,worker]" in line for line in installed)
    titles.clear()
    commands.clear()
    set_up(tmp_path / "venv", ROOT, with_tests=True)
    assert titles == ["Install what tests and checks need"]
    assert commands[0].endswith(f"--editable {ROOT}[dev]")


def test_the_pins_admit_every_build_of_pytorch() -> None:
    """Each of PyTorch's CUDA builds requires a specific version of Triton, which is not the newest."""
    pins = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert "torch" in pins
    assert "triton" not in pins
    assert not [name for name in pins if name.startswith(("nvidia-", "cuda-"))]
