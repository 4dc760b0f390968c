"""Measure the time of a runner's forward passes apart from the rest of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpu_worker.model_runner import ModelRunner


class ForwardTime:
    """Measures the CPU time of a decoder's forward passes on the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = 0.0
        decoder: Any = runner.model.decoder
        decoder.forward = self._timed(decoder.forward)
        if hasattr(decoder, "choose"):
            decoder.choose = self._timed(decoder.choose)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            started = time.thread_time()
            result = function(*arguments)
            self.seconds += time.thread_time() - started
            return result

        return run
