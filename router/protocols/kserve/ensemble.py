"""The tensors of TensorRT-LLM's ensemble: the field of the native request that each input sets, and the conversion of a
request's output to output tensors.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from midstream.chunk import Chunk
from midstream.client.result import Result
from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError, UnsupportedError
from protos import generation_pb2 as pb
from router.pipeline.prompt import PromptBuilder, PromptOptions
from router.protocols.kserve.tensors import InputTensor, OutputTensor

_INTEGERS = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})
_FLOATS = frozenset({"FP32", "FP64"}) | _INTEGERS
_DTYPES = {"FP32": "DTYPE_FLOAT32", "FP16": "DTYPE_FLOAT16", "BF16": "DTYPE_BFLOAT16"}
_GUIDE_TYPES = {
    "json": pb.GUIDE_TYPE_JSON,
    "json_schema": pb.GUIDE_TYPE_JSON_SCHEMA,
    "regex": pb.GUIDE_TYPE_REGEX,
    "ebnf_grammar": pb.GUIDE_TYPE_EBNF_GRAMMAR,
    "structural_tag": pb.GUIDE_TYPE_STRUCTURAL_TAG,
}

# Maximum number of rows of a batch, each of which is a request.
_MAX_ROWS = 2048
# A tensor that is not divided into rows is copied for each request of a batch; this is the maximum total size of the
# copies in bytes.
_MAX_COPIED_BYTES = 256 << 20
Fill = Callable[[pb.GenerateRequest, InputTensor], None]


@dataclass(frozen=True, slots=True)
class Field:
    """An input tensor: its usual type, and its effect on the native request."""

    datatype: str
    fill: Fill
    is_optional: bool = True
    dims: tuple[int, ...] = (1,)


def _integer(tensor: InputTensor) -> int:
    return int(_one(tensor, _INTEGERS, "an integer"))


def _number(tensor: InputTensor) -> float:
    return float(_one(tensor, _FLOATS, "a number"))


def _flag(tensor: InputTensor) -> bool:
    return bool(_one(tensor, frozenset({"BOOL"}), "a BOOL"))


def _text(tensor: InputTensor) -> str:
    value = _one(tensor, frozenset({"BYTES"}), "a text (BYTES)")
    return _decode(tensor, value)


def _texts(tensor: InputTensor) -> list[str]:
    if tensor.datatype != "BYTES":
        raise InvalidArgumentError("must be texts (BYTES)", field=tensor.name)
    return [_decode(tensor, value) for value in tensor.values if value]


def _one(tensor: InputTensor, datatypes: frozenset[str], what: str) -> bool | int | float | bytes:
    if tensor.datatype not in datatypes or len(tensor.values) != 1:
        raise InvalidArgumentError(f"must be {what}, one for each request", field=tensor.name)
    return tensor.values[0]


def _decode(tensor: InputTensor, value: object) -> str:
    try:
        return bytes(value).decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise InvalidArgumentError("is not UTF-8", field=tensor.name) from None


def _sampling(name: str, read: Callable[[InputTensor], int | float]) -> Fill:
    return lambda request, tensor: _set(request.sampling, name, read(tensor), tensor)


def _set(message: object, name: str, value: object, tensor: InputTensor) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(str(error), field=tensor.name) from None


def _guide_type(request: pb.GenerateRequest, tensor: InputTensor) -> None:
    name = _text(tensor)
    if name not in _GUIDE_TYPES:
        raise InvalidArgumentError(f"must be one of {', '.join(_GUIDE_TYPES)}", field=tensor.name)
    request.guided_decoding.guide_type = _GUIDE_TYPES[name]


def _prompt_table(request: pb.GenerateRequest, tensor: InputTensor) -> None:
    if tensor.datatype not in _DTYPES or len(tensor.shape) < 2:
        raise InvalidArgumentError("must have the shape [virtual tokens, hidden size]", field=tensor.name)
    data = tensor.data or array("f", (float(value) for value in tensor.values)).tobytes()
    dtype = pb.Tensor.Dtype.Value(_DTYPES[tensor.datatype])
    table = pb.Tensor(name="table", dtype=dtype, shape=tensor.shape[-2:], data=data, is_last=True)
    request.prompt_tuning.table.CopyFrom(table)


def _log_probs(request: pb.GenerateRequest, tensor: InputTensor) -> None:
    if _flag(tensor):
        request.output.log_probs = 0


INPUTS: Mapping[str, Field] = {
    "text_input": Field(
        "BYTES", lambda request, tensor: _set(request, "prompt", _text(tensor), tensor), is_optional=False
    ),
    "max_tokens": Field("INT32", lambda request, tensor: _set(request, "max_tokens", _integer(tensor), tensor)),
    "bad_words": Field("BYTES", lambda request, tensor: request.stopping.bad_words.extend(_texts(tensor)), dims=(-1,)),
    "stop_words": Field(
        "BYTES", lambda request, tensor: request.stopping.stop_words.extend(_texts(tensor)), dims=(-1,)
    ),
    "exclude_input_in_output": Field(
        "BOOL", lambda request, tensor: _set(request.output, "exclude_input_from_output", _flag(tensor), tensor)
    ),
    "end_id": Field("INT32", lambda request, tensor: _set(request.stopping, "end_id", _integer(tensor), tensor)),
    "pad_id": Field("INT32", lambda request, tensor: _set(request.stopping, "pad_id", _integer(tensor), tensor)),
    "top_k": Field("INT32", _sampling("top_k", _integer)),
    "top_p": Field("FP32", _sampling("top_p", _number)),
    "temperature": Field("FP32", _sampling("temperature", _number)),
    "length_penalty": Field("FP32", _sampling("length_penalty", _number)),
    "repetition_penalty": Field("FP32", _sampling("repetition_penalty", _number)),
    "min_tokens": Field("INT32", _sampling("min_tokens", _integer)),
    "min_length": Field("INT32", _sampling("min_tokens", _integer)),
    "presence_penalty": Field("FP32", _sampling("presence_penalty", _number)),
    "frequency_penalty": Field("FP32", _sampling("frequency_penalty", _number)),
    "seed": Field("UINT64", _sampling("seed", _integer)),
    "random_seed": Field("UINT64", _sampling("seed", _integer)),
    "return_log_probs": Field("BOOL", _log_probs),
    "return_context_logits": Field(
        "BOOL", lambda request, tensor: _set(request.output, "return_context_logits", _flag(tensor), tensor)
    ),
    "return_generation_logits": Field(
        "BOOL", lambda request, tensor: _set(request.output, "return_generation_logits", _flag(tensor), tensor)
    ),
    "num_return_sequences": Field("INT32", _sampling("num_return_sequences", _integer)),
    "beam_width": Field("INT32", _sampling("beam_width", _integer)),
    "stream": Field("BOOL", lambda request, tensor: _set(request, "streaming", _flag(tensor), tensor)),
    "prompt_embedding_table": Field("FP32", _prompt_table, dims=(-1, -1)),
    # `native_request` reads these three together with other inputs.
    "prompt_vocab_size": Field("INT32", lambda request, tensor: None),
    "embedding_bias_words": Field("BYTES", lambda request, tensor: None, dims=(-1,)),
    "embedding_bias_weights": Field("FP32", lambda request, tensor: None, dims=(-1,)),
    "lora_task_id": Field("UINT64", lambda request, tensor: _set(request.lora, "name", str(_integer(tensor)), tensor)),
    "guided_decoding_guide_type": Field("BYTES", _guide_type),
    "guided_decoding_guide": Field(
        "BYTES", lambda request, tensor: _set(request.guided_decoding, "guide", _text(tensor), tensor)
    ),
}

OUTPUTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "text_output": ("BYTES", (-1,)),
    "cum_log_probs": ("FP32", (-1,)),
    "output_log_probs": ("FP32", (-1, -1)),
    "context_logits": ("FP32", (-1, -1)),
    "generation_logits": ("FP32", (-1, -1, -1)),
    "batch_index": ("INT32", (1,)),
    "sequence_index": ("INT32", (1,)),
}


# Outputs that are computed only if a flag asks for them.
_FLAGS = {
    "cum_log_probs": "return_log_probs",
    "output_log_probs": "return_log_probs",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
}
_ALIASES = {"min_length": "min_tokens", "random_seed": "seed"}
# Native fields and messages, with the tensors that set them. Fields of `sampling`, `stopping` and `output` that are not
# here have the names of their tensors.
_TENSORS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("text_input",),
    "token_ids": ("text_input",),
    "input": ("text_input",),
    "model": ("model_name",),
    "streaming": ("stream",),
    "sampling": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "sampling.seed": ("seed", "random_seed"),
    "sampling.min_tokens": ("min_tokens", "min_length"),
    "sampling.embedding_bias": ("embedding_bias_words",),
    "output": ("return_context_logits", "return_generation_logits", "context_logits", "generation_logits"),
    "output.exclude_input_from_output": ("exclude_input_in_output",),
    "output.log_probs": ("return_log_probs", "output_log_probs", "cum_log_probs"),
    "output.return_context_logits": ("return_context_logits", "context_logits"),
    "output.return_generation_logits": ("return_generation_logits", "generation_logits"),
    "guided_decoding": ("guided_decoding_guide",),
    "guided_decoding.guide_type": ("guided_decoding_guide_type",),
    "lora": ("lora_task_id",),
    "prompt_tuning": ("prompt_embedding_table",),
}
_SECTIONS = ("sampling.", "stopping.", "output.")


def tensor_of(field: str, given: Collection[str]) -> str:
    """Return the tensor that sets a native field, preferably one of the `given` tensors; the field itself if there is
    none.
    """
    names, outer = _TENSORS.get(field), field
    if names is None and field.startswith(_SECTIONS):
        name = field.partition(".")[2]
        return name if name in INPUTS else field
    while names is None and outer:
        outer = outer.rpartition(".")[0]
        names = _TENSORS.get(outer)
    if names is None:
        return field
    return next((name for name in names if name in given), names[0])


@contextlib.contextmanager
def naming_tensors(given: Collection[str]) -> Iterator[None]:
    """Make errors about native fields name the tensors that set these fields."""
    try:
        yield
    except (InvalidArgumentError, NotFoundError, UnsupportedError) as error:
        name = tensor_of(error.field, given)
        if name == error.field:
            raise
        raise type(error)(error.message, field=name) from None


def check_outputs(names: Sequence[str]) -> frozenset[str]:
    """Return the names of the requested outputs; all outputs if the request names none.

    Raises:
        InvalidArgumentError: The name of an output is unknown.
    """
    for name in names:
        if name not in OUTPUTS:
            raise InvalidArgumentError(f"unknown output {name!r}", field="outputs")
    return frozenset(names or OUTPUTS)


def num_rows(inputs: Mapping[str, InputTensor]) -> int:
    """Return the batch size: the number of rows of text_input.

    Raises:
        InvalidArgumentError: text_input is missing or empty, or has too many rows, or a tensor would be copied for too
            many of them.
    """
    if "text_input" not in inputs:
        raise InvalidArgumentError("must be given", field="text_input")
    shape = inputs["text_input"].shape
    rows = shape[0] if len(shape) > 1 else 1
    if not rows or not inputs["text_input"].values:
        raise InvalidArgumentError("must not be empty", field="text_input")
    if rows > _MAX_ROWS:
        raise InvalidArgumentError(f"has {rows} rows; must have at most {_MAX_ROWS}", field="text_input")
    for tensor in inputs.values():
        if rows > 1 and tensor.row(0, rows) is tensor and tensor.num_bytes * rows > _MAX_COPIED_BYTES:
            reason = f"applies to {rows} rows, and has {tensor.num_bytes} bytes; send fewer rows at a time"
            raise InvalidArgumentError(reason, field=tensor.name)
    return rows


async def native_request(
    inputs: Mapping[str, InputTensor], index: int, rows: int, prompts: PromptBuilder, outputs: Collection[str] = ()
) -> pb.GenerateRequest:
    """Return the native request for one row of the batch.

    Args:
        inputs: All input tensors.
        index: The row.
        rows: Number of rows.
        prompts: Tokenizes the words of `embedding_bias_words`.
        outputs: The outputs that the client names; naming an output requests it, as its flag does.

    Raises:
        InvalidArgumentError: A tensor is unknown, has the wrong type or size, or contradicts another one.
    """
    request = pb.GenerateRequest(streaming=False)
    parts = {name: tensor.row(index, rows) for name, tensor in inputs.items()}
    for name, tensor in parts.items():
        if name not in INPUTS:
            raise InvalidArgumentError("unknown input", field=name)
        INPUTS[name].fill(request, tensor)
    for alias, name in _ALIASES.items():
        if alias in parts and name in parts and list(parts[alias].values) != list(parts[name].values):
            raise InvalidArgumentError(f"is another name for {name}, which has a different value", field=alias)
    _fill_flags(request, parts, outputs)
    if "prompt_vocab_size" in parts and _integer(parts["prompt_vocab_size"]) != _num_virtual_tokens(request):
        raise InvalidArgumentError("must be the number of rows of prompt_embedding_table", field="prompt_vocab_size")
    await _fill_bias(request, parts, prompts)
    return request


def _num_virtual_tokens(request: pb.GenerateRequest) -> int:
    return request.prompt_tuning.table.shape[0] if request.HasField("prompt_tuning") else 0


def _fill_flags(request: pb.GenerateRequest, parts: Mapping[str, InputTensor], outputs: Collection[str]) -> None:
    """Request the named outputs. Raises InvalidArgumentError if the flag of one of them is false."""
    for name, flag in _FLAGS.items():
        # A beam search always reports cum_log_probs.
        if name not in outputs or (name == "cum_log_probs" and request.sampling.beam_width > 1):
            continue
        if flag in parts and not _flag(parts[flag]):
            raise InvalidArgumentError(f"must be true, or left out, for the output {name}", field=flag)
        if flag == "return_log_probs":
            request.output.log_probs = 0
        else:
            setattr(request.output, flag, True)


async def _fill_bias(request: pb.GenerateRequest, parts: Mapping[str, InputTensor], prompts: PromptBuilder) -> None:
    """Add a word's weight to the bias of each of its tokens."""
    words, weights = parts.get("embedding_bias_words"), parts.get("embedding_bias_weights")
    if words is None and weights is None:
        return
    if words is None or weights is None or len(words.values) != len(weights.values):
        raise InvalidArgumentError("must have one weight for each word", field="embedding_bias_weights")
    if weights.datatype != "FP32":
        raise InvalidArgumentError("must be FP32", field="embedding_bias_weights")
    if words.datatype != "BYTES":
        raise InvalidArgumentError("must be texts (BYTES)", field=words.name)
    for word, weight in zip(words.values, weights.values, strict=True):
        if not word:  # the padding of a batch
            continue
        request_of_word = pb.GenerateRequest(prompt=_decode(words, word))
        try:
            ids = await prompts.token_ids(request_of_word, PromptOptions(adds_special_tokens=False))
        except MidstreamError as error:
            raise InvalidArgumentError(error.message, field="embedding_bias_words") from None
        for token in ids:
            request.sampling.embedding_bias[token] += float(weight)


def whole_outputs(results: list[Result]) -> list[OutputTensor]:
    """Return the output tensors of all sequences of all rows, in order."""
    numbered = [(row, index, item) for row, result in enumerate(results) for index, item in enumerate(result.sequences)]
    sequences = [item for _, _, item in numbered]
    tensors = [
        OutputTensor.of_texts("text_output", [item.text for item in sequences]),
        OutputTensor.of_ints("batch_index", [row for row, _, _ in numbered]),
        OutputTensor.of_ints("sequence_index", [index for _, index, _ in numbered]),
    ]
    if any(item.cumulative_log_prob is not None for item in sequences):
        sums = [item.cumulative_log_prob or 0.0 for item in sequences]
        tensors.append(OutputTensor.of_floats("cum_log_probs", [len(sums)], sums))
    rows = [
        item.extras.log_probs.token_log_probs if item.extras and item.extras.log_probs else () for item in sequences
    ]
    longest = max(map(len, rows))
    if longest:
        flat = [value for row in rows for value in (*row, *[0.0] * (longest - len(row)))]
        tensors.append(OutputTensor.of_floats("output_log_probs", [len(rows), longest], flat))
    for name in ("context_logits", "generation_logits"):
        parts = [item.tensors[name] for item in sequences if name in item.tensors]
        if len(parts) == 1:
            tensors.append(OutputTensor(name, "FP32", parts[0].shape, parts[0].data))
        elif parts:
            longest = max(part.shape[0] for part in parts)
            size = 4 * parts[0].shape[1]
            data = b"".join(part.data + bytes(size * (longest - part.shape[0])) for part in parts)
            tensors.append(OutputTensor(name, "FP32", (len(parts), longest, parts[0].shape[1]), data))
    return tensors


def piece_outputs(chunk: Chunk, batch_index: int) -> list[OutputTensor]:
    tensors = [
        OutputTensor.of_texts("text_output", [chunk.text]),
        OutputTensor.of_index("batch_index", batch_index),
        OutputTensor.of_index("sequence_index", chunk.sequence_index),
    ]
    if chunk.cumulative_log_prob is not None:
        tensors.append(OutputTensor.of_floats("cum_log_probs", [1], [chunk.cumulative_log_prob]))
    if chunk.extras is not None:
        if chunk.extras.log_probs is not None:
            values = chunk.extras.log_probs.token_log_probs
            tensors.append(OutputTensor.of_floats("output_log_probs", [1, len(values)], values))
        tensors += [OutputTensor(item.name, "FP32", item.shape, item.data) for item in chunk.extras.tensors]
    return tensors
