"""The time that a runner's forward passes take, to tell it from the rest of its steps."""

from __future__ import annotations

import time

import torch

from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs, Probe


class ForwardTime:
    """A decoder's forward pass, whose processor time on this thread is counted."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = 0.0
        self._forward = runner.model.decoder.forward
        runner.model.decoder.forward = self  # type: ignore[method-assign]

    def __call__(self, inputs: ForwardInputs, probe: Probe | None = None) -> torch.Tensor:
        started = time.thread_time()
        logits = self._forward(inputs, probe)
        self.seconds += time.thread_time() - started
        return logits
