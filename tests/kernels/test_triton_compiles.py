"""The kernels compile for a Hopper GPU, with Hopper's matrix instructions and without running out of registers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of a Hopper multiprocessor, what one program can have.
MAX_SHARED_BYTES = 227 * 1024


def test_kernels_compile_for_hopper() -> None:
    cases = ["decode, batch 1", "prefill", "residual norm", "store"]
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu.compiled", *cases]
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
    assert all(one["num_spills"] == 0 and one["shared_bytes"] <= MAX_SHARED_BYTES for one in found.values())
    assert found["prefill", "attend"]["has_hopper_products"]
    assert found["decode, batch 1", "attend"]["has_matrix_products"]
