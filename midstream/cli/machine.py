"""Asks gpu_worker.machine, in a process of its own, what this machine computes with."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields

from midstream.errors import ExecutionError
from midstream.python_process import python_command, python_environment

# A first build of the kernels takes most of it.
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker would compute with; the limits are 0 where they were not measured.

    Attributes:
        cuda: Version of CUDA that PyTorch was built for; empty: none.
        kernels: Instruction set of the CPU kernels that run; empty: none do.
        reasons: Why better kernels do not run.
    """

    torch: str
    cuda: str
    gpus: list[str]
    threads: int
    kernels: str
    reasons: list[str]
    read_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


def ask_machine(*, with_limits: bool = False) -> Machine:
    """Return what a worker would run with.

    Raises:
        ExecutionError: Workers cannot run here; the message ends with the cause.
    """
    command = python_command("gpu_worker.machine", *(["--limits"] if with_limits else []))
    try:
        done = subprocess.run(
            command, env=python_environment(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ExecutionError(f"the kernels were not ready within {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise ExecutionError(done.stderr.strip().rpartition("\n")[2])
    facts = json.loads(done.stdout.splitlines()[-1])
    return Machine(**{field.name: facts[field.name] for field in fields(Machine) if field.name in facts})
