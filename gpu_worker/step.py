"""What the worker executes and answers, as plain types; `wire` makes them from protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MidstreamError

IntArray = NDArray[np.int32]
EMPTY: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence's tokens are chosen; the defaults are those of the public API.

    Attributes:
        end_ids: Tokens that `min_tokens` keeps from being chosen.
        embedding_bias: (token id, what is added to its logit).
        bad_words: Token sequences that may not be completed.
        no_repeat_ngram_size: No n-gram of this size occurs twice; 0 is off.
        top_p_decay, top_p_min, top_p_reset_id: How top_p changes from token to token; a reset id of -1 is none.
        log_probs: None: not wanted; else the number of likeliest tokens reported beside the chosen one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    embedding_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    end_ids: tuple[int, ...] = ()
    log_probs: int | None = None


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """Gives a row a sequence: its prompt and what was emitted so far.

    Attributes:
        token_ids: [num_tokens]; the first num_prompt_tokens are the prompt.
        block_ids: The first entries of its block table.
        error: Why the sequence cannot run here; each of its samples then fails with it.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    block_ids: IntArray = field(default_factory=lambda: EMPTY)
    sampling: SamplingParams = GREEDY
    sequence_index: int = 0
    request_id: str = ""
    error: MidstreamError | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """`to_row` takes over the tokens of `from_row`, and `block_ids` as its block table."""

    from_row: int
    to_row: int
    block_ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward step; the fields are those of protos/worker.proto's StepBatch, applied in the order given there."""

    epoch: int = 0
    step_id: int = 0
    released_rows: IntArray = field(default_factory=lambda: EMPTY)
    new_sequences: tuple[NewSequence, ...] = ()
    forks: tuple[Fork, ...] = ()
    block_rows: IntArray = field(default_factory=lambda: EMPTY)
    block_ids: IntArray = field(default_factory=lambda: EMPTY)
    copy_sources: IntArray = field(default_factory=lambda: EMPTY)
    copy_targets: IntArray = field(default_factory=lambda: EMPTY)
    context_rows: IntArray = field(default_factory=lambda: EMPTY)
    context_starts: IntArray = field(default_factory=lambda: EMPTY)
    context_lengths: IntArray = field(default_factory=lambda: EMPTY)
    context_without_sample: IntArray = field(default_factory=lambda: EMPTY)
    repeat_generation: bool = False
    generation_rows: IntArray = field(default_factory=lambda: EMPTY)
    idle_rows: IntArray = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True)
class RowLogProbs:
    """Log probabilities of one row's new token and of the likeliest tokens, likeliest first."""

    row: int
    token_log_prob: float
    token_rank: int
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave.

    Attributes:
        token_ids: One per sampled row: context chunks that sampled, in order, then generation rows, ascending.
        errors: (row, error) of rows whose token means nothing.
        forward_s: Time of forward pass and sampling, in seconds.
    """

    token_ids: IntArray
    log_probs: tuple[RowLogProbs, ...]
    errors: tuple[tuple[int, MidstreamError], ...]
    forward_s: float
