"""A logits post-processor with which a test pauses a worker in the middle of a step."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import LogitsPostProcessor
from tests.integration.named_processes import ROOT

NAME = "hold"
# Number of tokens that a request generates before its worker pauses.
NUM_TOKENS = 8
_FOLDER = "TEST_HOLD_FOLDER"


class Hold:
    """The test's side: within this context, a request with the post-processor pauses its worker after some tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._held = folder / "hold", folder / "held"

    @property
    def settings(self) -> dict[str, str]:
        """Return the environment of a service whose workers can be held."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        place = f"{Holding.__module__}:{Holding.__name__}"
        return {
            "MIDSTREAM_LOGITS_POST_PROCESSORS": f"{NAME}={place}",
            "PYTHONPATH": path,
            _FOLDER: str(self._folder),
        }

    def __enter__(self) -> None:
        self._held.unlink(missing_ok=True)
        self._file.touch()

    def __exit__(self, *_: object) -> None:
        self._file.unlink()

    async def held(self) -> int:
        """Wait until a worker is paused; return its process id."""
        async with asyncio.timeout(240):
            while not self._held.exists():  # noqa: ASYNC110 (the other side is a process)
                await asyncio.sleep(0.01)
        return int(self._held.read_text())


class Holding(LogitsPostProcessor):
    """The worker's side: it changes no logits, and pauses at one token of each request while the file exists."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[_FOLDER])
        self._num_tokens: Counter[str] = Counter()

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        self._num_tokens[request_id] += 1
        if self._num_tokens[request_id] == NUM_TOKENS + 1:
            while (self._folder / "hold").exists():
                if not (self._folder / "held").exists():
                    new = self._folder / f"held-{os.getpid()}"
                    new.write_text(str(os.getpid()))
                    new.rename(self._folder / "held")
                time.sleep(0.01)
        return logits
