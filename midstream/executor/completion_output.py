"""The output of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from midstream.chunk import Chunk, Validation
from midstream.executor.tensors import AnyTensor, first_rows, to_user
from midstream.extras import CONTEXT, LogProbs, Tensor, join_tensors


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability and rank of one token; rank 1 is the most likely, 0 means unknown."""

    logprob: float
    rank: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """The output of one sequence so far.

    Attributes:
        index: Index of the sequence in the request.
        text: All text so far.
        text_diff: Text since the previous iteration.
        token_ids: All tokens so far.
        token_ids_diff: Tokens since the previous iteration.
        cumulative_logprob: Log probability of the whole sequence, at the sequence's end, if requested.
        logprobs: For each token, its own log probability and those of the most likely tokens, if requested.
        finish_reason: `stop`, `length`, `abort`, `deadline` or `error`, at the sequence's end.
        stop_reason: The stop word or stop token that ended the sequence.
        tensors: Pieces of logits and other outputs, if requested.
        kind_changed_at: Index of the first token that another kind of workers computed; None if there is none.
        validation: Whether the text matches its schema, at the sequence's end, if this was not fully enforced.
    """

    index: int = 0
    text: str = ""
    text_diff: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_ids_diff: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tensors: list[Tensor] = field(default_factory=list)
    kind_changed_at: int | None = None
    validation: Validation | None = None

    @property
    def generation_logits(self) -> AnyTensor | None:
        """The model's unmodified logits at each token [tokens, vocabulary], if requested."""
        return to_user(self.whole_tensors().get("generation_logits"))

    @property
    def additional_generation_outputs(self) -> dict[str, AnyTensor]:
        """Additional outputs for the generated tokens, by name."""
        tensors = self.whole_tensors()
        return {
            name: to_user(tensor)
            for name, tensor in tensors.items()
            if name != "generation_logits" and not name.startswith(CONTEXT)
        }

    def drop_last_token(self) -> None:
        """Remove the end token or stop token, which is not part of the output, and what was reported with it."""
        num_left = max(len(self.token_ids) - 1, 0)
        del self.token_ids[num_left:], self.token_ids_diff[-1:], self.logprobs[num_left:]
        self.tensors = [
            tensor if name.startswith(CONTEXT) else first_rows(tensor, num_left)
            for name, tensor in self.whole_tensors().items()
        ]

    def whole_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; names of the prompt's tensors begin with `context_`."""
        return join_tensors(self.tensors)

    def add(self, chunk: Chunk) -> None:
        """Append the next chunk; a chunk that contains all output so far replaces the previous output."""
        if chunk.token_ids and chunk.token_offset < len(self.token_ids):
            known = len(self.token_ids)
            self.text_diff += chunk.text.removeprefix(self.text)
            self.token_ids_diff += chunk.token_ids[known - chunk.token_offset :]
            self.text, self.token_ids = chunk.text, list(chunk.token_ids)
        else:
            self.text_diff += chunk.text
            self.token_ids_diff += chunk.token_ids
            self.text += chunk.text
            self.token_ids += chunk.token_ids
        if chunk.extras is not None:
            if chunk.extras.log_probs is not None:
                self.logprobs += logprobs_by_token(chunk.extras.log_probs, chunk.token_ids)
            self.tensors += chunk.extras.tensors
        if chunk.kind_changed_at is not None:
            self.kind_changed_at = chunk.kind_changed_at
        if chunk.is_sequence_final:
            self.finish_reason = chunk.finish_reason.value if chunk.finish_reason else None
            self.stop_reason, self.cumulative_logprob = chunk.matched_stop, chunk.cumulative_log_prob
            self.validation = chunk.validation


def logprobs_by_token(rows: LogProbs, token_ids: list[int] | tuple[int, ...] | object) -> list[dict[int, Logprob]]:
    """Return the log probabilities of each row's chosen token (if known) and top alternatives, by token."""
    ids = list(token_ids) if isinstance(token_ids, list | tuple) else []
    result = []
    for row, log_prob in enumerate(rows.token_log_probs):
        top = slice(row * rows.top_k, (row + 1) * rows.top_k)
        pairs = zip(rows.top_token_ids[top], rows.top_log_probs[top], strict=True)
        entry = {token: Logprob(value, rank + 1) for rank, (token, value) in enumerate(pairs)}
        if row < len(ids):
            rank = rows.token_ranks[row] if row < len(rows.token_ranks) else 0
            entry[ids[row]] = Logprob(log_prob, rank)
        result.append(entry)
    return result
