"""What requests no worker of this scheduler could ever run, whatever else it has to do."""

from __future__ import annotations

from scheduler.core_config import CoreConfig
from scheduler.failure import INVALID_ARGUMENT, Failure
from scheduler.request_spec import RequestSpec


def impossible(spec: RequestSpec, config: CoreConfig) -> Failure | None:
    """Why a request is refused; None: it is not."""
    if not spec.prompt:
        return Failure(INVALID_ARGUMENT, "the prompt is empty", "token_ids")
    num_ids = config.vocab_size + spec.num_virtual_tokens
    if max(spec.prompt) >= num_ids:
        return Failure(INVALID_ARGUMENT, f"token ids are below {num_ids}", "token_ids")
    if spec.max_tokens < 1:
        return Failure(INVALID_ARGUMENT, "at least 1 is needed", "max_tokens")
    if len(spec.prompt) + spec.max_tokens > config.max_sequence_length:
        most = config.max_sequence_length
        return Failure(INVALID_ARGUMENT, f"prompt and output take more than the model's {most} tokens", "max_tokens")
    if spec.tensor_bytes > config.max_tensor_bytes:
        most = config.max_tensor_bytes
        return Failure(INVALID_ARGUMENT, f"asks for {spec.tensor_bytes} bytes of tensors; at most {most}", "output")
    if not config.enable_chunked_context and len(spec.prompt) > config.max_num_tokens:
        most = config.max_num_tokens
        return Failure(INVALID_ARGUMENT, f"without chunked context a prompt has at most {most} tokens", "token_ids")
    return None
