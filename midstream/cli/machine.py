"""Queries the compute resources of this machine by running gpu_worker.machine in a subprocess."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields

from midstream.errors import ExecutionError
from midstream.python_process import python_command, python_environment

# Most of this time is for the first build of the kernels.
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Compute resources of a worker on this machine; limits that were not measured are 0.

    Attributes:
        cuda: Version of CUDA for which PyTorch was built; empty if none.
        kernels: Instruction set of the CPU kernels in use; empty if none.
        reasons: Why faster kernels are not used.
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
    """Return the resources that a worker would use.

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
