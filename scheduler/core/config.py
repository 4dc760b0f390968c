"""Settings of the core, which are fixed at its start."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.kind import LostKind

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Settings of the core; times are in nanoseconds.

    Attributes:
        scheduler_epoch: Epoch of this incarnation; greater than any before.
        model_fingerprint: Workers must have the same fingerprint; empty means any.
        lost_kind: What happens to a request after `no_worker_timeout_ns` without a group of its kind; a LostKind.
        max_context_chunk: Maximum context tokens of one request in one step; 0 means max_num_tokens.
        max_attention_window: Maximum tokens that any layer attends to; 0 means the model's own window. Workers must
            have the same setting, because their results depend on it.
        sink_token_length: Number of these tokens that are the first ones of the sequence, to which every query attends;
            the others are the last ones. Workers must have the same setting.
        max_tensor_bytes: Maximum total size of the tensors and attachments of all known requests.
        max_worker_deaths: Number of consecutive worker deaths, without a new token in between, after which a request is
            a suspect.
        unload_after_ns: Time without requests after which all groups sleep; 0 means never.
        verify_ppm: Share of the steps that another group computes again, in millionths.
    """

    scheduler_epoch: int
    vocab_size: int
    max_sequence_length: int
    model_fingerprint: str = ""
    tokens_per_block: int = 16
    max_batch_size: int = 256
    max_num_tokens: int = 2048
    max_context_chunk: int = 0
    max_attention_window: int = 0
    sink_token_length: int = 0
    enable_block_reuse: bool = True
    enable_chunked_context: bool = True
    pipeline_depth: int = 2
    max_queue_size: int = 4096
    worker_timeout_ns: int = 2_000_000_000
    progress_timeout_ns: int = 30_000_000_000
    orphan_grace_ns: int = 30_000_000_000
    finished_ttl_ns: int = 60_000_000_000
    no_worker_timeout_ns: int = 30_000_000_000
    lost_kind: str = LostKind.MOVE
    max_num_finished: int = 8192
    max_finished_tokens: int = 16_777_216
    max_worker_deaths: int = 2
    max_tensor_bytes: int = 1 << 30
    verify_ppm: int = 0
    unload_after_ns: int = 0
