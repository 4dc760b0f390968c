"""Proposes drafts for speculative rows: by prompt lookup, or with a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import EMPTY, IntArray, Step
from gpu_worker.features import Feature

# Features that depend only on a row's tokens, and therefore also work on shadow rows.
_ALLOWED = (
    Feature.PENALTIES
    | Feature.BIAS
    | Feature.MIN_TOKENS
    | Feature.LOG_PROBS
    | Feature.BAD_WORDS
    | Feature.NGRAMS
    | Feature.ALLOWED_TOKENS
    | Feature.TOP_P_DECAY
)


class DraftMaker(Protocol):
    """A model that proposes drafts."""

    def propose(self, rows: Mapping[int, int]) -> dict[int, IntArray]:
        """Return up to rows[row] draft tokens per row; rows without drafts may be missing."""


class Drafter:
    """Proposes drafts for the sequences in `rows`."""

    def __init__(self, rows: Rows, model: DraftMaker | None = None) -> None:
        self._rows = rows
        self._model = model

    def propose(self, step: Step) -> dict[int, IntArray]:
        """Return drafts for the rows of a step; rows with features that do not support drafts get none."""
        drafts: dict[int, IntArray] = {}
        of_model: dict[int, int] = {}
        for row, limit in zip(step.draft_rows.tolist(), step.draft_limits.tolist(), strict=True):
            sampling = self._rows.sampling[row]
            if row in self._rows.failed or int(self._rows.features[row]) & ~int(_ALLOWED):
                continue
            num_wanted = min(limit, sampling.num_draft_tokens)
            if not sampling.max_ngram_size:
                of_model[row] = num_wanted
                continue
            tokens = self._rows.tokens[row, : self._rows.lengths[row]]
            found = look_up(tokens, sampling.max_ngram_size, num_wanted, sampling.prediction)
            if len(found):
                drafts[row] = found
        if of_model and self._model is not None:
            drafts |= self._model.propose(of_model)
        return drafts


def look_up(tokens: IntArray, max_ngram_size: int, limit: int, prediction: Sequence[int] = ()) -> IntArray:
    """Return the tokens that followed the latest earlier occurrence of the last n tokens, for the largest n that has
    one.

    Args:
        tokens: Prompt and output so far.
        prediction: Expected output; it is searched first.
    """
    if prediction:
        found = _look_up(np.asarray(prediction, tokens.dtype), tokens, max_ngram_size, limit)
        if len(found):
            return found
    return _look_up(tokens, tokens, max_ngram_size, limit)


def _look_up(source: IntArray, tokens: IntArray, max_ngram_size: int, limit: int) -> IntArray:
    for size in range(min(max_ngram_size, len(source) - 1, len(tokens)), 0, -1):
        last = tokens[len(tokens) - size :]
        starts = np.arange(len(source) - size)
        for i in range(size):
            starts = starts[source[starts + i] == last[i]]
        if len(starts):
            first = int(starts[-1]) + size
            return source[first : first + limit].copy()
    return EMPTY
