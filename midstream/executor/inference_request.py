"""The batch manager's requests: a map of named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import InvalidArgumentError
from midstream.executor.output_config import OutputConfig
from midstream.executor.request import LogitsPostProcessor, Request
from midstream.executor.request_parts import ExternalDraftTokensConfig, LoraConfig, PromptTuningConfig
from midstream.executor.sampling_config import SamplingConfig
from midstream.executor.tensors import AnyTensor, values_of

# TensorRT-LLM's names of tensors, by the name of the attribute; other attributes are named as their tensor.
_TENSOR_NAMES = {"max_new_tokens": "request_output_len", "length_penalty": "len_penalty"}
_ATTRIBUTES = (
    "input_ids",
    "draft_input_ids",
    "draft_logits",
    "max_new_tokens",
    "beam_width",
    "end_id",
    "pad_id",
    "bad_words_list",
    "stop_words_list",
    "embedding_bias",
    "temperature",
    "runtime_top_k",
    "runtime_top_p",
    "length_penalty",
    "early_stopping",
    "repetition_penalty",
    "min_length",
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "prompt_embedding_table",
    "prompt_vocab_size",
    "lora_task_id",
    "lora_weights",
    "lora_config",
)
_MAX_ID = 2**64 - 1


@dataclass(slots=True)
class NamedTensor:
    """A tensor in a response."""

    tensor: AnyTensor
    name: str


class InferenceRequest:
    """A request with an id chosen by the caller, an unsigned 64-bit integer, and tensors. Each tensor is also an
    attribute, None if it is not set: `input_ids`, `max_new_tokens`, `beam_width`, `end_id`, `pad_id`, `bad_words_list`,
    `stop_words_list`, `embedding_bias`, `temperature`, `runtime_top_k`, `runtime_top_p`, `length_penalty`,
    `early_stopping`, `repetition_penalty`, `min_length`, `presence_penalty`, `frequency_penalty`, `random_seed`,
    `return_log_probs`, `return_context_logits`, `return_generation_logits`, `prompt_embedding_table`,
    `prompt_vocab_size`, `lora_task_id`, `lora_weights`, `lora_config`, `draft_input_ids`, `draft_logits`.

    Attributes:
        request_id: The id.
        is_streaming: Whether there is a response for each new token.
        tensors: The tensors by TensorRT-LLM's name.
        logits_post_processor: A function of this process.
    """

    def __init__(
        self,
        request_id: int,
        tensors: Mapping[str, AnyTensor] | LogitsPostProcessor | None = None,
        logits_post_processor_callback: LogitsPostProcessor | None = None,
    ) -> None:
        """Create a request.

        Raises:
            InvalidArgumentError: The id is not an unsigned 64-bit integer, or there is no tensor of such a name.
        """
        if not 0 <= request_id <= _MAX_ID:
            raise InvalidArgumentError(f"is {request_id}; must be an unsigned 64-bit number", field="request_id")
        self.request_id = request_id
        self.is_streaming = False
        self.tensors: dict[str, AnyTensor] = {}
        self.logits_post_processor: Callable[..., Any] | None = logits_post_processor_callback
        if callable(tensors):
            self.logits_post_processor = tensors
        else:
            for name, tensor in (tensors or {}).items():
                if name not in _NAMES:
                    raise InvalidArgumentError(f"there is no tensor {name!r}", field="tensors")
                self.tensors[name] = tensor

    def __getattr__(self, name: str) -> AnyTensor | None:
        if name not in _ATTRIBUTES:
            raise AttributeError(name)
        return self.tensors.get(_TENSOR_NAMES.get(name, name))

    def __setattr__(self, name: str, value: AnyTensor) -> None:
        if name in _ATTRIBUTES:
            self.tensors[_TENSOR_NAMES.get(name, name)] = value
        elif name in ("request_id", "is_streaming", "tensors", "logits_post_processor"):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(f"there is no tensor {name!r}")

    def to_request(self) -> Request:
        """Return the executor's request.

        Raises:
            InvalidArgumentError: A tensor is missing or has the wrong shape.
        """
        table = self.prompt_embedding_table
        return Request(
            input_token_ids=self._list("input_ids") or [],
            max_tokens=int(self._required("max_new_tokens")),
            streaming=self.is_streaming,
            sampling_config=SamplingConfig(
                int(self._scalar("beam_width") or 1),
                top_k=self._scalar("runtime_top_k"),
                top_p=self._scalar("runtime_top_p"),
                seed=self._scalar("random_seed"),
                temperature=self._scalar("temperature"),
                min_tokens=self._scalar("min_length"),
                repetition_penalty=self._scalar("repetition_penalty"),
                presence_penalty=self._scalar("presence_penalty"),
                frequency_penalty=self._scalar("frequency_penalty"),
                length_penalty=self._scalar("length_penalty"),
                early_stopping=self._scalar("early_stopping"),
            ),
            output_config=OutputConfig(
                bool(self._scalar("return_log_probs")),
                bool(self._scalar("return_context_logits")),
                bool(self._scalar("return_generation_logits")),
            ),
            end_id=self._scalar("end_id"),
            pad_id=self._scalar("pad_id"),
            bad_words=self._words("bad_words_list"),
            stop_words=self._words("stop_words_list"),
            embedding_bias=self.embedding_bias,
            external_draft_tokens_config=None
            if self.draft_input_ids is None
            else ExternalDraftTokensConfig(self._list("draft_input_ids") or [], self.draft_logits),
            prompt_tuning_config=None if table is None else PromptTuningConfig(table),
            lora_config=None
            if self.lora_task_id is None
            else LoraConfig(int(self._required("lora_task_id")), self.lora_weights, self.lora_config),
            logits_post_processor=self.logits_post_processor,
        )

    def _scalar(self, name: str) -> Any:
        tensor = getattr(self, name)
        if tensor is None:
            return None
        values = values_of(tensor, name) if not isinstance(tensor, int | float) else tensor
        while isinstance(values, list):
            if len(values) != 1:
                raise InvalidArgumentError(f"has {len(values)} values; must have one", field=name)
            values = values[0]
        return values

    def _required(self, name: str) -> Any:
        value = self._scalar(name)
        if value is None:
            raise InvalidArgumentError("must be set", field=_TENSOR_NAMES.get(name, name))
        return value

    def _list(self, name: str) -> list[int] | None:
        tensor = getattr(self, name)
        if tensor is None:
            return None
        values = values_of(tensor, name)
        while len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        return list(values)

    def _words(self, name: str) -> list[list[int]] | None:
        """Return the words of a tensor [1, 2, length]: all tokens, and the end of each word, filled up with -1."""
        tensor = getattr(self, name)
        if tensor is None:
            return None
        values = values_of(tensor, name)
        while len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        if len(values) != 2 or not isinstance(values[0], list):
            raise InvalidArgumentError("must have the shape [1, 2, length]", field=name)
        tokens, ends = values
        words, start = [], 0
        for end in ends:
            if end < 0:
                break
            words.append(tokens[start:end])
            start = end
        return words


_NAMES = {_TENSOR_NAMES.get(name, name) for name in _ATTRIBUTES} | {"input_lengths"}
