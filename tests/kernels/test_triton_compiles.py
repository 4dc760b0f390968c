"""The kernels compile for GPUs that are not installed, use their matrix instructions, and stay within register and
memory limits.

Compiling every case takes about 15 minutes of CPU time, so the results are stored in benchmarks/gpu/compiled.jsonl,
keyed by a hash of each kernel's source, types and constants, for the installed version of Triton and for the oldest
supported one. After a change to a kernel or to the installed version, update the file: `python -m
benchmarks.gpu.compiled --write`, and the same with `--triton 3.6.0`. A few cases are recompiled here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "gpu" / "compiled.jsonl"
NUM_REGISTERS = 65536  # per multiprocessor
# Shared memory available to one program, in KiB, on A100, H100 and B200.
MAX_SHARED_KIB = {80: 163, 90: 227, 100: 227}
# These cases are slow: ptxas keeps most of their sums in memory.
SLOW_IN_FLOAT32 = {"int8 linear, 64 rows, f32", "grouped gate, up and SiLU, 2048 rows, f32"}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Compile a few cases for every capability, in a process in which Triton is not in interpreter mode."""
    cases = ["decode, batch 1", "gate, up and SiLU, 1 row", "prefill", "residual norm", "store"]
    capabilities = [f"--capability={capability}" for capability in MAX_SHARED_KIB]
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu.compiled", *capabilities, *cases]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("capability", MAX_SHARED_KIB)
def test_kernels_compile(compiled: list[dict[str, Any]], capability: int) -> None:
    found = {(one["case"], one["kernel"]): one for one in compiled if one["capability"] == capability}
    assert set(found) == {
        ("decode, batch 1", "decode"),
        ("gate, up and SiLU, 1 row", "_linear"),
        ("prefill", "attend"),
        ("prefill", "decode"),
        ("residual norm", "_norm"),
        ("store", "_store"),
    }
    assert all(
        one["num_spills"] == 0 and one["shared_bytes"] <= MAX_SHARED_KIB[capability] * 1024 for one in found.values()
    )
    assert found["prefill", "attend"]["has_hopper_products"] == (capability == 90)
    assert found["prefill", "attend"]["has_matrix_products"]
    assert found["decode, batch 1", "decode"]["has_matrix_products"]
    # The kernels of the layers in a decode step are dependent; attention for prompts and the write without rotary
    # embedding are not.
    dependent = {kernel for (_, kernel), one in found.items() if one["is_dependent"]}
    assert dependent == ({"decode", "_linear", "_norm"} if capability >= 90 else set())


def test_every_case_was_compiled_since_its_kernels_changed() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run python -m benchmarks.gpu.compiled --write, for:\n{result.stderr}"


def test_all_cases_stay_within_registers_and_shared_memory() -> None:
    found = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    versions = {one["triton"] for one in found}
    assert "3.6.0" in versions
    for version in versions:
        assert {one["capability"] for one in found if one["triton"] == version} == set(MAX_SHARED_KIB)
    for one in found:
        assert one["shared_bytes"] <= MAX_SHARED_KIB[one["capability"]] * 1024, one
        assert one["registers"] * one["num_warps"] * 32 <= NUM_REGISTERS, one
        # These spills are few compared with the work of a tile. Among the 16-bit cases, heads of 256 and
        # batch-invariant attention have the most spills.
        most = 400 if "f32" in one["case"] else 64
        assert one["num_spills"] <= (3000 if one["case"] in SLOW_IN_FLOAT32 else most), one
