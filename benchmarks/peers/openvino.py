"""OpenVINO GenAI in process: its continuous-batching pipeline with prefix caching."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .peer import ALL_WORKLOADS, Figures, Paths, Runner, Step, Workload, export_step, new_environment, pip_install

ENVIRONMENT = "openvino"
CACHE_GB = 2
# Rows of 576 are not a multiple of the usual group size of 128.
_GROUPS = {"int4": ("--group-size", "64")}


@dataclass(frozen=True, slots=True)
class OpenVino:
    """OpenVINO GenAI with one weight format.

    Attributes:
        weights: fp16, int8 or int4, as in the exporter's options.
    """

    weights: str
    workloads: Sequence[str] = ALL_WORKLOADS

    @property
    def name(self) -> str:
        return f"openvino-{self.weights}"

    @property
    def label(self) -> str:
        return f"OpenVINO GenAI, {self.weights}, in process"

    def python(self, paths: Paths) -> Path:
        return paths.python(ENVIRONMENT)

    def steps(self, paths: Paths) -> Sequence[Step]:
        # torchvision is installed as a dependency, but built for another PyTorch: importing it fails, and it is not
        # needed.
        packages = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0")
        install = Step(
            "Install OpenVINO GenAI",
            (
                new_environment(paths, ENVIRONMENT),
                pip_install(paths, ENVIRONMENT, *packages),
                (str(self.python(paths)), "-m", "pip", "uninstall", "--yes", "torchvision"),
            ),
        )
        convert = Step(
            f"Convert the model for OpenVINO, {self.weights}",
            (
                (
                    str(paths.home / ENVIRONMENT / "bin" / "optimum-cli"),
                    *("export", "openvino", "--task", "text-generation-with-past"),
                    *("--weight-format", self.weights, *_GROUPS.get(self.weights, ())),
                    *("--model", str(paths.bf16), str(self._model(paths))),
                ),
            ),
        )
        return (install, export_step(paths), convert)

    def _model(self, paths: Paths) -> Path:
        return paths.home / "models" / self.name

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        import numpy as np
        import openvino
        import openvino_genai as genai

        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GB
        scheduling.enable_prefix_caching = True
        pipeline = genai.ContinuousBatchingPipeline(str(self._model(paths)), scheduling, "CPU")

        def run(workload: Workload) -> Figures:
            prompts = [openvino.Tensor(np.array([it.token_ids], dtype=np.int64)) for it in workload.requests]
            configs = [
                genai.GenerationConfig(max_new_tokens=it.max_tokens, ignore_eos=True, do_sample=False)
                for it in workload.requests
            ]
            start = time.perf_counter()
            results = pipeline.generate(prompts, configs)
            duration = time.perf_counter() - start
            lengths = [len(result.m_generation_ids[0]) for result in results]
            assert lengths == [it.max_tokens for it in workload.requests], lengths
            return Figures(workload.name, workload.num_counted_tokens / duration, duration)

        yield run
