"""Rejects requests that no worker could ever run."""

from __future__ import annotations

from scheduler.core.config import CoreConfig
from scheduler.core.failure import INVALID_ARGUMENT, Failure
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec
from scheduler.core.worker_group import WorkerGroup


def impossible(spec: RequestSpec, config: CoreConfig) -> Failure | None:
    """Return why no worker of this model could ever run the request, or None if a worker might."""
    if not spec.prompt:
        return Failure(INVALID_ARGUMENT, "the prompt is empty", "token_ids")
    num_ids = config.vocab_size + spec.num_virtual_tokens
    if max(spec.prompt) >= num_ids:
        return Failure(INVALID_ARGUMENT, f"token ids must be below {num_ids}", "token_ids")
    if spec.max_tokens < 1 < spec.beam_width:
        return Failure(INVALID_ARGUMENT, "must be at least 1 with beam search", "max_tokens")
    if len(spec.prompt) + spec.max_tokens > config.max_sequence_length:
        most = config.max_sequence_length
        return Failure(
            INVALID_ARGUMENT, f"prompt and output must have at most {most} tokens, the model's limit", "max_tokens"
        )
    if spec.tensor_bytes > config.max_tensor_bytes:
        most = config.max_tensor_bytes
        return Failure(
            INVALID_ARGUMENT, f"requires {spec.tensor_bytes} bytes of tensors; must be at most {most}", "output"
        )
    if not config.enable_chunked_context and len(spec.prompt) > config.max_num_tokens:
        return _prompt_too_long(config.max_num_tokens)
    return None


def _prompt_too_long(most: int) -> Failure:
    return Failure(
        INVALID_ARGUMENT, f"a prompt must have at most {most} tokens, since it is computed in one step", "token_ids"
    )


def too_large(request: Request, groups: list[WorkerGroup]) -> Failure:
    """Return why a request is too large for every group."""
    spec = request.spec
    most = max(group.max_batch_size for group in groups)
    if spec.beam_width > 1 and request.num_rows > most:
        return Failure(INVALID_ARGUMENT, f"must be at most {most}, the workers' limit", "sampling.beam_width")
    most = max(group.registration.max_sequence_length for group in groups)
    if spec.max_num_tokens >= most:
        return Failure(
            INVALID_ARGUMENT, f"prompt and output must have at most {most} tokens, the workers' limit", "max_tokens"
        )
    if not any(group.takes_prompt(request) for group in groups):
        return _prompt_too_long(max(group.max_num_tokens for group in groups))
    if not any(group.adapters.fits_alone(spec) for group in groups):
        return Failure(
            INVALID_ARGUMENT, f"{spec.lora_name!r} does not fit into the workers' adapter cache", "lora.name"
        )
    needed = min(group.blocks_alone(request) * group.tokens_per_block for group in groups)
    most = max(group.num_kv_tokens for group in groups)
    if needed > most:
        message = f"prompt and output may need {needed} tokens of KV cache; the workers have {most}"
        return Failure(INVALID_ARGUMENT, message, "max_tokens")
    return Failure(INVALID_ARGUMENT, "no single worker is large enough in every respect", "max_tokens")
