"""The kernels compile for GPUs that are not here, with their matrix instructions and within registers and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What one program can have of a multiprocessor, in KiB: A100, H100, B200.
MAX_SHARED_KIB = {80: 163, 90: 227, 100: 227}


@pytest.mark.parametrize("capability", MAX_SHARED_KIB)
def test_kernels_compile(capability: int) -> None:
    cases = ["decode, batch 1", "prefill", "residual norm", "store"]
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu.compiled", f"--capability={capability}", *cases]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = {(one["case"], one["kernel"]): one for one in map(json.loads, result.stdout.splitlines())}
    assert set(found) == {
        ("decode, batch 1", "attend"),
        ("decode, batch 1", "combine"),
        ("prefill", "attend"),
        ("residual norm", "_norm"),
        ("store", "_store"),
    }
    assert all(
        one["num_spills"] == 0 and one["shared_bytes"] <= MAX_SHARED_KIB[capability] * 1024 for one in found.values()
    )
    assert found["prefill", "attend"]["has_hopper_products"] == (capability == 90)
    assert found["prefill", "attend"]["has_matrix_products"]
    assert found["decode, batch 1", "attend"]["has_matrix_products"]
