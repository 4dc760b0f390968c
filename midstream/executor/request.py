"""TensorRT-LLM's `Request`, and its conversion to the service's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

from midstream.client.request import naming, set_fields, tensor_of
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.enums import RequestType
from midstream.executor.output_config import OutputConfig
from midstream.executor.request_parts import (
    ContextPhaseParams,
    DraftTargetDecodingConfig,
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    NGramDecodingConfig,
    PromptTuningConfig,
    milliseconds,
)
from midstream.executor.sampling_config import SamplingConfig
from midstream.executor.tensors import AnyTensor, bias_of, values_of
from protos import generation_pb2 as pb

BATCHED_POST_PROCESSOR_NAME = "batched"
DYNAMIC_POST_PROCESSOR_NAME = "dynamic"
DEFAULT_PRIORITY = 0.5
_PRIORITY_SCALE = 200  # from 0..1 to -100..100

# Changes a request's logits [1, beams, vocab_size] in place, or returns new ones. The other arguments are the request's
# id, the tokens of each beam, the stream (0), and the client's id.
LogitsPostProcessor = Callable[[int, Any, list[list[int]], int, int | None], Any]

# Fields for features that the service lacks, with what to do instead.
_UNSUPPORTED = {
    "mrope_config": "the service computes multimodal positions itself; leave it out",
    "encoder_input_token_ids": "encoder-decoder models are not supported",
    "encoder_input_features": "encoder-decoder models are not supported; pass an encoder's output as "
    "multimodal_embedding",
    "encoder_output_length": "encoder-decoder models are not supported",
    "cross_attention_mask": "encoder-decoder models are not supported",
    "skip_cross_attn_blocks": "encoder-decoder models are not supported",
    "eagle_config": "EAGLE is not supported; use DraftTargetDecodingConfig or LookaheadDecodingConfig",
    "language_adapter_uid": "language adapters are not supported; use lora_config",
}


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        input_token_ids: The prompt.
        max_tokens: Maximum number of tokens to generate.
        streaming: Whether there is a response for each new token; otherwise there is one for each sequence, at its end.
        end_id: The token that ends a sequence; None or -1 means none.
        stop_words: Lists of tokens that end a sequence; they remain in the output.
        embedding_bias: Values to add to the logits [vocab_size].
        external_draft_tokens_config: The client's drafts, or how the workers make drafts.
        multimodal_embedding: Output of a multimodal encoder, as in PromptTuningConfig.
        logits_post_processor_name: A post-processor of LogitsPostProcessorConfig, or one registered in the workers;
            BATCHED_POST_PROCESSOR_NAME is `processor_batched`.
        logits_post_processor: A function of this process, for an executor that has started its services.
        client_id: The client that sends the request; it is returned with responses and passed to post-processors.
        return_all_generated_tokens: Whether each streamed response carries all tokens so far.
        priority: 0..1; requests of higher priority run sooner.
        type: Whether only the first token is computed, or the rest of a request whose first token is in
            `context_phase_params`; the attribute is `request_type`.
        num_return_sequences: Number of sequences, if `sampling_config` does not set it.
        allotted_time_ms: Time after which the request ends with the finish reason TIMED_OUT.
        cache_salt_id: Requests share cached blocks only with requests that have the same salt.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = BATCHED_POST_PROCESSOR_NAME

    input_token_ids: Sequence[int]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    position_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    stop_words: Sequence[Sequence[int]] | None = None
    embedding_bias: AnyTensor | None = None
    external_draft_tokens_config: ExternalDraftTokensConfig | NGramDecodingConfig | DraftTargetDecodingConfig | None = (
        None
    )
    prompt_tuning_config: PromptTuningConfig | None = None
    multimodal_input: MultimodalInput | None = None
    multimodal_embedding: AnyTensor | None = None
    mrope_config: MropeConfig | None = None
    lora_config: LoraConfig | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str | None = None
    logits_post_processor: LogitsPostProcessor | None = None
    encoder_input_token_ids: Sequence[int] | None = None
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    priority: float = DEFAULT_PRIORITY
    type: InitVar[RequestType] = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
    context_phase_params: ContextPhaseParams | None = None
    encoder_input_features: AnyTensor | None = None
    encoder_output_length: int | None = None
    cross_attention_mask: AnyTensor | None = None
    num_return_sequences: int | None = None
    eagle_config: EagleConfig | None = None
    skip_cross_attn_blocks: AnyTensor | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    language_adapter_uid: int | None = None
    allotted_time_ms: timedelta | None = None
    cache_salt_id: int | None = None
    request_type: RequestType = field(init=False)

    def __post_init__(self, type: RequestType) -> None:  # noqa: A002 (TensorRT-LLM's name)
        self.request_type = type

    @property
    def is_beam_search(self) -> bool:
        """Whether this is a beam search, whose beams are all returned together."""
        return self.sampling_config.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences to return, each in its own responses; 1 in a beam search."""
        if self.is_beam_search:
            return 1
        return self.sampling_config.num_return_sequences or self.num_return_sequences or 1

    def to_proto(self) -> pb.GenerateRequest:
        """Return the service's request, without its id and its adapter.

        Raises:
            InvalidArgumentError: A value is invalid for its field. The router checks ranges.
            UnsupportedError: The service lacks a feature.
        """
        self._check()
        message = pb.GenerateRequest(streaming=self.streaming)
        is_first_phase = self.request_type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
        max_tokens = 1 if is_first_phase else self.max_tokens
        set_fields(message, max_tokens=max_tokens, timeout_ms=milliseconds(self.allotted_time_ms))
        with naming("input_token_ids"):
            message.token_ids.values.extend(_ints(self.input_token_ids))
            message.token_ids.SetInParent()
        self.sampling_config.fill(message.sampling)
        if not message.sampling.HasField("num_return_sequences") and not self.is_beam_search:
            set_fields(message.sampling, num_return_sequences=self.num_return_sequences)
        self.output_config.fill(message.output)
        message.output.detokenize = False
        self._fill_stopping(message.stopping)
        if self.embedding_bias is not None:
            with naming("embedding_bias"):
                message.sampling.embedding_bias.update(bias_of(self.embedding_bias))
        table = self._table()
        if table is not None:
            message.prompt_tuning.table.CopyFrom(tensor_of(table, "prompt_tuning_config"))
        drafts = self.external_draft_tokens_config or self.lookahead_config
        if drafts is not None:
            message.speculative.CopyFrom(drafts.to_proto())
        if self.kv_cache_retention_config is not None:
            with naming("kv_cache_retention_config"):
                message.kv_retention.CopyFrom(self.kv_cache_retention_config.to_proto())
        if self.guided_decoding_params is not None:
            message.guided_decoding.CopyFrom(self.guided_decoding_params.to_proto())
        with naming("logits_post_processor_name"):
            message.logits_post_processor_name = self.logits_post_processor_name or ""
        if self.logits_post_processor is not None:
            message.logits_post_processor_name = DYNAMIC_POST_PROCESSOR_NAME
        message.client_id = "" if self.client_id is None else str(self.client_id)
        message.cache_salt = "" if self.cache_salt_id is None else str(self.cache_salt_id)
        message.priority = service_priority(self.priority)
        return message

    def _check(self) -> None:
        if self.max_tokens < 1:
            raise InvalidArgumentError(f"is {self.max_tokens}; must be at least 1", field="max_tokens")
        for name, reason in _UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise UnsupportedError(reason, field=name)
        if self.position_ids is not None and list(self.position_ids) != list(range(len(self.input_token_ids))):
            raise UnsupportedError("positions are consecutive, from 0; leave it out", field="position_ids")
        self._check_phase()
        for name in ("bad_words", "stop_words"):
            if any(isinstance(word, str) for word in getattr(self, name) or ()):
                raise InvalidArgumentError("must be lists of token ids; SamplingParams takes texts", field=name)

    def _check_phase(self) -> None:
        """Check a request whose phases run on two executors. The second one computes the prompt again, unless its
        service has it in its cache, and the same tokens.
        """
        params, is_second = self.context_phase_params, self.request_type is RequestType.REQUEST_TYPE_GENERATION_ONLY
        if is_second != (params is not None):
            raise InvalidArgumentError("must be set if request_type is GENERATION_ONLY", field="context_phase_params")
        if params is not None and params.opaque_state is not None:
            raise UnsupportedError("KV blocks are not transferred; leave it out", field="opaque_state")
        is_whole = self.request_type is RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION
        if not is_whole and (self.is_beam_search or self.num_sequences > 1):
            raise UnsupportedError("must be CONTEXT_AND_GENERATION with several sequences", field="request_type")

    def _fill_stopping(self, stopping: pb.StoppingConfig) -> None:
        if self.end_id is None or self.end_id < 0:
            stopping.ignore_eos = True
        else:
            set_fields(stopping, end_id=self.end_id)
        if self.pad_id is not None and self.pad_id >= 0:
            set_fields(stopping, pad_id=self.pad_id)
        with naming("bad_words"):
            stopping.bad_word_token_ids.extend(pb.TokenIds(values=ids) for ids in self.bad_words or ())
        with naming("stop_words"):
            for ids in self.stop_words or ():
                if len(ids) == 1:
                    stopping.stop_token_ids.append(ids[0])
                else:
                    stopping.stop_word_token_ids.add(values=ids)

    def _table(self) -> AnyTensor | None:
        if self.multimodal_embedding is None:
            return None if self.prompt_tuning_config is None else self.prompt_tuning_config.embedding_table
        if self.prompt_tuning_config is not None:
            raise InvalidArgumentError("cannot be combined with prompt_tuning_config", field="multimodal_embedding")
        return self.multimodal_embedding


def service_priority(priority: float) -> int:
    """Return the service's priority, -100..100, for one of TensorRT-LLM, 0..1.

    Raises:
        InvalidArgumentError: It is not in 0..1.
    """
    if not 0 <= priority <= 1:
        raise InvalidArgumentError(f"is {priority}; must be at least 0 and at most 1", field="priority")
    return round((priority - DEFAULT_PRIORITY) * _PRIORITY_SCALE)


def _ints(tokens: Sequence[int] | AnyTensor) -> list[int]:
    return list(values_of(tokens, "input_token_ids")) if hasattr(tokens, "tolist") else list(tokens)
