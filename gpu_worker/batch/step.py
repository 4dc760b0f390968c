"""Steps and their outputs as plain types; `scheduler_link.messages` converts them from and to protobuf messages."""

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
class BeamStop:
    """The stop words of a beam search, and how its text is made.

    Attributes:
        min_tokens: A stop word ends a beam only once the output has at least this many tokens.
        follows_prompt: Whether the text begins with the prompt.
        include_stop: Whether the text includes the stop word or stop token.
    """

    words: tuple[str, ...]
    min_tokens: int = 0
    follows_prompt: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence; the defaults are those of the public API.

    Attributes:
        end_ids: Tokens that must not be sampled before `min_tokens` output tokens.
        penalize_prompt: Whether presence and frequency penalties count the tokens of the prompt as well.
        embedding_bias: (token id, value added to its logit).
        no_repeat_ngram_size: Size of n-grams that must not occur twice; 0 means no such limit.
        allowed_token_ids: The only tokens that are sampled; empty means all.
        top_p_decay, top_p_min, top_p_reset_id: Per-token decay of top_p; a reset id of -1 means none.
        beam_width: Above 1, the row is a beam, which reports candidates instead of a token.
        beam_stop: Stop words of a beam; None if nothing but single tokens may end it.
        num_draft_tokens: Maximum number of draft tokens that the row verifies in a step.
        max_ngram_size: Maximum n-gram size for prompt lookup; 0 means that a draft model proposes the drafts.
        prediction: Tokens that prompt lookup searches before the row's own tokens.
        log_probs: Number of top tokens to report with the sampled one; None if no log probabilities are requested.
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
    penalize_prompt: bool = False
    embedding_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_id: int = -1
    end_ids: tuple[int, ...] = ()
    log_probs: int | None = None
    beam_width: int = 1
    beam_stop: BeamStop | None = None
    num_draft_tokens: int = 0
    max_ngram_size: int = 3
    prediction: tuple[int, ...] = ()


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParams:
    """Tensors that a sequence reports in addition to its tokens and their log probabilities.

    Attributes:
        prompt_log_probs: Like `SamplingParams.log_probs`, but for the tokens of the prompt except the first.
        context_logits, generation_logits: Unmodified logits at each prompt token and at each new token.
        hidden_states: (layer, whether to include the prompt); layer 0 is the embeddings.
        topk_logits: (number of highest logits, whether to include the prompt).
        token_logits: (token ids whose logits to report, whether to include the prompt).
        sampling: For each `sampling.K` to report, K.
        probes: (name of an output probe, whether to include the prompt).
    """

    prompt_log_probs: int | None = None
    context_logits: bool = False
    generation_logits: bool = False
    hidden_states: tuple[tuple[int, bool], ...] = ()
    topk_logits: tuple[tuple[int, bool], ...] = ()
    token_logits: tuple[tuple[tuple[int, ...], bool], ...] = ()
    sampling: tuple[int, ...] = ()
    probes: tuple[tuple[str, bool], ...] = ()

    @property
    def of_prompt(self) -> bool:
        """Return whether any output for the prompt is requested."""
        return any(gathers for _, gathers in self.hidden_states) or self.logits_of_prompt

    @property
    def logits_of_prompt(self) -> bool:
        """Return whether any output needs the logits of the prompt."""
        is_gathered = any(gathers for _, gathers in (*self.topk_logits, *self.token_logits, *self.probes))
        return self.prompt_log_probs is not None or self.context_logits or is_gathered


NOTHING = OutputParams()


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A request's reference to an adapter.

    Attributes:
        fingerprint: Hash of its files, which distinguishes different contents of the same path.
    """

    name: str
    path: str
    fingerprint: str


@dataclass(slots=True)
class GuideState:
    """The grammar that a sequence follows, how much of its output was sent to a grammar process, and to which one."""

    guide: Guide
    life: int = 0
    num_sent: int = 0
    digest: bytes = b""

    def __post_init__(self) -> None:
        text = f"{self.guide.kind}:{self.guide.text}"
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence to place in a row: its prompt and the tokens generated so far.

    Attributes:
        token_ids: [num_tokens]; the first num_prompt_tokens are the prompt.
        num_given_tokens: Number of output tokens that the request gave; tensors begin after them.
        block_ids: The first entries of the block table.
        prompt: The prompt adapter, if any; token ids from the vocabulary size on index its table.
        prompt_table: A table sent with the request instead of a prompt adapter, float32 [num_virtual_tokens,
            hidden_size]; its parts arrive before the step, under `prompt_table_key`.
        num_virtual_tokens: Number of rows of the adapter's or the request's table, once known.
        error: If set, the sequence cannot run on this worker, and each of its samples fails with this error.
    """

    row: int
    token_ids: IntArray
    num_prompt_tokens: int
    num_given_tokens: int = 0
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
    """Copies row `from_row` to `to_row`, with the block table `block_ids`."""

    from_row: int
    to_row: int
    block_ids: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward step; fields mirror StepBatch in protos/worker.proto, and are applied in the order given there."""

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
    reports_digests: bool = False


@dataclass(frozen=True, slots=True)
class RowLogProbs:
    """Log probabilities of a row's new token and of its top tokens, most likely first."""

    row: int
    token_log_prob: float
    token_rank: int
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log probabilities of consecutive prompt tokens of a row; the top entries are concatenated, `top_k` per token."""

    row: int
    top_k: int
    token_log_probs: tuple[float, ...]
    token_ranks: tuple[int, ...]
    top_token_ids: tuple[int, ...]
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A slice of a tensor that a row reports.

    Attributes:
        values: Float32 or int32, [rows, ...].
        first_row: Position of values[0] in the full tensor: a prompt position, or an index in the output.
        is_last: Whether the slice ends the full tensor; always False for tensors that grow with each token.
    """

    row: int
    name: str
    values: NDArray[np.float32] | NDArray[np.int32]
    first_row: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step.

    Attributes:
        token_ids: One per sampled row unless num_tokens is set: first the context chunks that sample, in order, then
            the generation rows in ascending order.
        num_tokens: Number of tokens of each sampled row; set only if any of them is not one.
        candidate_log_probs: Log probabilities of all candidates of beam rows.
        candidate_stop_words: The stop words that these candidates complete, as in StepResult; empty if there are none.
        num_drafts: Number of drafts verified for each sampled row; empty if there were none.
        errors: (row, error) of rows whose token is invalid.
        prompt_log_probs, tensors: Additional outputs of rows.
        missing_blocks: Blocks to adopt whose contents were not found.
        logit_digests: A digest of each sampled row's logits, as in StepResult; empty unless asked for.
        is_whole: Whether the whole step was computed; False if a context chunk was left out because its row has failed.
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
    candidate_stop_words: tuple[int, ...] = ()
    logit_digests: tuple[int, ...] = ()
    is_whole: bool = True
