"""Requests to a GenerationExecutor. The names are TensorRT-LLM's; each field maps to a field of the native request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from midstream.client import request as native
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.request import DEFAULT_PRIORITY, service_priority
from midstream.executor.request_parts import DraftTargetDecodingConfig, KvCacheRetentionConfig, NGramDecodingConfig
from midstream.executor.sampling_params import SamplingParams
from protos import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter; it is loaded from `lora_path`, a folder in PEFT's format, unless the service already has it."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt-tuning adapter; it is loaded from `prompt_adapter_local_path` unless the service already has it."""

    prompt_adapter_name: str
    prompt_adapter_id: int = 0
    prompt_adapter_local_path: str = ""


@dataclass(frozen=True, slots=True)
class MultimodalParams:
    """Images, or the output of a multimodal encoder.

    Attributes:
        multimodal_data: `{"image": images}`, for a model that reads images and a prompt of text with its image token
            for each: one image or a list, each as the contents of a file (PNG, JPEG, WebP, GIF, AVIF, BMP, TIFF) or an
            image of Pillow. Or `{"multimodal_embedding": array}`, [tokens, hidden size]: token id vocabulary size + i
            in the prompt stands for row i; a prompt without such ids begins with all rows.
    """

    multimodal_data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> list[bytes]:
        """The contents of the images' files.

        Raises:
            InvalidArgumentError: A value is not an image.
        """
        images = self.multimodal_data.get("image", [])
        return [_contents(item) for item in (images if isinstance(images, list | tuple) else [images])]

    @property
    def embedding(self) -> native.Array | None:
        """The embeddings.

        Raises:
            UnsupportedError: Other media than images were given, which require an encoder.
        """
        unknown = self.multimodal_data.keys() - {"multimodal_embedding", "image"}
        if unknown:
            raise UnsupportedError(
                f"no encoder for {', '.join(sorted(unknown))}; pass its output as multimodal_embedding",
                field="multimodal_params",
            )
        return self.multimodal_data.get("multimodal_embedding")


@dataclass(slots=True)
class GenerationRequest:
    """One request.

    Attributes:
        prompt_token_ids: Prompt tokens, or text; None if `prompt_embeddings` is set.
        sampling_params: Sampling parameters.
        max_tokens: Overrides `max_tokens` of `sampling_params`.
        query_token_ids: Tokens appended to `prompt_token_ids`. Requests with the same prompt and different queries
            share the prompt's KV blocks.
        streaming: Whether to return output as it is generated; otherwise it is returned once per sequence, at its end.
        multimodal_params: Images, or the output of a multimodal encoder, which sets `prompt_tuning_table`.
        priority: 0..1; requests of higher priority run sooner.
        arrival_time: Seconds since the epoch; None means the time when the router receives the request.
        client_id: The client that sends the request, for fairness and logits post-processors.
        timeout_s: Deadline in seconds.
        prompt_tuning_table: Virtual tokens [count, hidden size], such as a numpy array of float32 or float16; token id
            vocabulary size + i stands for row i, and a prompt without such ids begins with all rows.
        prompt_embeddings: The whole prompt [tokens, hidden size], as an array of the same kinds.
        speculative_config: Speculative decoding, which changes only the speed.
        id: Id of the request, assigned by the executor.
    """

    prompt_token_ids: Sequence[int] | str | None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    query_token_ids: Sequence[int] | None = None
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    streaming: bool = False
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    multimodal_params: MultimodalParams | None = None
    arrival_time: float | None = None
    priority: float = DEFAULT_PRIORITY
    client_id: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    prompt_tuning_table: native.Array | None = None
    prompt_embeddings: native.Array | None = None
    speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None
    id: int = 0

    def to_proto(self) -> pb.GenerateRequest:
        """Return the native request, without its id.

        Raises:
            InvalidArgumentError: A value is invalid for its field. The router checks ranges.
        """
        request = pb.GenerateRequest()
        native.set_fields(
            request,
            streaming=self.streaming,
            priority=service_priority(self.priority),
            client_id=self.client_id,
            cache_salt=self.cache_salt,
        )
        self._set_input(request)
        self.sampling_params.fill(request)
        native.set_fields(request, max_tokens=self.max_tokens)
        if self.lora_request is not None:
            with native.naming("lora_request"):
                request.lora.name = self.lora_request.lora_name
                request.lora.path = _absolute(self.lora_request.lora_path)
        if self.prompt_adapter_request is not None:
            with native.naming("prompt_adapter_request"):
                request.prompt_tuning.name = self.prompt_adapter_request.prompt_adapter_name
                request.prompt_tuning.path = _absolute(self.prompt_adapter_request.prompt_adapter_local_path)
        if self.kv_cache_retention_config is not None:
            with native.naming("kv_cache_retention_config"):
                request.kv_retention.CopyFrom(self.kv_cache_retention_config.to_proto())
        if self.speculative_config is not None:
            request.speculative.CopyFrom(self.speculative_config.to_proto())
        if self.arrival_time is not None:
            with native.naming("arrival_time"):
                request.arrival_time_unix_ns = int(self.arrival_time * 1e9)
        return request

    @property
    def known_token_ids(self) -> list[int]:
        """The tokens of the prompt; empty if it is text or embeddings."""
        prompt = self.prompt_token_ids
        if prompt is None or isinstance(prompt, str):
            return []
        limit = self.sampling_params.truncate_prompt_tokens
        return [*prompt, *(self.query_token_ids or ())][-limit if limit else 0 :]

    def set_id(self, request_id: int) -> None:
        """Set the id."""
        self.id = request_id

    def _set_input(self, request: pb.GenerateRequest) -> None:
        self._set_table(request)
        prompt, limit = self.prompt_token_ids, self.sampling_params.truncate_prompt_tokens
        if self.prompt_embeddings is not None:
            if prompt is not None:
                raise InvalidArgumentError("must be None if prompt_embeddings is set", field="prompt_token_ids")
            request.prompt_embeddings.CopyFrom(native.tensor_of(self.prompt_embeddings, "prompt_embeddings"))
        elif prompt is None:
            raise InvalidArgumentError("must be given", field="prompt_token_ids")
        elif isinstance(prompt, str):
            native.set_input(request, prompt, None, None, None)
        else:
            with native.naming("prompt_token_ids"):
                request.token_ids.values.extend(prompt)
                request.token_ids.SetInParent()
        if self.query_token_ids is not None:
            if not request.HasField("token_ids"):
                raise InvalidArgumentError("requires a prompt of token ids", field="query_token_ids")
            with native.naming("query_token_ids"):
                request.token_ids.values.extend(self.query_token_ids)
        if limit is not None:
            if not request.HasField("token_ids"):
                raise InvalidArgumentError("requires a prompt of token ids", field="truncate_prompt_tokens")
            del request.token_ids.values[: -limit or None]

    def _set_table(self, request: pb.GenerateRequest) -> None:
        table = self.prompt_tuning_table
        if self.multimodal_params is not None:
            if table is not None:
                raise InvalidArgumentError("cannot be combined with prompt_tuning_table", field="multimodal_params")
            table = self.multimodal_params.embedding
            request.images.extend(pb.Image(data=item) for item in self.multimodal_params.images)
        if table is not None:
            if self.prompt_adapter_request is not None:
                field = "multimodal_params" if self.multimodal_params else "prompt_tuning_table"
                raise InvalidArgumentError(f"cannot be combined with {field}", field="prompt_adapter_request")
            request.prompt_tuning.table.CopyFrom(native.tensor_of(table, "prompt_tuning_table"))


def _contents(image: Any) -> bytes:
    """Return the contents of an image's file; an image of Pillow becomes a PNG file."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not hasattr(image, "save"):
        raise InvalidArgumentError(
            f"must be the contents of files or images of Pillow, not {type(image).__name__}", field="multimodal_params"
        )
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _absolute(path: str) -> str:
    """Return the absolute path, since workers may have another working directory."""
    return str(Path(path).absolute()) if path else ""
