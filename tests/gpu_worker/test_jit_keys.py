"""No kernel is compiled while serving: random steps need only kernels that the warm-up has compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_random_steps_need_no_kernel_that_the_warm_up_did_not() -> None:
    command = [sys.executable, "-m", "tests.gpu_worker.jit_keys"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["new"] == []
    # These are two norms, rotary embedding, KV write, activation and sampling; attention for prompts and for single
    # queries, split and combined; and two kernels for LoRA.
    assert found["warm"] >= 11
