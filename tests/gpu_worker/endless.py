"""A logits post-processor whose step does not end, while the process can still be stopped."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import LogitsPostProcessor

STARTED = "a step that does not end"


class Endless(LogitsPostProcessor):
    """Spends hours in one call of native code."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        print(STARTED, file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)
        return logits
