"""The findings and the advice of `midstream doctor`."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from midstream.cli import doctor, main
from midstream.cli.machine import Machine
from midstream.errors import ExecutionError

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Simulate a processor for which kernels are compiled, instead of inspecting this machine."""
    found = Machine("2.13.0", "", [], 8, "avx2", [])
    monkeypatch.setattr(doctor, "ask_machine", lambda: found)
    return found


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    status = main(["doctor", "--json", *words])
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert status == int(any(item["verdict"] == "fault" for item in found.values()))
    assert all(item["cure"] for item in found.values() if item["verdict"] != "good")
    return found


def test_a_suitable_machine_has_no_faults(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_PORT", "0")
    monkeypatch.setenv("MIDSTREAM_HTTP_PORT", "0")
    found = findings(capsys, "--run-dir", str(tmp_path))
    assert {item["verdict"] for item in found.values()} == {"good"}
    assert "avx2 kernels" in found["processor"]["text"]
    assert "smollm2" in found["model"]["text"]


def test_faults_have_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot() -> Machine:
        raise ExecutionError("ImportError: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "ask_machine", cannot)
    monkeypatch.setattr(doctor, "available_memory", lambda: GIB)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("MIDSTREAM_HTTP_PORT", str(port))
        found = findings(capsys, str(tmp_path / "none"), "--run-dir", str(tmp_path))
    assert "libcudart" in found["worker"]["text"]
    assert "a smaller model" in found["memory"]["cure"]
    assert f"--http-port {port}" in found["ports"]["text"]
    assert "ORG/NAME" in found["model"]["cure"]


def test_missing_kernels_and_unused_gpus_have_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["avx2: no C++ compiler (g++ or clang++) is installed"]
    monkeypatch.setattr(doctor, "ask_machine", lambda: Machine("2.13.0+cpu", "", [], 8, "", reasons))
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if name == "nvidia-smi" else None)
    found = findings(capsys, "--run-dir", str(tmp_path))
    assert found["processor"]["verdict"] == "slow"
    assert "install g++" in found["processor"]["cure"]
    assert "PyTorch build for CUDA" in found["GPU"]["cure"]


def test_a_cgroup_limits_the_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   80 kB\n")
    assert doctor.available_memory(tmp_path) == 80 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("4096\n")
    assert doctor.available_memory(tmp_path) == 80 << 10
    (group / "memory.max").write_text("12288\n")
    assert doctor.available_memory(tmp_path) == 8192
