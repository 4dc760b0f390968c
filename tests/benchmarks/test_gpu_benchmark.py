"""What of the GPU benchmark can be shown without a GPU: its model, its scheduler, its sums, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
from benchmarks.gpu.report import Report
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.families import describe

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    torch.manual_seed(0)
    decoder = random_decoder(TINY, CPU, torch.float32)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 16, "max_kv_tokens": 1024, "num_threads": 1}
    return random_runner(TINY, decoder, CPU, runs_ahead=request.param, **settings)


def test_requests_together_give_what_each_gives_alone(runner: ModelRunner) -> None:
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
    # q, k, v and output of 4 + 2 + 2 + 4 heads of 16, three matrices of 96, in 2 layers, and the head.
    assert weight_bytes(tiny, 2) == 2 * (2 * (12 * 16 * 64 + 3 * 96 * 64) + 300 * 64)
    assert kv_bytes(tiny, 10, 2) == 2 * 2 * 2 * 16 * 10 * 2
    matrices = 2 * (2 * (12 * 16 * 64 + 3 * 96 * 64)) * 3
    # Three queries see 1 + 2 + 3 keys; a product and a weighing are two operations each, for each number of a head.
    assert prefill_operations(tiny, 1, 3) == matrices + 2 * 4 * 4 * 16 * 6 + 2 * 300 * 64


def test_the_8b_model_has_8_billion_weights() -> None:
    assert weight_bytes(describe(CONFIG_8B), 1) + 128256 * 4096 == pytest.approx(8.03e9, rel=1e-3)


def test_limits_and_what_misses_them(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(1.0)
    report.note("device", "none")
    report.at_least("decode", 0.81, 0.80)
    report.at_most("gap", 0.031, 0.03)
    report.error("norm", float("nan"), 1e-3)
    report.times("ratio", 5.0, 5.0)
    report.failed("prefill", "no time left")
    assert [row.is_within for row in report.rows] == [None, True, False, False, True, False]
    assert report.num_missed == 3
    assert "| gap | 3.1% | ≤ 3% | MISSED |" in report.table()
    assert capsys.readouterr().out.count("MISSED") == 3


def test_it_needs_neither_grpc_nor_zeromq() -> None:
    # torch, Triton and transformers bring the rest that it imports.
    program = """
import sys

class Absent:
    names = {"grpc", "google", "zmq", "psutil", "gguf", "prometheus_client", "grpc_health", "pytest", "hypothesis"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import benchmarks.gpu.__main__, benchmarks.gpu.checks, benchmarks.gpu.measurements, benchmarks.gpu.against_transformers
import gpu_worker.model_runner, gpu_worker.models.loader, midstream.config, midstream.model.folder
assert "grpc" not in sys.modules and "google.protobuf" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
