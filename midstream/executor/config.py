"""Settings of an executor that starts its own services, with TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from midstream.errors import InvalidArgumentError
from midstream.executor.output import AdditionalModelOutput
from midstream.executor.request import DraftTargetDecodingConfig, NGramDecodingConfig


class CapacitySchedulerPolicy(StrEnum):
    """Policy for which requests may hold KV blocks; see docs/scheduler.md."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class BatchingType(StrEnum):
    """Batching type; see docs/scheduler.md."""

    STATIC = "static"
    INFLIGHT = "inflight"
    INFLIGHT_FUSED = "inflight_fused"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The capacity policy."""

    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Size and use of the KV cache; None means the service's default.

    Attributes:
        enable_block_reuse: Whether requests share the blocks of common prefixes.
        max_tokens: Maximum number of tokens in the pool; the smaller of this limit and the memory fraction applies.
        max_attention_window: Number of tokens that attention can see.
        sink_token_length: Number of initial tokens that remain visible outside the window; requires a window.
        free_gpu_memory_fraction: Fraction, 0 to 1, of the memory left after loading.
        host_cache_size: Bytes of a second tier in host memory for full blocks evicted from the pool.
        tokens_per_block: Number of tokens in a block.
    """

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    tokens_per_block: int | None = None

    def settings(self) -> dict[str, object]:
        """Return the services' settings.

        Raises:
            InvalidArgumentError: Sink tokens are set without a window.
        """
        if self.sink_token_length and not self.max_attention_window:
            raise InvalidArgumentError("requires max_attention_window", field="kv_cache_config.sink_token_length")
        return {
            "enable_block_reuse": self.enable_block_reuse,
            "max_kv_tokens": self.max_tokens,
            "max_attention_window": self.max_attention_window,
            "sink_token_length": self.sink_token_length,
            "free_memory_fraction": self.free_gpu_memory_fraction,
            "host_kv_bytes": self.host_cache_size,
            "tokens_per_block": self.tokens_per_block,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftCacheConfig:
    """The caches of LoRA adapters; None means the service's default.

    Adapters are not paged, are read by one thread, and are copied on the compute stream. The six fields that set the
    size of pages, thread pools and streams are therefore accepted without effect: `optimal_adapter_size`,
    `num_put_workers`, `num_ensure_workers`, `num_copy_streams`, `max_pages_per_block_host`,
    `max_pages_per_block_device`.

    Attributes:
        num_host_module_layer: Host cache size in ranks of one module in one layer; overrides `host_cache_size`.
        num_device_module_layer: The same for the device; overrides `device_cache_percent`.
        max_adapter_size: Maximum rank of an adapter.
        device_cache_percent: Fraction, 0 to 1, of the memory left after weights and KV pool.
        host_cache_size: Bytes of the host cache.
    """

    num_host_module_layer: int | None = None
    num_device_module_layer: int | None = None
    optimal_adapter_size: int | None = None
    max_adapter_size: int | None = None
    num_put_workers: int | None = None
    num_ensure_workers: int | None = None
    num_copy_streams: int | None = None
    max_pages_per_block_host: int | None = None
    max_pages_per_block_device: int | None = None
    device_cache_percent: float | None = None
    host_cache_size: int | None = None

    def settings(self) -> dict[str, object]:
        """Return the services' settings."""
        return {
            "lora_num_host_module_layer": self.num_host_module_layer,
            "lora_num_device_module_layer": self.num_device_module_layer,
            "lora_max_adapter_size": self.max_adapter_size,
            "lora_device_cache_percent": self.device_cache_percent,
            "lora_host_cache_bytes": self.host_cache_size,
        }


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a copy of the model is sharded across processes.

    Attributes:
        tensor_parallel_size: Number of ranks that share each layer.
        pipeline_parallel_size: Number of stages across which the layers are split.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class GuidedDecodingConfig:
    """The tokenizer for which grammars are compiled.

    Workers read it from the model folder, so nothing needs to be set. Values that are set must match it; `create`
    checks the size of the vocabulary and the stop tokens.

    Attributes:
        encoded_vocab: All tokens as text, by id.
        tokenizer_str: The tokenizer as JSON.
        stop_token_ids: Tokens that may end guided output.
    """

    encoded_vocab: Sequence[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsPostProcessorConfig:
    """Logits post-processors that requests can name, in addition to those of installed packages.

    A class is given by its import path, as in an entry point, since callables cannot be sent to other processes.

    Attributes:
        processor_map: `module:Class` by name.
        processor_batched: `module:Class` used by requests that name BATCHED_POST_PROCESSOR_NAME.
        replicate: Whether post-processors are called on all tensor ranks of the first stage, each in its own process,
            or only on rank 0. In both cases, rank 0 samples for all ranks.
    """

    processor_map: Mapping[str, str] = field(default_factory=dict)
    processor_batched: str | None = None
    replicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Settings of the services; None means their default.

    Attributes:
        max_beam_width: Maximum beam width of a request.
        additional_model_outputs: Outputs that all requests report, in addition to those that they name themselves.
        speculative_config: Speculative decoding for requests that do not configure it.
        speculative_model_dir: The workers' draft model, for DraftTargetDecodingConfig.
        settings: Other settings of the services by name, such as `{"num_threads": 1}`.
    """

    max_beam_width: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_queue_size: int | None = None
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    peft_cache_config: PeftCacheConfig = field(default_factory=PeftCacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    guided_decoding_config: GuidedDecodingConfig | None = None
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    additional_model_outputs: Sequence[AdditionalModelOutput] = ()
    speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None
    speculative_model_dir: str = ""
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED
    enable_chunked_context: bool = True
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the services.

        Raises:
            InvalidArgumentError: A value is out of range.
            UnsupportedError: A setting requires a feature that is not implemented.
        """
        if self.max_beam_width is not None and self.max_beam_width < 1:
            raise InvalidArgumentError("must be at least 1", field="max_beam_width")
        values: dict[str, object] = {
            "max_beam_width": self.max_beam_width,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_queue_size": self.max_queue_size,
            "capacity_policy": self.scheduler_config.policy.value,
            "batching_type": self.batching_type.value,
            "enable_chunked_context": self.enable_chunked_context,
            "draft_model": self.speculative_model_dir or None,
            **self.kv_cache_config.settings(),
            **self.peft_cache_config.settings(),
            **_post_processor_settings(self.logits_post_processor_config),
            **self.settings,
        }
        return {f"MIDSTREAM_{name.upper()}": str(value) for name, value in values.items() if value is not None}


BATCHED_POST_PROCESSOR_NAME = "batched"


def _post_processor_settings(config: LogitsPostProcessorConfig | None) -> dict[str, object]:
    if config is None:
        return {}
    classes = dict(config.processor_map)
    if config.processor_batched is not None:
        classes[BATCHED_POST_PROCESSOR_NAME] = config.processor_batched
    for name, place in classes.items():
        if not isinstance(place, str) or ":" not in place or not name or {",", "="} & set(name + place):
            raise InvalidArgumentError("classes must be given as module:Class", field="logits_post_processor_config")
    return {
        "logits_post_processors": ",".join(f"{name}={place}" for name, place in classes.items()) or None,
        "replicate_post_processors": config.replicate,
    }
