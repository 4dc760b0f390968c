"""The parts of the GPU benchmark that need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import ranks, steps
from benchmarks.gpu.against_transformers import Request, drive, mixed_workload
from benchmarks.gpu.model import (
    CONFIG_8B,
    TINY,
    kv_bytes,
    prefill_operations,
    random_decoder,
    random_runner,
    weight_bytes,
)
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import Report
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.families import describe
from gpu_worker.models.layers.attention import Attention

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "max_kv_tokens": 1024, "num_threads": 1}
    return random_runner(TINY, decoder, CPU, runs_ahead=request.param, **settings)


def test_concurrent_requests_give_the_output_of_each_alone(runner: ModelRunner) -> None:
    requests = mixed_workload(9, TINY["vocab_size"], longest_prompt=50, longest=20)
    together = drive(runner, requests, max_batch=4, max_tokens=16)
    assert [len(tokens) for tokens in together] == [request.num_tokens for request in requests]
    for request, tokens in zip(requests, together, strict=True):
        runner.clear()
        assert drive(runner, [request], max_batch=4, max_tokens=16) == [tokens]


def test_a_request_of_one_token(runner: ModelRunner) -> None:
    (tokens,) = drive(runner, [Request([5, 6, 7], 1)], max_batch=4, max_tokens=16)
    assert len(tokens) == 1


def test_sums_by_hand() -> None:
    tiny = describe(TINY)
    # Each of the 2 layers has q, k, v and output projections for 4 + 2 + 2 + 4 heads of 16, and three matrices of width
    # 96; the output head follows.
    assert weight_bytes(tiny, 2) == 2 * (2 * (12 * 16 * 64 + 3 * 96 * 64) + 300 * 64)
    assert kv_bytes(tiny, 10, 2) == 2 * 2 * 2 * 16 * 10 * 2
    matrices = 2 * (2 * (12 * 16 * 64 + 3 * 96 * 64)) * 3
    # Three queries attend to 1 + 2 + 3 keys; scores and weighted values each take two operations per element of a head.
    assert prefill_operations(tiny, 1, 3) == matrices + 2 * 4 * 4 * 16 * 6 + 2 * 300 * 64


def test_the_8b_model_has_8_billion_weights() -> None:
    assert weight_bytes(describe(CONFIG_8B), 1) + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)


def test_limits_and_values_that_violate_them(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(1.0)
    report.note("device", "none")
    report.share("decode", 0.81, 0.80)
    report.share("prefill", float("nan"), 0.60)
    report.surplus("gap", 0.031, 0.03)
    report.error("norm", float("nan"), 1e-3)
    report.times("ratio", 5.0, 5.0)
    report.failed("prefill", "no time left")
    assert [row.is_within for row in report.rows] == [None, True, None, False, False, True, False]
    assert report.num_missed == 3
    assert "| gap | +3.1% | ≤ 3% | MISSED |" in report.table()
    assert capsys.readouterr().out.count("MISSED") == 3


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder whose `sitecustomize` replaces the benchmark's parts with parts that pass, crash, hang or raise
    an error, and torch, which takes seconds to import, with a module that finds no GPU.
    """
    (tmp_path / "sitecustomize.py").write_text(FAKE_PARTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


FAKE_PARTS = """
import benchmarks.gpu.parts as parts, os, subprocess, sys, types

sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))

def passes(report):
    report.figures["bandwidth"] = 2.0
    report.share("passes", 0.9, 0.8)

def knows(report):
    report.note("knows", str(report.figures["bandwidth"]))

def crashes(report):
    report.note("before", "kept")
    os.abort()

def hangs(report):
    report.note("begun", "kept")
    # The benchmark's output stays open, and the test fails, unless this process is killed as well.
    subprocess.run(["sleep", "120"])

def raises(report):
    raise ValueError("wrong")

fakes = types.ModuleType("benchmarks.gpu.fakes")
sys.modules["benchmarks.gpu.fakes"] = fakes
parts.PARTS.clear()
for function, limit in ((passes, 60), (crashes, 60), (hangs, 5), (raises, 60), (knows, 60)):
    setattr(fakes, function.__name__, function)
    parts.PARTS[function.__name__] = parts.Part("fakes:" + function.__name__, limit, needs_gpu=False)
"""


def run_benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


def table(output: str) -> list[tuple[str, str]]:
    rows = [line.split("|") for line in output.splitlines() if line.startswith("| ")]
    return [(row[1].strip(), row[2].strip()) for row in rows[2:]]


@pytest.mark.usefixtures("parts")
def test_a_failed_measurement_does_not_affect_others() -> None:
    result = run_benchmark()
    assert result.returncode == 1
    assert table(result.stdout) == [
        ("passes", "90.0%"),
        ("before", "kept"),
        ("crashes", "ended with SIGABRT"),
        ("begun", "kept"),
        ("hangs", "ran past 5 s"),
        ("raises", "ValueError: wrong"),
        ("knows", "2.0"),
    ]


def test_exhaustive_checks_follow_all_measurements() -> None:
    names = list(PARTS)
    assert names[:3] == ["compile", "runner", "ceilings"]
    is_check = [name.startswith("check-") for name in names]
    assert is_check == sorted(is_check)


@pytest.mark.usefixtures("parts")
def test_it_prints_partial_results_at_the_time_limit() -> None:
    result = run_benchmark("--parts", "passes,knows", "--budget-s", "9")
    assert table(result.stdout) == [("passes", "no time left"), ("knows", "no time left")]
    assert run_benchmark("--parts", "passes").returncode == 0
    refused = run_benchmark("--parts", "unknown")
    assert refused.returncode == 2
    assert "unknown part: unknown" in refused.stderr


def test_steps_of_a_tiny_model_run() -> None:
    report = Report(600.0, figures={"bandwidth": 1e12, "matmul": 1e12})
    for measure in (
        steps.measure_decode,
        steps.measure_sampled,
        steps.measure_mixed,
        steps.measure_prefill,
        steps.measure_long_context,
        steps.measure_gap,
        steps.measure_lora,
        steps.measure_expert_lora,
        steps.measure_drafts,
        steps.measure_profile,
    ):
        measure(report)
    assert len(report.rows) == 2 + 10 + 1 + 1 + 3 + 1 + 1 + 2 + 2 + 2 * 8


def test_steps_of_two_ranks_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    command = [sys.executable, "-m", "benchmarks.gpu.part", "ranks", "--seconds", "60", "--rows", str(rows)]
    command += ["--figures", json.dumps({"bandwidth": 1e12, "matmul": 1e12})]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    # The rows are three sizes of sums, the method used for small sums, and two kinds of steps.
    assert len(found) == 3 + 1 + 2, result.stderr
    assert found[3]["measured"] == "through shared memory"
    assert found[4]["name"] == "fraction of the limit: greedy decode on two ranks, batch 1, context 40"
    assert result.returncode == 0


def test_ranks_are_not_measured_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = Report(60.0)
    ranks.measure_ranks(report)
    assert [row.measured for row in report.rows] == ["not measured: they need two GPUs, and this machine has one"]


def test_weights_are_made_on_a_gpu() -> None:
    """Tensors without values stand in for those of a GPU."""
    with FakeTensorMode():
        decoder = random_decoder(TINY, torch.device("cuda:0"), torch.bfloat16)
    attention = decoder._layers[0].attention
    assert isinstance(attention, Attention)
    assert attention.qkv.weight.device.type == "cuda"


def test_it_needs_neither_grpc_nor_zeromq() -> None:
    # The machine must have torch, Triton and transformers, but none of the packages that this program hides.
    program = """
import sys

class Absent:
    names = {"grpc", "google", "zmq", "psutil", "gguf", "prometheus_client", "grpc_health", "pytest", "hypothesis"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import benchmarks.gpu.__main__, benchmarks.gpu.part, benchmarks.gpu.checks, benchmarks.gpu.measurements
import benchmarks.gpu.against_transformers, benchmarks.gpu.steps
import gpu_worker.model_runner, gpu_worker.models.loader, midstream.config, midstream.model.folder
import importlib
from benchmarks.gpu.parts import PARTS
for part in PARTS.values():
    module, _, function = part.function.partition(":")
    assert callable(getattr(importlib.import_module("benchmarks.gpu." + module), function))
assert "grpc" not in sys.modules and "google.protobuf" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
