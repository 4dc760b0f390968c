"""The kernels compile for GPUs that are not installed, use their matrix instructions, and stay within register and
memory limits.

Compiling every case takes about 15 minutes of CPU time, so the results are stored in benchmarks/gpu/compiled.jsonl,
keyed by a hash of each kernel's source, types and constants, for the versions of Triton in TRITON_VERSIONS. After a
change to a kernel, update the file: `python -m benchmarks.gpu.compiled --write --triton VERSION` for each of them. One
case is recompiled here, to show that the file says what the compiler does.
"""

from __future__ import annotations

import ast
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
def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def test_every_case_was_compiled_since_its_kernels_changed() -> None:
    """The check runs in another process, because Triton is in interpreter mode in this one."""
    command = [sys.executable, "-W", "error", "-m", "benchmarks.gpu.compiled", "--check", "gate, up and SiLU, 1 row"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"run python -m benchmarks.gpu.compiled --write, for:\n{result.stderr}"


@pytest.mark.parametrize("capability", MAX_SHARED_KIB)
def test_kernels_use_the_instructions_of_the_device(recorded: list[dict[str, Any]], capability: int) -> None:
    lines = [line for line in recorded if line["capability"] == capability]
    for version in {line["triton"] for line in lines}:
        found = {(line["case"], line["kernel"]): line for line in lines if line["triton"] == version}
        assert found["prefill", "attend"]["has_hopper_products"] == (capability == 90)
        assert found["prefill", "attend"]["has_matrix_products"]
        assert found["decode, batch 64", "decode"]["has_matrix_products"]
        # The kernels of a decode step's layers use programmatic dependent launch; attention for prompts and the cache
        # write without rotary embedding do not.
        layers = [
            ("decode, batch 64", "decode"),
            ("gate, up and SiLU, 1 row", "_linear"),
            ("residual norm", "_norm"),
            ("norm, rotary and store", "_rotate_and_store"),
        ]
        others = [("prefill", "attend"), ("store", "_store")]
        dependent = {case for case in layers + others if found[case]["is_dependent"]}
        assert dependent == (set(layers) if capability >= 90 else set())
        assert all(found[case]["num_spills"] == 0 for case in layers)


def test_all_cases_stay_within_registers_and_shared_memory(recorded: list[dict[str, Any]]) -> None:
    versions = {one["triton"] for one in recorded}
    assert "3.6.0" in versions
    for version in versions:
        assert {one["capability"] for one in recorded if one["triton"] == version} == set(MAX_SHARED_KIB)
    for one in recorded:
        assert one["shared_bytes"] <= MAX_SHARED_KIB[one["capability"]] * 1024, one
        assert one["registers"] * one["num_warps"] * 32 <= NUM_REGISTERS, one
        # These spills cost little compared with the work of a tile. Among the 16-bit cases, heads of 256 and
        # batch-invariant attention have the most spills.
        most = 400 if "f32" in one["case"] else 64
        assert one["num_spills"] <= (3000 if one["case"] in SLOW_IN_FLOAT32 else most), one


def test_kernels_that_may_start_early_wait_first(recorded: list[dict[str, Any]]) -> None:
    """Otherwise they might read memory that the kernel before them has yet to write."""
    dependent = set()
    for path in (ROOT / "kernels" / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "IS_DEPENDENT" in {arg.arg for arg in node.args.args}:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if node.name != "begin":
                    assert ast.unparse(body[0]) == "begin(IS_DEPENDENT)", node.name
                    dependent.add(node.name)
    for line in recorded:
        assert line["is_dependent"] == (line["capability"] >= 90 and line["kernel"] in dependent), line
