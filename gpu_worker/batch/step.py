"""What the worker executes and answers, as plain types; `wire` makes them from protobuf."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midstream.errors import MidstreamError
from midstream.grammar.messages import Guide

IntArray = NDArray[np.int32]
EMPTY: IntArray = np.empty(0, dtype=np.int32)
HashArray = NDArray[np.uint64]
NO_HASHES: HashArray = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence's tokens are chosen; the defaults are those of the public API.

    Attributes:
        end_ids: Tokens that `min_tokens` keeps from being chosen.
        embedding_bias: (token id, what is added to its logit).
        bad_words: Token sequences that may not be completed.
        no_repeat_ngram_size: No n-gram of this size occurs twice; 0 is off.
        top_p_decay, top_p_min, top_p_reset_id: How top_p changes from token to token; a reset id of -1 is none.
        beam_width: Above 1 the row is a beam, and gives candidates in place of a token.
        num_draft_tokens: Drafts that the row may verify in a step.
        max_ngram_size: Of what is looked up in its tokens for drafts; 0 is that a draft model makes them.
        prediction: Tokens that are looked up before the row's own.
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
    beam_width: int = 1
    num_draft_tokens: int = 0
    max_ngram_size: int = 3
    prediction: tuple[int, ...] = ()


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParams:
    """What a sequence reports beside its tokens and their log probabilities.

    Attributes:
        prompt_log_probs: As `SamplingParams.log_probs`, for the prompt's tokens from the second on.
        context_logits, generation_logits: The model's own, at each token of the prompt and at each new token.
        hidden_states: (layer, whether the prompt's as well); 0 is the embeddings.
        topk_logits: (how many of the highest logits, whether the prompt's as well).
        probes: (name of an output probe, whether the prompt's as well).
    """

    prompt_log_probs: int | None = None
    context_logits: bool = False
    generation_logits: bool = False
    hidden_states: tuple[tuple[int, bool], ...] = ()
    topk_logits: tuple[tuple[int, bool], ...] = ()
    probes: tuple[tuple[str, bool], ...] = ()

    @property
    def of_prompt(self) -> bool:
        """Whether anything is wanted of the prompt."""
        is_gathered = any(gathers for _, gathers in (*self.hidden_states, *self.topk_logits, *self.probes))
        return self.prompt_log_probs is not None or self.context_logits or is_gathered


NOTHING = OutputParams()


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """What a request says of an adapter.

    Attributes:
        fingerprint: Of its files; another folder under the same path is another adapter.
    """

    name: str
    path: str
    fingerprint: str


@dataclass(slots=True)
class GuideState:
    """What a sequence has to follow, and how much of its output the grammar process of a certain life knows."""

    guide: Guide
    life: int = 0
    num_sent: int = 0
    digest: bytes = b""

    def __post_init__(self) -> None:
        text = f"{self.guide.kind}:{self.guide.text}"
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """Gives a row a sequence: its prompt and what was emitted so far.

    Attributes:
        token_ids: [num_tokens]; the first num_prompt_tokens are the prompt.
        block_ids: The first entries of its block table.
        lora: Its LoRA adapter.
        prompt: The prompt adapter whose table stands behind token ids from the vocabulary's size on.
        prompt_table: Or the table itself, float32 [num_virtual_tokens, hidden_size], found under prompt_table_key.
        num_virtual_tokens: Rows of that table, once it is there.
        error: Why the sequence cannot run here; each of its samples then fails with it.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    block_ids: IntArray = field(default_factory=lambda: EMPTY)
    sampling: SamplingParams = GREEDY
    outputs: OutputParams = NOTHING
    guide: Guide | None = None
    post_processor: str = ""
    client_id: str = ""
    sequence_index: int = 0
    request_id: str = ""
    lora: AdapterRef | None = None
    prompt: AdapterRef | None = None
    prompt_table: NDArray[np.float32] | None = None
    prompt_table_key: str = ""
    num_virtual_tokens: int = 0
    trace_parent: str = ""
    error: MidstreamError | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """`to_row` becomes a copy of `from_row`, with `block_ids` as its block table."""

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
    repeat_generation: bool = False
    generation_rows: IntArray = field(default_factory=lambda: EMPTY)
    idle_rows: IntArray = field(default_factory=lambda: EMPTY)
    beam_rows: IntArray = field(default_factory=lambda: EMPTY)
    beam_tokens: IntArray = field(default_factory=lambda: EMPTY)
    draft_rows: IntArray = field(default_factory=lambda: EMPTY)
    draft_limits: IntArray = field(default_factory=lambda: EMPTY)
    adopted_blocks: IntArray = field(default_factory=lambda: EMPTY)
    adopted_hashes: HashArray = field(default_factory=lambda: NO_HASHES)


@dataclass(frozen=True, slots=True)
class RowLogProbs:
    """Log probabilities of one row's new token and of the likeliest tokens, likeliest first."""

    row: int
    token_log_prob: float
    token_rank: int
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log probabilities of consecutive prompt tokens of one row; the top ones token after token, `top_k` each."""

    row: int
    top_k: int
    token_log_probs: tuple[float, ...]
    token_ranks: tuple[int, ...]
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowTensor:
    """Some rows of a tensor that a row reports.

    Attributes:
        values: Float32 or int32, [rows, ...].
        first_row: Place of values[0] in the whole: a prompt position, or an index in the output.
        is_last: The whole ends with it; False where it grows with each token.
    """

    row: int
    name: str
    values: NDArray[np.float32] | NDArray[np.int32]
    first_row: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gave.

    Attributes:
        token_ids: One per sampled row, unless num_tokens says how many: context chunks that sampled, in order, then
            generation rows, ascending.
        num_tokens: Tokens of each sampled row, where some have another number than one.
        candidate_log_probs: Of all tokens of those rows that are beams.
        num_drafts: Drafts that were verified, of each sampled row, where there were any.
        errors: (row, error) of rows whose token means nothing.
        forward_s: Time of forward pass and sampling, in seconds.
        prompt_log_probs, tensors: What rows report beside.
        missing_blocks: Blocks to adopt that nothing was found for.
        is_whole: False: a context chunk was not computed, as its row has failed.
    """

    token_ids: IntArray
    log_probs: tuple[RowLogProbs, ...]
    errors: tuple[tuple[int, MidstreamError], ...]
    forward_s: float
    prompt_log_probs: tuple[PromptLogProbs, ...] = ()
    tensors: tuple[RowTensor, ...] = ()
    num_tokens: tuple[int, ...] = ()
    candidate_log_probs: tuple[float, ...] = ()
    num_drafts: tuple[int, ...] = ()
    missing_blocks: tuple[int, ...] = ()
    is_whole: bool = True
