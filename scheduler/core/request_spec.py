"""The parameters of a request, in the form that the core uses."""

from __future__ import annotations

from array import array

from midstream.record import record

DEFAULT_RETENTION_PRIORITY = 35


@record
class RetentionRange:
    """Blocks of the prompt tokens [start, end) are kept with `priority`, for `duration_ns` after their last use."""

    start: int
    end: int | None
    priority: int
    duration_ns: int | None = None


@record(kw_only=True)
class RequestSpec:
    """Immutable parameters of a request.

    Attributes:
        prompt: Token ids, array type 'I'.
        max_tokens: Maximum output tokens per sequence; prompt and output fit into the model's length. With 0, only the
            prompt is computed, and the token that its last step samples is not part of the output.
        num_sequences: Number of requested outputs.
        stop_token_ids: Tokens that end a sequence, including the end ids.
        stop_sequences: Sequences of tokens that end a sequence with their last token.
        min_tokens: Number of output tokens before which a stop token or stop word does not end the sequence.
        stop_words: Of a beam search: texts that end a beam, which the worker finds. The detokenizer finds those of
            other requests.
        beam_width: Above 1, the request is a beam search, whose best `num_sequences` beams are the outputs.
        beam_diversity_rate, length_penalty, early_stopping: See protos/generation.proto.
        num_draft_tokens: Maximum number of drafts to verify in one step; 0 means no speculation.
        deadline_ns: Deadline by the scheduler's steady clock, which also measures arrival_ns; None if there is none.
        lora_key: Identifies the adapter's contents; empty if there is none. lora_bytes: Size of the adapter in a
            worker's memory.
        prompt_key: Identifies the embeddings of virtual tokens; empty if there are none.
        num_virtual_tokens: Number of ids from vocab_size on that the prompt may contain.
        is_cacheable: Whether it may use cached blocks for prompt tokens, and other requests may use its blocks.
        tensor_bytes: Size of the requested tensors. If above 0, the journal keeps the request without its output, and a
            successor computes it again.
        attached_bytes: Size of the embeddings and the attachment in the payload.
        digest: Hash of the contents, which distinguishes a repeated Submit from another request with the same id.
        keep_ns: How long it is kept after its end, beyond the usual time; used by the edge only.
        wants_log_probs: Whether log probabilities of output tokens are returned; used by the edge only.
        tokenizer_fingerprint: Identifies the tokenizer of its prompt; used by the edge only.
        receipt_nonce: Salts the digests of its receipt; empty if it gets none. Used by the edge and the journal only.
        contents_digest: SHA-256 of the canonical request (protos/receipts.proto); used by the edge only.
        payload: The normalized GenerateRequest, serialized; opaque to the core.
    """

    request_id: str
    prompt: array[int]
    max_tokens: int
    num_sequences: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_words: tuple[str, ...] = ()
    beam_width: int = 1
    beam_diversity_rate: float = 0.0
    length_penalty: float = 0.0
    early_stopping: int = 1
    num_draft_tokens: int = 0
    client_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    lora_name: str = ""
    lora_key: str = ""
    lora_bytes: int = 0
    prompt_key: str = ""
    num_virtual_tokens: int = 0
    is_detached: bool = False
    is_cacheable: bool = True
    tensor_bytes: int = 0
    attached_bytes: int = 0
    arrival_ns: int = 0
    deadline_ns: int | None = None
    retention: tuple[RetentionRange, ...] = ()
    decode_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_ns: int | None = None
    digest: bytes = b""
    keep_ns: int = 0
    wants_log_probs: bool = False
    tokenizer_fingerprint: str = ""
    receipt_nonce: bytes = b""
    contents_digest: bytes = b""
    payload: bytes = b""

    @property
    def max_num_tokens(self) -> int:
        """Return the maximum number of tokens in one sequence for which keys and values are computed: all but the last
        output token.
        """
        num_prompt = len(self.prompt)
        return num_prompt + self.max_tokens - 1 if self.max_tokens else num_prompt

    @property
    def possible_ends(self) -> frozenset[int]:
        """The tokens that may end a sequence: stop tokens, and the last tokens of stop sequences."""
        if not self.stop_sequences:
            return self.stop_token_ids
        return self.stop_token_ids.union(sequence[-1] for sequence in self.stop_sequences)

    def ends_with_stop_sequence(self, output: array[int]) -> bool:
        """Return whether the prompt and this output end with one of the stop sequences."""
        for sequence in self.stop_sequences:
            size = len(sequence)
            tail = output[-size:] if size <= len(output) else self.prompt[len(output) - size :] + output
            if tuple(tail) == sequence:
                return True
        return False

    @property
    def num_large_bytes(self) -> int:
        """Number of bytes that the request takes in addition to its tokens; this is known in advance."""
        return self.tensor_bytes + self.attached_bytes

    @property
    def num_rows(self) -> int:
        """Number of rows that the request takes at a worker."""
        return self.beam_width if self.beam_width > 1 else self.num_sequences
