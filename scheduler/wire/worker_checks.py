"""Checks a worker's message on its own: every length and range, before anything else uses it.

Checks that depend on the step that was sent (number of rows, drafts) are in `Results.problem`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from protos import generation_pb2, worker_pb2

MAX_NAME = 256
_MAX_TEXT = 1 << 16
_MAX_IMAGE_TEXT = 1 << 20
_MAX_FEATURES = 256
_MAX_BYTES = 1 << 50
# Maximum of numbers that are summed over requests or groups and end up in 32-bit fields of other messages.
_MAX_COUNT = 1 << 24
_MAX_MICRO_BATCHES = 256
_MAX_PRICE = 1e9
_MAX_STATUS_CODE = 16
_MAX_DIMENSIONS = 8
_REGISTERED_NAMES = (
    "group_id",
    "device",
    "dtype",
    "kv_store",
    "tier_store",
    "role",
    "kv_source",
    "block_kind",
)
_KIND_NAMES = ("model_fingerprint", "weights_root", "arithmetic", "description", "weights_version")
_ITEM_BYTES = {
    generation_pb2.Tensor.DTYPE_FLOAT32: 4,
    generation_pb2.Tensor.DTYPE_FLOAT16: 2,
    generation_pb2.Tensor.DTYPE_BFLOAT16: 2,
    generation_pb2.Tensor.DTYPE_INT32: 4,
    generation_pb2.Tensor.DTYPE_INT64: 8,
}

_PLAIN = ("epoch", "step_id", "token_ids", "forward_us", "waiting_us")
_PLAIN_NUMBERS = frozenset(worker_pb2.StepResult.DESCRIPTOR.fields_by_name[name].number for name in _PLAIN)


class WrongMessageError(ValueError):
    """A message that can be parsed but is invalid."""


def check_worker_message(message: worker_pb2.WorkerMessage) -> None:
    """Check all fields of a message that can be checked without knowing the scheduler's state.

    The core itself rejects registrations and names the invalid field, so only values on which it would fail are checked
    here.

    Raises:
        WrongMessageError: A field is invalid; the error names it.
    """
    kind = message.WhichOneof("message")
    if kind == "step_result":
        _check_result(message.step_result)
    elif kind == "step_outputs":
        _check_step_outputs(message.step_outputs)
    elif kind == "heartbeat":
        memory = message.heartbeat.memory
        _check_range("memory", (memory.cpu_bytes, memory.gpu_bytes, memory.pinned_bytes), _MAX_BYTES)
    elif kind == "register":
        _check_registration(message.register)
    elif kind == "weights_hashed":
        _check_text("weights_root", message.weights_hashed.weights_root, MAX_NAME)
        _check_text("block_kind", message.weights_hashed.block_kind, MAX_NAME)
    elif kind == "leave":
        _check_text("reason", message.leave.reason, _MAX_TEXT)
    elif kind == "lora_result":
        _check_adapter(message.lora_result)
    elif kind == "image_encoded":
        _check_image(message.image_encoded)
    elif kind == "weights_prepared":
        _check_prepared(message.weights_prepared)


def _check_registration(message: worker_pb2.Register) -> None:
    for field in _REGISTERED_NAMES:
        _check_text(field, getattr(message, field), MAX_NAME)
    for field in _KIND_NAMES:
        _check_text(f"kind.{field}", getattr(message.kind, field), MAX_NAME)
    if not message.group_id.isprintable():
        raise WrongMessageError("group_id must have only printable characters")
    if len(message.features) > _MAX_FEATURES:
        raise WrongMessageError(f"features has {len(message.features)} entries; must have at most {_MAX_FEATURES}")
    for feature in message.features:
        _check_text("features", feature, MAX_NAME)
    _check_range("world_size", (message.world_size,), _MAX_COUNT)
    _check_range("max_loras", (message.max_loras,), _MAX_COUNT)
    _check_range("num_micro_batches", (message.num_micro_batches,), _MAX_MICRO_BATCHES)
    _check_range("lora_cache_bytes", (message.lora_cache_bytes,), _MAX_BYTES)
    _check_range("block_bytes", (message.block_bytes,), _MAX_BYTES)
    if not 0 <= message.price_per_hour <= _MAX_PRICE:
        raise WrongMessageError(f"price_per_hour is {message.price_per_hour}; must be from 0 to {_MAX_PRICE:g}")


def is_plain_result(result: worker_pb2.StepResult) -> bool:
    """Return whether a result contains only numbers and one token per row, so that there is nothing to check."""
    return _PLAIN_NUMBERS.issuperset([field.number for field, _ in result.ListFields()])


def _check_result(result: worker_pb2.StepResult) -> None:
    num_rows = len(result.token_ids)
    if result.num_tokens:
        num_rows = len(result.num_tokens)
        if sum(result.num_tokens) != len(result.token_ids):
            raise WrongMessageError(f"num_tokens adds up to {sum(result.num_tokens)}; must be {len(result.token_ids)}")
    if len(result.num_drafts) not in (0, num_rows):
        raise WrongMessageError(f"num_drafts has {len(result.num_drafts)} entries; must have {num_rows}")
    if not all(map(math.isfinite, result.candidate_log_probs)):
        raise WrongMessageError("candidate_log_probs contains a number that is not finite")
    if len(result.candidate_stop_words) not in (0, len(result.candidate_log_probs)):
        raise WrongMessageError(
            f"candidate_stop_words has {len(result.candidate_stop_words)} entries; "
            f"must have {len(result.candidate_log_probs)}"
        )
    if len(set(result.missing_blocks)) != len(result.missing_blocks):
        raise WrongMessageError("missing_blocks must not name a block twice")
    for item in result.errors:
        _check_error(item.error)
    if len({item.row for item in result.errors}) != len(result.errors):
        raise WrongMessageError("errors must not name a row twice")
    for outputs in result.outputs:
        _check_row_outputs(outputs)


def _check_step_outputs(message: worker_pb2.StepOutputs) -> None:
    for outputs in message.outputs:
        _check_row_outputs(outputs)


def _check_row_outputs(outputs: worker_pb2.RowOutputs) -> None:
    if outputs.HasField("log_probs"):
        _check_log_probs("log_probs", outputs.log_probs)
        if len(outputs.log_probs.token_log_probs) != 1:
            raise WrongMessageError(f"log_probs has {len(outputs.log_probs.token_log_probs)} tokens; must have 1")
    if outputs.HasField("prompt_log_probs"):
        _check_log_probs("prompt_log_probs", outputs.prompt_log_probs)
    for tensor in outputs.tensors:
        _check_tensor(tensor)


def _check_log_probs(field: str, rows: generation_pb2.LogProbs) -> None:
    num_rows, num_top = len(rows.token_log_probs), len(rows.token_log_probs) * rows.top_k
    lengths = (len(rows.token_ranks), len(rows.top_token_ids), len(rows.top_log_probs))
    if lengths != (num_rows, num_top, num_top):
        raise WrongMessageError(
            f"{field} has {lengths} ranks, top ids and top values; must have {(num_rows, num_top, num_top)}"
        )
    if not all(map(_is_log_prob, rows.token_log_probs)) or not all(map(_is_log_prob, rows.top_log_probs)):
        raise WrongMessageError(f"{field} contains NaN or infinity")


def _is_log_prob(value: float) -> bool:
    """Return whether a log probability is valid; minus infinity is allowed, for tokens with probability 0."""
    return value < math.inf  # also false for NaN


def _check_tensor(tensor: generation_pb2.Tensor) -> None:
    _check_text("tensors.name", tensor.name, MAX_NAME)
    if tensor.dtype not in _ITEM_BYTES:
        raise WrongMessageError(f"tensors.dtype is {tensor.dtype}; must be a known type")
    if not 1 <= len(tensor.shape) <= _MAX_DIMENSIONS:
        raise WrongMessageError(f"tensors.shape has {len(tensor.shape)} dimensions; must have 1 to {_MAX_DIMENSIONS}")
    num_bytes = math.prod(tensor.shape) * _ITEM_BYTES[tensor.dtype]
    if num_bytes != len(tensor.data):
        raise WrongMessageError(f"tensors.data has {len(tensor.data)} bytes; its shape requires {num_bytes}")
    _check_range("tensors.data_offset", (tensor.data_offset,), _MAX_BYTES)


def _check_adapter(result: worker_pb2.LoraResult) -> None:
    _check_text("name", result.name, MAX_NAME)
    _check_text("fingerprint", result.fingerprint, MAX_NAME)
    _check_range("rank", (result.rank,), _MAX_COUNT)
    _check_range("num_virtual_tokens", (result.num_virtual_tokens,), _MAX_COUNT)
    _check_range("num_bytes", (result.num_bytes,), _MAX_BYTES)
    if result.HasField("error"):
        _check_error(result.error)


def _check_prepared(result: worker_pb2.WeightsPrepared) -> None:
    _check_text("model_fingerprint", result.model_fingerprint, MAX_NAME)
    _check_text("weights_root", result.weights_root, MAX_NAME)
    if result.HasField("error"):
        _check_error(result.error)


def _check_image(result: worker_pb2.ImageEncoded) -> None:
    if result.HasField("error"):
        _check_error(result.error)
        return
    _check_tensor(result.embeddings)
    _check_text("text", result.text, _MAX_IMAGE_TEXT)


def _check_error(error: generation_pb2.ErrorInfo) -> None:
    if not 1 <= error.code <= _MAX_STATUS_CODE:
        raise WrongMessageError(f"error.code is {error.code}; must be the code of a gRPC error")
    _check_text("error.message", error.message, _MAX_TEXT)
    _check_text("error.field", error.field, MAX_NAME)


def _check_text(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise WrongMessageError(f"{field} has {len(text)} characters; must have at most {most}")


def _check_range(field: str, values: Sequence[int] | Iterable[int], most: int) -> None:
    if any(value > most for value in values):
        raise WrongMessageError(f"{field} must be at most {most}")
