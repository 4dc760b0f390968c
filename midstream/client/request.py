"""Request parameters, and their conversion to the protobuf message."""

from __future__ import annotations

import contextlib
import json
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from google.protobuf import message as pb_message
from google.protobuf.descriptor import FieldDescriptor

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb

# A chat turn has `role`, `content` and `reasoning_content`, and for tools `tool_calls` (a list), `tool_call_id` and
# `name`.
Message = Mapping[str, object]
_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: f"an integer from {-(1 << 31)} to {(1 << 31) - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"an integer from {-(1 << 63)} to {(1 << 63) - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {(1 << 32) - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {(1 << 64) - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_ENUM: "one of the field's values",
    FieldDescriptor.CPPTYPE_STRING: "text",
}
_WORDS = "text, or a list of texts"
_IDS = "token ids, which are integers from 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters. None means the service's default, which is given in protos/generation.proto.

    Attributes:
        max_tokens: Maximum number of tokens per sequence.
        temperature: Sampling temperature; 0 is greedy.
        seed: The same seed gives the same output.
        stop: Text or texts that end a sequence; the output includes them only with include_stop_in_output.
        penalize_prompt: Whether presence_penalty and frequency_penalty count the tokens of the prompt as well.
        stop_token_ids: Tokens that end a sequence.
        stop_word_token_ids: Sequences of tokens that end a sequence; the output includes them.
        bad_words: Text or texts that may not be generated, with and without a leading space.
        bad_word_token_ids: Forbidden sequences of tokens.
        end_id: Token that ends a sequence, instead of the model's end ids.
        ignore_eos: Continue past the model's end ids.
        embedding_bias: Value to add to the logit of each token id.
        allowed_token_ids: The only tokens that may be generated, end tokens included; empty allows all.
        num_return_sequences: Number of independent sequences; with beam search, number of beams to return (default:
            all).
        log_probs: Report the log probabilities of each token and of this number of most likely tokens.
        prompt_log_probs: The same for the prompt's tokens, from the second one on.
        return_context_logits, return_generation_logits: Report logits, as tensors in the result.
        additional_outputs: Names of further tensors; if the value is True, they are reported for the prompt as well.
        exclude_input_from_output: If False, the output begins with the prompt.
        return_all_generated_tokens: Whether each chunk carries all output so far.
        return_receipt: Whether the result has the request's receipt.
    """

    max_tokens: int | None = None
    beam_width: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_id: int | None = None
    min_p: float | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    penalize_prompt: bool = False
    embedding_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_word_token_ids: Sequence[Sequence[int]] = ()
    bad_words: str | Sequence[str] = ()
    bad_word_token_ids: Sequence[Sequence[int]] = ()
    end_id: int | None = None
    pad_id: int | None = None
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    additional_outputs: Mapping[str, bool] | None = None
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    return_all_generated_tokens: bool = False
    return_receipt: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def fill(self, request: pb.GenerateRequest) -> None:
        """Set the request's fields.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
        """
        set_fields(request, max_tokens=self.max_tokens)
        set_fields(request.sampling, **self._values(_SAMPLING_FIELDS))
        set_fields(request.stopping, **self._values(_STOPPING_FIELDS))
        set_fields(request.output, **self._values(_OUTPUT_FIELDS))
        with naming("embedding_bias", f"a map from {_IDS} to numbers"):
            request.sampling.embedding_bias.update(self.embedding_bias or {})
        with naming("allowed_token_ids", f"a list of {_IDS}"):
            request.sampling.allowed_token_ids.extend(self.allowed_token_ids)
        with naming("stop", _WORDS):
            request.stopping.stop_words.extend(words_of(self.stop))
        with naming("stop_token_ids", f"a list of {_IDS}"):
            request.stopping.stop_token_ids.extend(self.stop_token_ids)
        with naming("bad_words", _WORDS):
            request.stopping.bad_words.extend(words_of(self.bad_words))
        with naming("bad_word_token_ids", f"a list of lists of {_IDS}"):
            request.stopping.bad_word_token_ids.extend(pb.TokenIds(values=ids) for ids in self.bad_word_token_ids)
        with naming("stop_word_token_ids", f"a list of lists of {_IDS}"):
            request.stopping.stop_word_token_ids.extend(pb.TokenIds(values=ids) for ids in self.stop_word_token_ids)
        with naming("additional_outputs", "a map from names to booleans"):
            for name, gathers in (self.additional_outputs or {}).items():
                request.output.additional_outputs.add(name=name, gather_context=gathers)

    def _values(self, names: Iterable[str]) -> dict[str, object]:
        return {name: getattr(self, name) for name in names}


def set_fields(message: pb_message.Message, **values: object) -> None:
    """Set a message's fields, except those whose value is None.

    Raises:
        InvalidArgumentError: A value is invalid for its field.
    """
    for name, value in values.items():
        if value is not None:
            kind = _KINDS[message.DESCRIPTOR.fields_by_name[name].cpp_type]
            with naming(name, f"{kind}, not {reprlib.repr(value)}"):
                setattr(message, name, value)


@contextlib.contextmanager
def naming(field: str, expected: str = "") -> Iterator[None]:
    """Convert an exception for a value of the wrong type or size into an InvalidArgumentError that names the field and
    says what is expected, instead of what protobuf or Python says.
    """
    try:
        yield
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        reason = f"must be {expected}" if expected else f"has a value of the wrong type or size ({error})"
        raise InvalidArgumentError(reason, field=field) from None


def words_of(words: str | Sequence[str]) -> Sequence[str]:
    """Return one word or several words as a list."""
    return [words] if isinstance(words, str) else words


_OWN_FIELDS = {field.name for field in fields(SamplingParams)}
_SAMPLING_FIELDS = sorted(
    _OWN_FIELDS.intersection(pb.SamplingConfig.DESCRIPTOR.fields_by_name) - {"embedding_bias", "allowed_token_ids"}
)
_STOPPING_FIELDS = ("end_id", "pad_id", "ignore_eos", "include_stop_in_output")
_OUTPUT_FIELDS = sorted(_OWN_FIELDS.intersection(pb.OutputConfig.DESCRIPTOR.fields_by_name) - {"additional_outputs"})


class Array(Protocol):
    """The part of numpy's array interface that is used here; a torch.Tensor will do, too."""

    @property
    def dtype(self) -> object:
        """Type name, such as `float32`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size along each axis."""

    def tobytes(self) -> bytes:
        """Return the contents in row-major order."""


def tensor_of(values: Array, field: str) -> pb.Tensor:
    """Return the array as a message.

    Raises:
        InvalidArgumentError: The value is not an array, or its type is not supported.
    """
    with naming(field):
        dtype, shape = str(values.dtype).removeprefix("torch."), values.shape
        if "torch" in sys.modules and isinstance(values, sys.modules["torch"].Tensor):
            # As bytes, since numpy has no bfloat16.
            values = values.detach().cpu().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        dtype = f"DTYPE_{dtype}".upper()
        return pb.Tensor(dtype=pb.Tensor.Dtype.Value(dtype), shape=shape, data=values.tobytes())


def set_input(
    request: pb.GenerateRequest,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Message] | None,
    tools: Sequence[Mapping[str, object]] | None,
) -> None:
    """Set the request's input to the one argument that is given.

    Raises:
        InvalidArgumentError: None or several of them are given, or a value has the wrong type.
    """
    if sum(item is not None for item in (prompt, token_ids, messages)) != 1:
        raise InvalidArgumentError("set exactly one of prompt, token_ids and messages", field="prompt")
    if tools and messages is None:
        raise InvalidArgumentError("requires messages, since the chat template presents tools", field="tools")
    with naming("prompt" if prompt is not None else "token_ids" if token_ids is not None else "messages"):
        if prompt is not None:
            request.prompt = prompt
        elif token_ids is not None:
            request.token_ids.values.extend(token_ids)
            request.token_ids.SetInParent()
        else:
            request.chat.messages.extend(_message(message) for message in messages or ())
            request.chat.SetInParent()
            request.chat.tools_json = json.dumps(tools) if tools else ""


_TURN_TEXTS = {"role", "content", "reasoning_content", "tool_call_id", "name"}


def _message(message: Message) -> pb.ChatMessage:
    if not isinstance(message, Mapping):
        raise TypeError(f"a chat turn is a mapping with role and content; got {message!r}")
    # In OpenAI's format, turns with tool calls may have the content None.
    message = {key: value for key, value in message.items() if value is not None}
    texts = {key: value for key, value in message.items() if key != "tool_calls" and isinstance(value, str)}
    unknown = message.keys() - texts.keys() - {"tool_calls"}
    if unknown or not texts.keys() <= _TURN_TEXTS:
        raise ValueError(
            "a chat turn may have the strings role, content, reasoning_content, tool_call_id and name, and a list "
            f"tool_calls; got {message}"
        )
    calls = message.get("tool_calls")
    turn = pb.ChatMessage(tool_calls_json=json.dumps(calls) if calls else "")
    for name, text in texts.items():
        setattr(turn, name, text)
    return turn
