"""Post-processors that record their arguments, and whose results depend on the rank that runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.post_processors import BatchedLogitsPostProcessor, LogitsPostProcessor


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _record(*arguments: object) -> None:
    with (Path(os.environ["CALLS"]) / str(_rank())).open("a") as file:
        print(*arguments, file=file)


def _raise_one(logits: Tensor, tokens: NDArray[np.int32]) -> None:
    logits[(int(tokens[-1]) + 1 + _rank()) % len(logits)] = logits.max() + 10


class RankPlusOne(LogitsPostProcessor):
    """Chooses the previous token plus one plus the rank."""

    def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
        """Give the chosen token the highest logit."""
        _record(tokens.tolist(), repr(client_id), request_id, float(logits.sum()))
        _raise_one(logits, tokens)
        return logits


class RankPlusOneForAll(BatchedLogitsPostProcessor):
    """Does the same for all sequences at once."""

    def process(
        self,
        logits: Tensor,
        tokens: Sequence[NDArray[np.int32]],
        client_ids: Sequence[str],
        request_ids: Sequence[str],
    ) -> Tensor:
        """Give the chosen tokens the highest logits."""
        _record([known.tolist() for known in tokens], list(client_ids), list(request_ids), float(logits.sum()))
        for row, known in zip(logits, tokens, strict=True):
            _raise_one(row, known)
        return logits
