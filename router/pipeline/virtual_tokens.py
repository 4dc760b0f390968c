"""Checks prompt embeddings and prompt-tuning tables, and assigns them token ids starting at the vocabulary size.

The rest of the service sees a single form: token ids, and a table whose row i has the id vocab_size + i. A prompt given
as embeddings becomes a table with all of its rows in order; a table for a prompt without such ids is prepended to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import InvalidArgumentError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb

_BYTES_PER_ELEMENT = {pb.Tensor.DTYPE_FLOAT32: 4, pb.Tensor.DTYPE_FLOAT16: 2, pb.Tensor.DTYPE_BFLOAT16: 2}


def check_virtual_tokens(request: pb.GenerateRequest, model: ModelFolder, *, has_images: bool) -> None:
    """Check prompt tuning and prompt embeddings.

    Raises:
        InvalidArgumentError: A field is invalid; the error names it.
    """
    tuning, has_embeddings = request.prompt_tuning, request.WhichOneof("input") == "prompt_embeddings"
    if not has_embeddings and not has_images and not request.HasField("prompt_tuning"):
        return
    if has_embeddings:
        if request.HasField("prompt_tuning"):
            raise InvalidArgumentError("must not be set together with prompt_tuning", field="prompt_embeddings")
        _check_tensor(request.prompt_embeddings, model, "prompt_embeddings")
    elif tuning.HasField("resolved"):
        raise InvalidArgumentError("must not be set by clients", field="prompt_tuning.resolved")
    elif tuning.HasField("table"):
        if tuning.path:
            raise InvalidArgumentError("requires the name of an adapter", field="prompt_tuning.path")
        _check_tensor(tuning.table, model, "prompt_tuning.table")
    elif request.HasField("prompt_tuning") and not tuning.name:
        raise InvalidArgumentError("must have a name or a table", field="prompt_tuning")
    if request.output.HasField("prompt_log_probs"):
        raise InvalidArgumentError(
            "is not supported with images and other virtual tokens, which have no log probabilities",
            field="output.prompt_log_probs",
        )
    if request.output.HasField("exclude_input_from_output") and not request.output.exclude_input_from_output:
        raise InvalidArgumentError(
            "must not be false with images and other virtual tokens, which have no text",
            field="output.exclude_input_from_output",
        )


def num_token_ids(request: pb.GenerateRequest, model: ModelFolder) -> int:
    """Return the exclusive upper bound on the prompt's token ids."""
    table = request.prompt_tuning.table.shape
    return model.vocab_size + (table[0] if table else 0)


def take_embeddings(request: pb.GenerateRequest, model: ModelFolder) -> None:
    """Convert prompt embeddings, already checked, to a table of virtual tokens and their ids."""
    if request.WhichOneof("input") == "prompt_embeddings":
        request.prompt_tuning.table.CopyFrom(request.prompt_embeddings)
        first, count = model.vocab_size, request.prompt_embeddings.shape[0]
        request.token_ids.values.extend(range(first, first + count))


def put_table_first(request: pb.GenerateRequest, token_ids: Sequence[int], model: ModelFolder) -> Sequence[int]:
    """Prepend the ids of the request's table, if it has one, to a prompt that contains none of its ids."""
    if not request.prompt_tuning.HasField("table") or max(token_ids) >= model.vocab_size:
        return token_ids
    first = model.vocab_size
    return [*range(first, first + request.prompt_tuning.table.shape[0]), *token_ids]


def _check_tensor(tensor: pb.Tensor, model: ModelFolder, field: str) -> None:
    size = _BYTES_PER_ELEMENT.get(tensor.dtype)
    if size is None:
        raise InvalidArgumentError("must be float32, float16 or bfloat16", field=f"{field}.dtype")
    shape = list(tensor.shape)
    if len(shape) != 2 or shape[1] != model.hidden_size or not 1 <= shape[0] <= model.max_sequence_length:
        raise InvalidArgumentError(
            f"is {shape}; must be [1..{model.max_sequence_length}, {model.hidden_size}]", field=f"{field}.shape"
        )
    if len(tensor.data) != shape[0] * shape[1] * size:
        raise InvalidArgumentError(
            f"has {len(tensor.data)} bytes; must have {shape[0] * shape[1] * size} bytes", field=f"{field}.data"
        )
    if tensor.data_offset:
        raise InvalidArgumentError("must be 0: requests hold the whole tensor", field=f"{field}.data_offset")
