"""Example logits post-processors: single and batched ones, and some that fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import BatchedLogitsPostProcessor, LogitsPostProcessor


class CountUp(LogitsPostProcessor):
    """Each token is the one before it plus the length of the client's name."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """The wanted token's logit becomes the highest."""
        wanted = (int(tokens[-1]) + len(client_id)) % len(logits)
        logits[wanted] = logits.max() + 10
        return logits


class CountUpTogether(BatchedLogitsPostProcessor):
    """The same for all sequences at once; fails where a client is called `mallory`."""

    def process(
        self,
        logits: Tensor,
        tokens: Sequence[NDArray[np.int32]],
        client_ids: Sequence[str],
        request_ids: Sequence[str],
    ) -> Tensor:
        """The wanted tokens' logits become the highest."""
        if "mallory" in client_ids:
            raise ValueError("not for mallory")
        for row, (known, client_id) in enumerate(zip(tokens, client_ids, strict=True)):
            logits[row, (int(known[-1]) + len(client_id)) % logits.shape[1]] = logits[row].max() + 10
        return logits


class WrongShape(LogitsPostProcessor):
    """Returns one logit too few."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """Not what was asked for."""
        return logits[1:]


class Raises(LogitsPostProcessor):
    """Fails."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """Fails."""
        raise RuntimeError("no idea")
