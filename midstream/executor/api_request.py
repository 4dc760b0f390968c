"""The Executor API's requests, with the fields of TensorRT-LLM's `executor::Request`, in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from midstream.client.request import Array
from midstream.errors import UnsupportedError
from midstream.executor.config import BATCHED_POST_PROCESSOR_NAME
from midstream.executor.output import AdditionalModelOutput
from midstream.executor.request import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    NGramDecodingConfig,
    PromptAdapterRequest,
)
from midstream.executor.sampling_params import GuidedDecodingParams, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Sampling parameters; None means the service's default. See docs/requests.md for the ranges."""

    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    num_return_sequences: int | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Outputs in addition to tokens.

    Attributes:
        exclude_input_from_output: If False, the output begins with the prompt.
        return_encoder_output: Must be False; encoder-decoder models are not supported.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Sequence[AdditionalModelOutput] = ()


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        input_token_ids: The prompt.
        max_tokens: Maximum number of tokens to generate.
        streaming: Whether to respond as tokens are generated; otherwise there is one response, at the end of each
            sequence.
        return_all_generated_tokens: Whether each streamed response carries all tokens so far.
        prompt_tuning_config: A table of virtual tokens, or the name of an adapter.
        logits_post_processor_name: A post-processor registered in the workers; BATCHED_POST_PROCESSOR_NAME is
            `processor_batched`. The field can also be set as `logits_post_processor`.
        external_draft_tokens_config: Speculative decoding.
        client_id: The client that sends the request; passed to post-processors.
        num_return_sequences: Number of sequences to sample, or of beams to return; by default, one sequence or all
            beams.
    """

    BATCHED_POST_PROCESSOR_NAME = BATCHED_POST_PROCESSOR_NAME

    input_token_ids: Sequence[int]
    max_tokens: int | None = None
    streaming: bool = False
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig)
    output_config: OutputConfig = field(default_factory=OutputConfig)
    end_id: int | None = None
    pad_id: int | None = None
    bad_words: Sequence[Sequence[int]] = ()
    stop_words: Sequence[str] = ()
    embedding_bias: Mapping[int, float] | None = None
    external_draft_tokens_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None
    prompt_tuning_config: Array | PromptAdapterRequest | None = None
    lora_config: LoRARequest | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    logits_post_processor_name: str = ""
    client_id: str | int = ""
    return_all_generated_tokens: bool = False
    priority: int = 0
    num_return_sequences: int | None = None
    guided_decoding_params: GuidedDecodingParams | None = None
    cache_salt: str = ""
    logits_post_processor: str = ""

    def to_generation_request(self) -> GenerationRequest:
        """Return the equivalent `GenerationRequest`.

        Raises:
            InvalidArgumentError: A value is invalid for its field.
        """
        config, output = self.sampling_config, self.output_config
        if output.return_encoder_output:
            raise UnsupportedError("encoder-decoder models are not supported", field="return_encoder_output")
        values = {name: getattr(config, name) for name in _SAME_NAMES}
        params = SamplingParams(
            **values,
            top_p_reset_id=config.top_p_reset_ids,
            num_return_sequences=self.num_return_sequences or config.num_return_sequences,
            max_tokens=self.max_tokens,
            end_id=self.end_id,
            pad_id=self.pad_id,
            bad_word_token_ids=self.bad_words,
            stop=self.stop_words,
            embedding_bias=self.embedding_bias,
            log_probs=0 if output.return_log_probs else None,
            return_context_logits=output.return_context_logits,
            return_generation_logits=output.return_generation_logits,
            exclude_input_from_output=output.exclude_input_from_output,
            return_perf_metrics=output.return_perf_metrics,
            return_all_generated_tokens=self.return_all_generated_tokens,
            additional_outputs={item.name: item.gather_context for item in output.additional_model_outputs},
            guided_decoding=self.guided_decoding_params,
            logits_processor=self.logits_post_processor_name or self.logits_post_processor,
        )
        tuning = self.prompt_tuning_config
        return GenerationRequest(
            self.input_token_ids,
            params,
            streaming=self.streaming,
            lora_request=self.lora_config,
            prompt_adapter_request=tuning if isinstance(tuning, PromptAdapterRequest) else None,
            prompt_tuning_table=None if isinstance(tuning, PromptAdapterRequest) else tuning,
            kv_cache_retention_config=self.kv_cache_retention_config,
            client_id=str(self.client_id),
            priority=self.priority,
            cache_salt=self.cache_salt,
            speculative_config=self.external_draft_tokens_config,
        )


_SAME_NAMES = tuple(
    name for name in SamplingConfig.__dataclass_fields__ if name not in ("top_p_reset_ids", "num_return_sequences")
)
