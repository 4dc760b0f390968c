"""A sequence's log probabilities and tensors, each delivered exactly once.

When a feed is reopened, all outputs are sent again. Received log probabilities are counted, since their rows belong to
consecutive tokens; tensors carry their position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from midstream.extras import CONTEXT, Extras, LogProbs, Tensor, TensorCursor


class OutputCursor:
    """Tracks which outputs of a sequence have been received.

    Attributes:
        cumulative_log_prob: Sum over the output tokens whose log probabilities were received; None before the first.
    """

    def __init__(self) -> None:
        self.cumulative_log_prob: float | None = None
        self._tensors = TensorCursor()
        self._num_rows = 0
        self._num_prompt_rows = 0
        self._num_repeated_rows = 0

    def reopen(self) -> None:
        """Expect all outputs to be sent again."""
        self._num_repeated_rows = self._num_prompt_rows

    def new(self, extras: Extras, token_offset: int, from_token: int, end: int | None) -> Extras | None:
        """Return the part of `extras` that is new and should be delivered; None if there is none.

        Args:
            extras: Extras of the tokens from `token_offset` on, all of which were received.
            token_offset: Index of the first of these tokens in the output.
            from_token: Log probabilities of tokens before this index are not delivered.
            end: Length of the output, if known.
        """
        log_probs = self._rows(extras.log_probs, token_offset, from_token, end) if extras.log_probs else None
        prompt = self._prompt_rows(extras.prompt_log_probs) if extras.prompt_log_probs else None
        if from_token > 0:
            prompt = None  # delivered with the first token
        tensors = extras.tensors if end is None else tuple(_before(extras.tensors, end))
        found = self._tensors.new(replace(extras, log_probs=log_probs, prompt_log_probs=prompt, tensors=tensors))
        return None if found == Extras() else found

    def _rows(self, rows: LogProbs, token_offset: int, from_token: int, end: int | None) -> LogProbs | None:
        if end is not None:
            rows = rows.first(max(end - token_offset, 0))
        first = max(self._num_rows, token_offset)
        rows = rows.without(first - token_offset)
        if not rows.token_log_probs:
            return None
        self._num_rows = first + len(rows.token_log_probs)
        self.cumulative_log_prob = (self.cumulative_log_prob or 0.0) + sum(rows.token_log_probs)
        shown = rows.without(max(from_token - first, 0))
        return shown if shown.token_log_probs else None

    def _prompt_rows(self, rows: LogProbs) -> LogProbs | None:
        num_known = min(self._num_repeated_rows, len(rows.token_log_probs))
        self._num_repeated_rows -= num_known
        self._num_prompt_rows += len(rows.token_log_probs) - num_known
        new = rows.without(num_known)
        return new if new.token_log_probs else None


def _before(tensors: Iterable[Tensor], end: int) -> Iterator[Tensor]:
    """Yield the tensors without their rows for output tokens from `end` on."""
    for tensor in tensors:
        kept = tensor if tensor.name.startswith(CONTEXT) else tensor.before(end)
        if kept is not None:
            yield kept
