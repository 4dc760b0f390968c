"""TensorRT-LLM's `ExecutorConfig` and its parts, and the settings of the services that an executor starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DecodingMode,
    TrtGptModelType,
)
from midstream.executor.output_config import AdditionalModelOutput
from midstream.executor.request import (
    BATCHED_POST_PROCESSOR_NAME,
    DYNAMIC_POST_PROCESSOR_NAME,
    LogitsPostProcessor,
)
from midstream.executor.request_parts import (
    DraftTargetDecodingConfig,
    EagleConfig,
    LookaheadDecodingConfig,
    NGramDecodingConfig,
)

_DEFAULT_IDLE_US = 180_000_000


@dataclass(slots=True)
class DynamicBatchConfig:
    """Tuning of the batch size by the lengths of requests; without effect, since batches of any size run."""

    enable_batch_size_tuning: bool = False
    enable_max_num_tokens_tuning: bool = False
    dynamic_batch_moving_average_window: int = 128
    batch_size_table: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class SchedulerConfig:
    """Scheduling policies.

    Attributes:
        capacity_scheduler_policy: Which requests may hold KV blocks; `policy` is another name of the argument.
        context_chunking_policy: FIRST_COME_FIRST_SERVED or None.
        dynamic_batch_config: Without effect.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None
    policy: InitVar[CapacitySchedulerPolicy | None] = None

    def __post_init__(self, policy: CapacitySchedulerPolicy | None) -> None:
        if policy is not None:
            self.capacity_scheduler_policy = policy

    def settings(self) -> dict[str, object]:
        """Return the services' settings.

        Raises:
            UnsupportedError: Contexts are to be chunked with equal progress.
        """
        if self.context_chunking_policy is ContextChunkingPolicy.EQUAL_PROGRESS:
            raise UnsupportedError("use FIRST_COME_FIRST_SERVED", field="context_chunking_policy")
        return {"capacity_policy": self.capacity_scheduler_policy.value}


@dataclass(slots=True)
class RuntimeDefaults:
    """Defaults of a KvCacheConfig that a model brings along."""

    max_attention_window: Sequence[int] | None = None
    sink_token_length: int | None = None


@dataclass(slots=True)
class KvCacheConfig:
    """Size and use of the KV cache.

    Attributes:
        enable_block_reuse: Whether requests share the blocks of common prefixes.
        max_tokens: Maximum number of tokens in the pool; the smaller of this limit and the memory fraction applies.
        max_attention_window: Numbers of tokens that the layers' attention can see, repeated for all layers; or one
            number, as in release 0.10.
        sink_token_length: Number of tokens of the window that are always the first ones; requires a window.
        free_gpu_memory_fraction: Fraction, 0 to 1, of the memory left after loading.
        host_cache_size: Bytes of a second tier in host memory for full blocks evicted from the pool.
        tokens_per_block: Number of tokens in a block, which TensorRT-LLM takes from the engine.
        event_buffer_max_size: Number of events that are kept for `Executor.get_kv_cache_event_manager`; 0 means none.
        onboard_blocks, secondary_offload_min_priority, enable_partial_reuse, copy_on_partial_reuse, use_uvm,
            attention_dp_events_gather_period_ms: Without effect.
    """

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: Sequence[int] | int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    attention_dp_events_gather_period_ms: int = 5
    max_gpu_total_bytes: int = 0
    tokens_per_block: int | None = None
    runtime_defaults: InitVar[RuntimeDefaults | None] = None

    def __post_init__(self, runtime_defaults: RuntimeDefaults | None) -> None:
        if runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        """Set the fields that are None to the defaults."""
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length

    @property
    def windows(self) -> list[int]:
        """The attention windows of the layers, repeated for all layers; empty for the model's own."""
        windows = self.max_attention_window or ()
        return [windows] if isinstance(windows, int) else list(windows)

    def settings(self) -> dict[str, object]:
        """Return the services' settings.

        Raises:
            InvalidArgumentError: Sink tokens are set without a window, or the fraction is out of range.
            UnsupportedError: A setting is for encoder-decoder models.
        """
        windows, fraction = self.windows, self.free_gpu_memory_fraction
        if self.sink_token_length and not windows:
            raise InvalidArgumentError("requires max_attention_window", field="kv_cache_config.sink_token_length")
        if fraction is not None and not 0 < fraction < 1:
            raise InvalidArgumentError(
                f"is {fraction}; must be above 0 and below 1", field="kv_cache_config.free_gpu_memory_fraction"
            )
        if self.cross_kv_cache_fraction is not None:
            raise UnsupportedError(
                "encoder-decoder models are not supported", field="kv_cache_config.cross_kv_cache_fraction"
            )
        if self.max_gpu_total_bytes:
            raise UnsupportedError("use max_tokens", field="kv_cache_config.max_gpu_total_bytes")
        return {
            "enable_block_reuse": self.enable_block_reuse,
            "max_kv_tokens": self.max_tokens,
            "max_attention_window": max(windows, default=None),
            "layer_attention_windows": ",".join(map(str, windows)) if len(set(windows)) > 1 else None,
            "sink_token_length": self.sink_token_length,
            "free_memory_fraction": fraction,
            "host_kv_bytes": self.host_cache_size,
            "tokens_per_block": self.tokens_per_block,
        }


@dataclass(slots=True)
class PeftCacheConfig:
    """The caches of LoRA adapters; 0 and None mean the service's default.

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
        lora_prefetch_dir: Must be None; adapters are loaded on first use.
    """

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float | None = None
    host_cache_size: int | None = None
    lora_prefetch_dir: str | None = None

    def settings(self) -> dict[str, object]:
        """Return the services' settings.

        Raises:
            UnsupportedError: Adapters are to be loaded in advance.
        """
        if self.lora_prefetch_dir is not None:
            raise UnsupportedError(
                "adapters are loaded on first use; name each in its request",
                field="peft_cache_config.lora_prefetch_dir",
            )
        return {
            "lora_num_host_module_layer": self.num_host_module_layer or None,
            "lora_num_device_module_layer": self.num_device_module_layer or None,
            "lora_max_adapter_size": self.max_adapter_size,
            "lora_device_cache_percent": self.device_cache_percent,
            "lora_host_cache_bytes": self.host_cache_size,
        }


@dataclass(slots=True)
class OrchestratorConfig:
    """How an orchestrator starts its workers; without effect, since the service starts its ranks itself."""

    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: object = None
    spawn_processes: bool = True


@dataclass(slots=True)
class ParallelConfig:
    """How a copy of the model is sharded across processes. TensorRT-LLM reads the two sizes from the engine.

    Attributes:
        communication_type, communication_mode, participant_ids, orchestrator_config, num_nodes: Without effect.
        device_ids: The devices of the ranks.
        tensor_parallel_size: Number of ranks that share each layer; None means one for each of `device_ids`.
        pipeline_parallel_size: Number of stages across which the layers are split.
    """

    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: Sequence[int] | None = None
    participant_ids: Sequence[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1

    @property
    def num_tensor_ranks(self) -> int:
        """Number of ranks that share each layer."""
        return self.tensor_parallel_size or max(len(self.device_ids or ()) // self.pipeline_parallel_size, 1)


class _GuidedDecodingBackend(Enum):
    """The library that compiles grammars; without effect, since the service has one."""

    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass(slots=True)
class GuidedDecodingConfig:
    """The tokenizer for which grammars are compiled.

    Workers read it from the model folder, so nothing needs to be set. Values that are set must match it.

    Attributes:
        encoded_vocab: All tokens as text, by id.
        tokenizer_str: The tokenizer as JSON.
        stop_token_ids: Tokens that may end guided output.
    """

    GuidedDecodingBackend: ClassVar[type[_GuidedDecodingBackend]] = _GuidedDecodingBackend

    backend: _GuidedDecodingBackend = _GuidedDecodingBackend.XGRAMMAR
    encoded_vocab: Sequence[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None

    def validate(self) -> None:
        """Raise InvalidArgumentError if there is a tokenizer without its vocabulary."""
        if self.tokenizer_str is not None and self.encoded_vocab is None:
            raise InvalidArgumentError("must be given together with tokenizer_str", field="encoded_vocab")


# Changes the logits of several requests: lists of ids, logits and tokens, the stream, and a list of client ids.
LogitsPostProcessorBatched = Callable[[list[int], list[Any], list[list[list[int]]], int, list[int | None]], Any]


@dataclass(slots=True)
class LogitsPostProcessorConfig:
    """Logits post-processors that requests can name, in addition to those registered in the workers.

    A function runs in this process. A class derived from the workers' LogitsPostProcessor runs in theirs; it is given
    as `module:Class`, which they must be able to import.

    Attributes:
        processor_map: Functions or `module:Class` by name.
        processor_batched: The one used by requests that name BATCHED_POST_PROCESSOR_NAME.
        replicate: Whether classes are called on all tensor ranks of the first stage, each in its own process, or
            only on rank 0. In both cases, rank 0 samples for all ranks. Functions are called once.
    """

    processor_map: Mapping[str, LogitsPostProcessor | str] | None = None
    processor_batched: LogitsPostProcessorBatched | str | None = None
    replicate: bool = True

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name."""
        return {name: item for name, item in self._all().items() if callable(item)}

    def settings(self, socket: str) -> dict[str, object]:
        """Return the services' settings.

        Args:
            socket: Where this process runs its functions.

        Raises:
            InvalidArgumentError: A post-processor is neither a function nor the name of a class.
        """
        places = {DYNAMIC_POST_PROCESSOR_NAME: f"unix:{socket}"}
        for name, item in self._all().items():
            place = f"unix:{socket}" if callable(item) else item
            if not isinstance(place, str) or ":" not in place or not name or {",", "="} & set(name + place):
                raise InvalidArgumentError("must be functions or module:Class", field="logits_post_processor_config")
            places[name] = place
        # A function must be called once, although each rank of a group would call it.
        return {
            "logits_post_processors": ",".join(f"{name}={place}" for name, place in places.items()),
            "replicate_post_processors": self.replicate and not self.functions() and len(places) > 1,
        }

    def _all(self) -> dict[str, Callable[..., Any] | str]:
        found: dict[str, Callable[..., Any] | str] = {
            name: item for name, item in (self.processor_map or {}).items() if item is not None
        }
        if self.processor_batched is not None:
            found[BATCHED_POST_PROCESSOR_NAME] = self.processor_batched
        return found


@dataclass(slots=True)
class SpeculativeDecodingConfig:
    """How logits of drafts are transferred; without effect."""

    fast_logits: bool = False


@dataclass(slots=True, init=False)
class DecodingConfig:
    """How tokens are chosen; setting a method's own configuration selects its mode."""

    decoding_mode: DecodingMode | None
    lookahead_decoding_config: LookaheadDecodingConfig | None
    medusa_choices: Sequence[Sequence[int]] | None
    eagle_config: EagleConfig | None

    def __init__(
        self,
        decoding_mode: DecodingMode | None = None,
        lookahead_decoding_config: LookaheadDecodingConfig | None = None,
        medusa_choices: Sequence[Sequence[int]] | None = None,
        eagle_config: EagleConfig | None = None,
    ) -> None:
        self.decoding_mode = decoding_mode
        self.lookahead_decoding_config = lookahead_decoding_config
        self.medusa_choices = medusa_choices
        self.eagle_config = eagle_config

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in _MODES and value is not None:
            object.__setattr__(self, "decoding_mode", DecodingMode(_MODES[name]))

    def drafts(self) -> LookaheadDecodingConfig | None:
        """Return how drafts are made.

        Raises:
            UnsupportedError: The service lacks the mode.
        """
        mode = self.decoding_mode
        if mode is None or mode.isTopKorTopP() or mode.isAuto() or mode.isBeamSearch():
            return None
        if mode.isLookahead():
            return self.lookahead_decoding_config or LookaheadDecodingConfig()
        raise UnsupportedError(
            f"{mode.name} is not supported; use Lookahead, or DraftTargetDecodingConfig as speculative_config",
            field="decoding_config",
        )


_MODES = {"lookahead_decoding_config": "Lookahead", "medusa_choices": "Medusa", "eagle_config": "Eagle"}


@dataclass(slots=True)
class ExtendedRuntimePerfKnobConfig:
    """Choices of kernels; without effect."""

    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = False
    cuda_graph_cache_size: int = 0


@dataclass(slots=True)
class DebugConfig:
    """Tensors to keep for debugging, which the service lacks."""

    debug_input_tensors: bool = False
    debug_output_tensors: bool = False
    debug_tensor_names: Sequence[str] = ()
    debug_tensors_max_iterations: int = 0


@dataclass(slots=True)
class CacheTransceiverConfig:
    """How KV blocks move between executors; without effect, since they do not: an executor that continues a request
    computes its prompt again, unless its service has it in its cache.
    """

    backend: CacheTransceiverBackendType | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


# Parts that request what the service lacks, with what to do instead.
_UNSUPPORTED = {
    "debug_config": "use additional_model_outputs",
}


@dataclass(slots=True)
class ExecutorConfig:
    """Settings of the services that an executor starts; None means their default.

    Attributes:
        max_beam_width: Maximum beam width of a request.
        iter_stats_max_iterations: Number of iterations whose statistics are kept until they are read.
        request_stats_max_iterations: The same for the statistics of requests in each iteration.
        additional_model_outputs: Outputs that all requests report, in addition to those that they name themselves.
        enable_trt_overlap: Whether to keep two steps in flight, which is the service's default.
        normalize_log_probs, use_gpu_direct_storage, extended_runtime_perf_knob_config, recv_poll_period_ms,
            max_seq_idle_microseconds, spec_dec_config, gather_generation_logits, mm_embedding_offloading,
            fail_fast_on_attention_window_too_large, cache_transceiver_config, backend: Without effect.
        speculative_config: Speculative decoding for requests that do not configure it.
        speculative_model_dir: The workers' draft model, for DraftTargetDecodingConfig.
        settings: Other settings of the services by name, such as `{"num_threads": 1}`.
    """

    max_beam_width: int = 1
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: BatchingType | TrtGptModelType = BatchingType.INFLIGHT
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    parallel_config: ParallelConfig | None = None
    peft_cache_config: PeftCacheConfig | None = field(default_factory=PeftCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: int = 0
    max_seq_idle_microseconds: int | timedelta = _DEFAULT_IDLE_US
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: GuidedDecodingConfig | None = None
    additional_model_outputs: Sequence[AdditionalModelOutput] | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    gather_generation_logits: bool = False
    mm_embedding_offloading: bool = False
    enable_trt_overlap: bool = False
    fail_fast_on_attention_window_too_large: bool = False
    backend: str | None = None
    speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None
    speculative_model_dir: str = ""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "max_beam_width" and (not isinstance(value, int) or value < 1):
            raise InvalidArgumentError(f"is {value}; must be at least 1", field=name)
        object.__setattr__(self, name, value)

    @property
    def drafts(self) -> NGramDecodingConfig | DraftTargetDecodingConfig | LookaheadDecodingConfig | None:
        """How drafts are made for requests that do not configure it."""
        if self.speculative_config is not None or self.decoding_config is None:
            return self.speculative_config
        return self.decoding_config.drafts()

    def environment(self, socket: str = "") -> dict[str, str]:
        """Return the environment variables for the services.

        Args:
            socket: Where this process runs the functions of its logits post-processors.

        Raises:
            InvalidArgumentError: A value is out of range.
            UnsupportedError: A setting requires a feature that is not implemented.
        """
        for name, reason in _UNSUPPORTED.items():
            if getattr(self, name) is not None:
                raise UnsupportedError(reason, field=name)
        if self.gpu_weights_percent != 1.0:
            raise UnsupportedError("weights are not streamed; use 1.0", field="gpu_weights_percent")
        if self.guided_decoding_config is not None:
            self.guided_decoding_config.validate()
        devices = self.parallel_config.device_ids if self.parallel_config else None
        post_processors = self.logits_post_processor_config or LogitsPostProcessorConfig()
        values: dict[str, object] = {
            "max_beam_width": self.max_beam_width,
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_queue_size": self.max_queue_size,
            "batching_type": self.batching_type.value,
            "enable_chunked_context": self.enable_chunked_context,
            "draft_model": self.speculative_model_dir or None,
            **self.scheduler_config.settings(),
            **self.kv_cache_config.settings(),
            **(self.peft_cache_config or PeftCacheConfig()).settings(),
            **(post_processors.settings(socket) if socket else {}),
            **self.settings,
        }
        found = {f"MIDSTREAM_{name.upper()}": str(value) for name, value in values.items() if value is not None}
        if devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        return found
