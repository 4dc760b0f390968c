"""Example logits post-processors: for single sequences, for batches, and ones that fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import BatchedLogitsPostProcessor, LogitsPostProcessor


class CountUp(LogitsPostProcessor):
    """Chooses the previous token id plus the length of the client's name."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """Give the chosen token the highest logit."""
        wanted = (int(tokens[-1]) + len(client_id)) % len(logits)
        logits[wanted] = logits.max() + 10
        return logits


class CountUpTogether(BatchedLogitsPostProcessor):
    """Does the same as `CountUp`, for all sequences in one call; fails for the client `mallory`."""

    def process(
        self,
        logits: Tensor,
        tokens: Sequence[NDArray[np.int32]],
        client_ids: Sequence[str],
        request_ids: Sequence[str],
    ) -> Tensor:
        """Give the chosen tokens the highest logits."""
        if "mallory" in client_ids:
            raise ValueError("not for mallory")
        for row, (known, client_id) in enumerate(zip(tokens, client_ids, strict=True)):
            logits[row, (int(known[-1]) + len(client_id)) % logits.shape[1]] = logits[row].max() + 10
        return logits


class WrongShape(LogitsPostProcessor):
    """Returns one logit too few."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        return logits[1:]


class Raises(LogitsPostProcessor):
    """A processor that fails."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        raise RuntimeError("no idea")
