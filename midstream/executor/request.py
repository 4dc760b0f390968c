"""What is asked of the executor. Names are TensorRT-LLM's; each becomes a field of the native request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from midstream.client import request as native
from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb

_KEEP_PRIORITY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams:
    """What the output must look like: one of the four.

    Attributes:
        json: A JSON schema, as text or as a mapping.
        json_object: Any JSON.
        regex: A regular expression.
        grammar: A grammar in EBNF.
    """

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def to_proto(self) -> pb.GuidedDecodingConfig:
        """The message.

        Raises:
            InvalidArgumentError: None or several are given.
        """
        given = [
            (pb.GUIDE_TYPE_JSON_SCHEMA, self.json if isinstance(self.json, str | None) else json.dumps(self.json)),
            (pb.GUIDE_TYPE_JSON, "" if self.json_object else None),
            (pb.GUIDE_TYPE_REGEX, self.regex),
            (pb.GUIDE_TYPE_EBNF_GRAMMAR, self.grammar),
        ]
        chosen = [(kind, guide) for kind, guide in given if guide is not None]
        if len(chosen) != 1:
            raise InvalidArgumentError("give one of json, json_object, regex and grammar", field="guided_decoding")
        kind, guide = chosen[0]
        return pb.GuidedDecodingConfig(guide_type=kind, guide=guide)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(native.SamplingParams):
    """The client's parameters, and TensorRT-LLM's other names for some of them.

    Attributes:
        n: num_return_sequences.
        use_beam_search: Search with `beam_width`, or `n`, beams.
        random_seed: seed.
        bad: bad_words; one or several.
        include_stop_str_in_output: include_stop_in_output.
        logprobs: log_probs.
        prompt_logprobs: prompt_log_probs.
        return_context_logits: Logits of every prompt token.
        return_generation_logits: Logits of every generated token.
        additional_model_outputs: Named outputs such as `hidden_states.0`; `(name, True)` for the prompt's tokens too.
        guided_decoding: What the output must look like.
        logits_processor: Name of a logits post-processor that the workers have.
    """

    n: int | None = None
    use_beam_search: bool = False
    random_seed: int | None = None
    bad: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    additional_model_outputs: Sequence[str | tuple[str, bool]] = ()
    guided_decoding: GuidedDecodingParams | None = None
    logits_processor: str = ""

    def fill(self, request: pb.GenerateRequest) -> None:
        """Sets the request's fields.

        Raises:
            InvalidArgumentError: A value that its field cannot hold.
        """
        native.SamplingParams.fill(self, request)
        sampling, output = request.sampling, request.output
        if self.n is not None:
            sampling.num_return_sequences = self.n
        if self.use_beam_search and self.beam_width is None:
            sampling.beam_width = self.n or 1
        if self.random_seed is not None:
            sampling.seed = self.random_seed
        if self.logprobs is not None:
            output.log_probs = self.logprobs
        if self.prompt_logprobs is not None:
            output.prompt_log_probs = self.prompt_logprobs
        if self.bad is not None:
            request.stopping.bad_words.extend([self.bad] if isinstance(self.bad, str) else self.bad)
        request.stopping.include_stop_in_output |= self.include_stop_str_in_output
        output.return_context_logits = self.return_context_logits
        output.return_generation_logits = self.return_generation_logits
        for item in self.additional_model_outputs:
            name, gather_context = (item, False) if isinstance(item, str) else item
            output.additional_outputs.add(name=name, gather_context=gather_context)
        if self.guided_decoding is not None:
            request.guided_decoding.CopyFrom(self.guided_decoding.to_proto())
        request.logits_post_processor_name = self.logits_processor


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A low-rank adapter; it is loaded from `lora_path`, a folder in PEFT's format, where the service lacks it."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt-tuning adapter; it is loaded from `prompt_adapter_local_path` where the service lacks it."""

    prompt_adapter_name: str
    prompt_adapter_id: int = 0
    prompt_adapter_local_path: str = ""


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """How long the cached blocks of a range of the prompt are kept.

    Attributes:
        token_start: First token.
        token_end: Behind the last one; None: the prompt's end.
        priority: 0..100; blocks of lower priority go first. 35 is everybody's.
        duration_ms: For how long; None: as long as the block lives.
    """

    token_start: int
    token_end: int | None = None
    priority: int = 35
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheRetentionConfig:
    """Which cached blocks to keep longer: `max_tokens` from the prompt's start, or ranges of it."""

    max_tokens: int | None = None
    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int | None = None
    decode_duration_ms: int | None = None

    def to_proto(self) -> pb.KvRetentionConfig:
        """The message."""
        config = pb.KvRetentionConfig(
            decode_priority=self.decode_retention_priority, decode_duration_ms=self.decode_duration_ms
        )
        ranges = list(self.token_range_retention_configs)
        if self.max_tokens is not None:
            ranges.append(TokenRangeRetentionConfig(0, self.max_tokens, _KEEP_PRIORITY))
        for item in ranges:
            config.token_ranges.add(
                start=item.token_start, end=item.token_end, priority=item.priority, duration_ms=item.duration_ms
            )
        return config


@dataclass(slots=True)
class GenerationRequest:
    """One request.

    Attributes:
        prompt: Its tokens, or text.
        sampling_params: How tokens are chosen.
        streaming: Output comes as it is made; else once per sequence, at its end.
        arrival_time: Seconds since the epoch; None: when the router gets it.
        client_id: Whose it is, for fairness and logits post-processors.
        timeout_s: Its deadline.
        id: Given by the executor.
    """

    prompt: Sequence[int] | str
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    streaming: bool = False
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    arrival_time: float | None = None
    priority: int = 0
    client_id: str = ""
    cache_salt: str = ""
    timeout_s: float | None = None
    id: int = 0

    def to_proto(self) -> pb.GenerateRequest:
        """The native request, without its id.

        Raises:
            InvalidArgumentError: A value that its field cannot hold. Ranges are the router's to check.
        """
        request = pb.GenerateRequest(
            streaming=self.streaming, priority=self.priority, client_id=self.client_id, cache_salt=self.cache_salt
        )
        text = self.prompt if isinstance(self.prompt, str) else None
        native.set_input(request, text, None if isinstance(self.prompt, str) else self.prompt, None, None)
        self.sampling_params.fill(request)
        if self.lora_request is not None:
            request.lora.name = self.lora_request.lora_name
            request.lora.path = _absolute(self.lora_request.lora_path)
        if self.prompt_adapter_request is not None:
            request.prompt_tuning.name = self.prompt_adapter_request.prompt_adapter_name
            request.prompt_tuning.path = _absolute(self.prompt_adapter_request.prompt_adapter_local_path)
        if self.kv_cache_retention_config is not None:
            request.kv_retention.CopyFrom(self.kv_cache_retention_config.to_proto())
        if self.arrival_time is not None:
            request.arrival_time_unix_ns = int(self.arrival_time * 1e9)
        return request


def _absolute(path: str) -> str:
    """Workers have another working directory."""
    return str(Path(path).absolute()) if path else ""
