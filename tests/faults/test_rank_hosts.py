"""A worker whose ranks are on two hosts: in network namespaces if this machine allows them, otherwise on one host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.faults.hosts import namespace_command
from tests.faults.rank_hosts import NUM_TOKENS
from tests.gpu_worker.scripted_scheduler import PROMPT
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model
from tests.integration.named_processes import ROOT


def test_ranks_on_two_hosts_give_one_ranks_tokens_and_end_when_cut_off(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama")
    unshare = namespace_command()
    command = [*unshare, sys.executable, "-m", "tests.faults.rank_hosts", str(tmp_path)]
    command += ["--namespaces"] if unshare else []
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = Driver(make_runner(tmp_path, kernels="torch")).run_alone(PROMPT, NUM_TOKENS)
    assert list(map(int, result.stdout.split())) == expected
