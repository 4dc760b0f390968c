"""Draws tokens on a GPU by temperature, top-k, top-p and min-p; launched directly or replayed from CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kernels
from gpu_worker.batch.staging import PinnedBuffers

# Number of 4-byte words of a row's parameters.
WORDS = 8


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Sampling parameters of each row, in the form that `kernels.sample` uses; a temperature of 0 means greedy."""

    seeds: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    sequence_indices: NDArray[np.int32]
    positions: NDArray[np.int32]

    @property
    def has_top_k(self) -> bool:
        """Return whether any row is restricted to its most likely tokens."""
        return bool((self.top_k > 0).any())

    @property
    def has_top_p(self) -> bool:
        """Return whether any row is restricted to a fraction of the probability."""
        return bool((self.top_p < 1).any())

    def arrays(self) -> list[NDArray[Any]]:
        """Return the parameters as arrays, those with 8-byte elements first."""
        return [getattr(self, item.name) for item in fields(self)]


def draw(logits: Tensor, params: Sequence[Tensor], *, has_top_k: bool, has_top_p: bool) -> Tensor:
    """Draw tokens from logits [S, V], given the parameters on the device in the order of `DrawParams` -> int32 [S]."""
    seeds, temperature, top_k, top_p, min_p, indices, positions = params
    return kernels.sample(
        logits, temperature, top_k, top_p, min_p, seeds, indices, positions, has_top_k=has_top_k, has_top_p=has_top_p
    )


class RecordedDraws:
    """Graphs that draw from logits at a fixed address; for each number of rows, with and without top-k and top-p."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        """Create the object without graphs; `sizes` are the numbers of rows to record, in ascending order."""
        self._sizes = sizes
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        # The parameters of a graph's rows, one array after another, filled by one copy.
        self._params = torch.zeros(WORDS * sizes[-1], dtype=torch.int32, device=device)
        self._drawn = torch.zeros(sizes[-1], dtype=torch.int32, device=device)
        self._pinned = PinnedBuffers(device, WORDS * sizes[-1])

    def clear(self) -> None:
        self._graphs.clear()

    def capture(
        self,
        record: Callable[[Callable[[], object]], Callable[[], None]],
        logits: Tensor,
        best: Tensor,
        feed: Callable[[Tensor], None],
    ) -> None:
        """Record graphs with `record`; each draws from the first rows of `logits` and passes the tokens to `feed`.
        `best` contains the likeliest token of each row, or IS_BROKEN.
        """
        self._params.zero_()
        for size in reversed(self._sizes):
            for is_cut in (True, False):
                self._graphs[size, is_cut] = record(
                    functools.partial(self._run, logits[:size], best[:size], feed, is_cut=is_cut)
                )

    def draw(self, params: DrawParams) -> Tensor | None:
        """Return each row's token, already stored for the next step, or IS_BROKEN; None if nothing is recorded."""
        num_rows = len(params.seeds)
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None or not self._graphs:
            return None
        buffer = self._pinned.next()[: WORDS * size]
        start = 0
        for array in params.arrays():
            words = array.view(np.int32)
            end = start + len(words) // num_rows * size
            # The remaining rows are greedy, because their temperature is 0.
            buffer[start:end].zero_()
            buffer.numpy()[start : start + len(words)] = words
            start = end
        self._pinned.send(buffer, self._params[: WORDS * size])
        self._graphs[size, params.has_top_k or params.has_top_p]()
        return self._drawn[:num_rows]

    def _run(self, logits: Tensor, best: Tensor, feed: Callable[[Tensor], None], *, is_cut: bool) -> None:
        size = len(logits)
        words = self._params[: WORDS * size]
        seeds, rest = words[: 2 * size].view(torch.int64), words[2 * size :].view(WORDS - 2, size)
        temperature, top_k, top_p, min_p, indices, positions = rest.unbind()
        floats = [part.view(torch.float32) for part in (temperature, top_p, min_p)]
        params = (seeds, floats[0], top_k, floats[1], floats[2], indices, positions)
        tokens = draw(logits, params, has_top_k=is_cut, has_top_p=is_cut)
        drawn = self._drawn[:size]
        torch.where(best < 0, best, tokens, out=drawn)
        feed(drawn)
