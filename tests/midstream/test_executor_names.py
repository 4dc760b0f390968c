"""Every constructor and attribute of TensorRT-LLM 1.0's executor (`executor.h`, `pybind/executor/*.cpp`, and the tests
of the bindings), and what becomes of it here.

Each class is created with its positional arguments in their order and again by name, has its documented defaults, and
takes and returns other values. Running this file prints a line for each name.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from typing import Any

import pytest

from midstream import executor as api
from midstream.errors import MidstreamError
from midstream.executor import kv_cache

_NONE = None
_RANGE = api.KvCacheRetentionConfig.TokenRangeRetentionConfig
_GUIDES = api.GuidedDecodingParams.GuideType
_BACKENDS = api.GuidedDecodingConfig.GuidedDecodingBackend
_REQUEST: dict[str, Any] = {"input_token_ids": [1, 2, 3], "max_tokens": 5}

# What the C++ API and its bindings take as std::optional: any of these may be None, also in an assignment.
OPTIONAL: dict[Any, str] = {
    api.SamplingConfig: "top_k top_p top_p_min top_p_reset_ids top_p_decay seed temperature min_tokens "
    "beam_search_diversity_rate repetition_penalty presence_penalty frequency_penalty length_penalty early_stopping "
    "no_repeat_ngram_size num_return_sequences min_p beam_width_array",
    api.OutputConfig: "additional_model_outputs",
    api.Request: "end_id pad_id position_ids bad_words stop_words embedding_bias external_draft_tokens_config "
    "prompt_tuning_config multimodal_input multimodal_embedding mrope_config lora_config lookahead_config "
    "kv_cache_retention_config logits_post_processor_name logits_post_processor encoder_input_token_ids client_id "
    "context_phase_params encoder_input_features encoder_output_length cross_attention_mask num_return_sequences "
    "eagle_config skip_cross_attn_blocks guided_decoding_params language_adapter_uid allotted_time_ms cache_salt_id",
    api.SamplingParams: "end_id pad_id max_tokens bad bad_token_ids stop stop_token_ids embedding_bias "
    "logits_processor best_of top_k top_p top_p_min top_p_reset_ids top_p_decay seed temperature min_tokens "
    "beam_search_diversity_rate repetition_penalty presence_penalty frequency_penalty length_penalty early_stopping "
    "no_repeat_ngram_size min_p beam_width_array logprobs prompt_logprobs additional_model_outputs lookahead_config "
    "guided_decoding truncate_prompt_tokens",
    api.GenerationRequest: "query_token_ids lora_request prompt_adapter_request kv_cache_retention_config "
    "multimodal_params arrival_time",
    api.SchedulerConfig: "context_chunking_policy dynamic_batch_config",
    api.KvCacheConfig: "max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size "
    "cross_kv_cache_fraction secondary_offload_min_priority",
    api.PeftCacheConfig: "device_cache_percent host_cache_size lora_prefetch_dir",
    api.ExecutorConfig: "max_batch_size max_num_tokens parallel_config peft_cache_config logits_post_processor_config "
    "decoding_config max_queue_size debug_config spec_dec_config guided_decoding_config additional_model_outputs "
    "cache_transceiver_config",
}


@dataclass(frozen=True)
class Listed:
    """One class.

    Attributes:
        values: Another value for each attribute, in the order of the constructor's arguments.
        defaults: The value of each attribute that has a default.
        num_positional: Number of arguments that may be given without a name; the others must be named there.
        renamed: The attribute of an argument, if it has another name.
    """

    kind: Any
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    num_positional: int = 99
    renamed: Mapping[str, str] = field(default_factory=dict)


def _all_none(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


_SAMPLING: dict[str, Any] = {
    "beam_width": 2, "top_k": 2, "top_p": 1.0, "top_p_min": 1.0, "top_p_reset_ids": 3, "top_p_decay": 1.0, "seed": 7,
    "temperature": 1.0, "min_tokens": 4, "beam_search_diversity_rate": 1.0, "repetition_penalty": 1.0,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "length_penalty": 1.0, "early_stopping": 5,
    "no_repeat_ngram_size": 3, "num_return_sequences": 2, "min_p": 0.5, "beam_width_array": [2, 2],
}  # fmt: skip
_REQUEST_PARTS: dict[str, Any] = {
    "streaming": True, "sampling_config": api.SamplingConfig(2), "output_config": api.OutputConfig(True), "end_id": -1,
    "pad_id": -2, "position_ids": [0], "bad_words": [[4, 5, 6]], "stop_words": [[7, 8, 9]], "embedding_bias": [1.0],
    "external_draft_tokens_config": api.ExternalDraftTokensConfig([1]),
    "prompt_tuning_config": api.PromptTuningConfig([1.0]), "multimodal_input": api.MultimodalInput([[1]], [2], [3]),
    "multimodal_embedding": [[1.0]], "mrope_config": api.MropeConfig([1.0], 2), "lora_config": api.LoraConfig(1),
    "lookahead_config": api.LookaheadDecodingConfig(3, 5, 7), "kv_cache_retention_config": api.KvCacheRetentionConfig(),
    "logits_post_processor_name": "my_logits_pp", "logits_post_processor": print, "encoder_input_token_ids": [1],
    "client_id": 1234, "return_all_generated_tokens": True, "priority": 1.0,
    "type": api.RequestType.REQUEST_TYPE_CONTEXT_ONLY, "context_phase_params": api.ContextPhaseParams([1], 2),
    "encoder_input_features": [1.0], "encoder_output_length": 3, "cross_attention_mask": [1], "num_return_sequences": 2,
    "eagle_config": api.EagleConfig(), "skip_cross_attn_blocks": [1],
    "guided_decoding_params": api.GuidedDecodingParams(_GUIDES.JSON), "language_adapter_uid": 3,
    "allotted_time_ms": timedelta(milliseconds=2), "cache_salt_id": 4,
}  # fmt: skip
_EXECUTOR: dict[str, Any] = {
    "max_beam_width": 2, "scheduler_config": api.SchedulerConfig(api.CapacitySchedulerPolicy.MAX_UTILIZATION),
    "kv_cache_config": api.KvCacheConfig(free_gpu_memory_fraction=0.5), "enable_chunked_context": True,
    "normalize_log_probs": False, "iter_stats_max_iterations": 100, "request_stats_max_iterations": 10,
    "batching_type": api.BatchingType.STATIC, "max_batch_size": 8, "max_num_tokens": 128,
    "parallel_config": api.ParallelConfig(), "peft_cache_config": api.PeftCacheConfig(10),
    "logits_post_processor_config": api.LogitsPostProcessorConfig(),
    "decoding_config": api.DecodingConfig(api.DecodingMode.TopKTopP()), "use_gpu_direct_storage": True,
    "gpu_weights_percent": 0.5, "max_queue_size": 3,
    "extended_runtime_perf_knob_config": api.ExtendedRuntimePerfKnobConfig(False),
    "debug_config": api.DebugConfig(True),
    "recv_poll_period_ms": 50, "max_seq_idle_microseconds": 240_000_000,
    "spec_dec_config": api.SpeculativeDecodingConfig(True), "guided_decoding_config": api.GuidedDecodingConfig(),
    "additional_model_outputs": [api.AdditionalModelOutput("topKLogits")],
    "cache_transceiver_config": api.CacheTransceiverConfig(), "gather_generation_logits": True,
    "mm_embedding_offloading": True, "enable_trt_overlap": True, "fail_fast_on_attention_window_too_large": True,
}  # fmt: skip
LISTED = [
    Listed(api.SamplingConfig, _SAMPLING, {"beam_width": 1, **_all_none(*list(_SAMPLING)[1:])}),
    Listed(api.AdditionalModelOutput, {"name": "topKLogits", "gather_context": True}, {"gather_context": False}),
    Listed(api.AdditionalOutput, {"name": "topKLogits", "output": [1.0]}),
    Listed(
        api.OutputConfig,
        {
            "return_log_probs": True, "return_context_logits": True, "return_generation_logits": True,
            "exclude_input_from_output": True, "return_encoder_output": True, "return_perf_metrics": True,
            "additional_model_outputs": [api.AdditionalModelOutput("topKLogits", True)],
        },
        {
            "return_log_probs": False, "return_context_logits": False, "return_generation_logits": False,
            "exclude_input_from_output": False, "return_encoder_output": False, "return_perf_metrics": False,
            "additional_model_outputs": None,
        },
    ),
    Listed(
        api.ExternalDraftTokensConfig,
        {"tokens": [1, 2, 3], "logits": [[1.0]], "acceptance_threshold": 1.0, "fast_logits": False},
        _all_none("logits", "acceptance_threshold", "fast_logits"),
    ),
    Listed(
        api.PromptTuningConfig,
        {"embedding_table": [[1.0]], "input_token_extra_ids": [1]},
        _all_none("input_token_extra_ids"),
    ),
    Listed(
        api.MultimodalInput,
        {"multimodal_hashes": [[1]], "multimodal_positions": [2], "multimodal_lengths": [3]},
    ),
    Listed(api.MropeConfig, {"mrope_rotary_cos_sin": [1.0], "mrope_position_deltas": [-50]}),
    Listed(api.LoraConfig, {"task_id": 2, "weights": [[1.0]], "config": [[1]]}, _all_none("weights", "config")),
    Listed(
        api.LookaheadDecodingConfig,
        {"max_window_size": 3, "max_ngram_size": 5, "max_verification_set_size": 7},
    ),
    Listed(
        api.EagleConfig,
        {
            "eagle_choices": [[0, 0]], "greedy_sampling": False, "posterior_threshold": 0.5, "use_dynamic_tree": True,
            "dynamic_tree_max_topK": 3,
        },
        {
            "eagle_choices": None, "greedy_sampling": True, "posterior_threshold": None, "use_dynamic_tree": False,
            "dynamic_tree_max_topK": None,
        },
    ),
    Listed(
        api.ContextPhaseParams,
        {"first_gen_tokens": [1], "req_id": 2, "opaque_state": b"x", "draft_tokens": [3]},
    ),
    Listed(
        _RANGE,
        {"token_start": 0, "token_end": 2, "priority": 30, "duration_ms": timedelta(seconds=30)},
        {"token_end": None, "priority": 35, "duration_ms": None},
    ),
    Listed(
        api.KvCacheRetentionConfig,
        {
            "token_range_retention_configs": [_RANGE(0, 64, 80), _RANGE(64, 100, 10)], "decode_retention_priority": 10,
            "decode_duration_ms": timedelta(seconds=30), "transfer_mode": api.KvCacheTransferMode.GDS, "directory": "d",
        },
        {
            "decode_retention_priority": 35, "decode_duration_ms": None, "transfer_mode": api.KvCacheTransferMode.DRAM,
        },
    ),
    Listed(api.GuidedDecodingParams, {"guide_type": _GUIDES.REGEX, "guide": r"\d+"}),
    Listed(
        api.Request,
        {"input_token_ids": [1], "max_tokens": 2, **_REQUEST_PARTS},
        {
            **_all_none(*_REQUEST_PARTS), "streaming": False, "sampling_config": api.SamplingConfig(),
            "output_config": api.OutputConfig(), "return_all_generated_tokens": False, "priority": 0.5,
            "type": api.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
        },
        2,
        {"type": "request_type"},
    ),
    Listed(
        api.DynamicBatchConfig,
        {
            "enable_batch_size_tuning": True, "enable_max_num_tokens_tuning": True,
            "dynamic_batch_moving_average_window": 64,
        },
    ),
    Listed(
        api.SchedulerConfig,
        {
            "capacity_scheduler_policy": api.CapacitySchedulerPolicy.STATIC_BATCH,
            "context_chunking_policy": api.ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            "dynamic_batch_config": api.DynamicBatchConfig(True, True, 128),
        },
        {
            "capacity_scheduler_policy": api.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            "context_chunking_policy": None, "dynamic_batch_config": None,
        },
    ),
    Listed(
        api.RuntimeDefaults,
        {"max_attention_window": [1, 2], "sink_token_length": 4},
        _all_none("max_attention_window", "sink_token_length"),
    ),
    Listed(
        api.KvCacheConfig,
        {
            "enable_block_reuse": False, "max_tokens": 1, "max_attention_window": [2], "sink_token_length": 3,
            "free_gpu_memory_fraction": 0.5, "host_cache_size": 4, "onboard_blocks": False,
            "cross_kv_cache_fraction": 0.5, "secondary_offload_min_priority": 50, "event_buffer_max_size": 1024,
            "enable_partial_reuse": False, "copy_on_partial_reuse": False, "use_uvm": True,
            "attention_dp_events_gather_period_ms": 6, "max_gpu_total_bytes": 7,
        },
        {
            "enable_block_reuse": True, "onboard_blocks": True, "event_buffer_max_size": 0,
            "enable_partial_reuse": True, "copy_on_partial_reuse": True, "use_uvm": False,
            **_all_none(
                "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction",
                "host_cache_size", "cross_kv_cache_fraction", "secondary_offload_min_priority",
            ),
        },
        10,
    ),
    Listed(
        api.OrchestratorConfig,
        {"is_orchestrator": False, "worker_executable_path": "w", "orch_leader_comm": None, "spawn_processes": False},
        {"is_orchestrator": True, "worker_executable_path": "", "orch_leader_comm": None, "spawn_processes": True},
    ),
    Listed(
        api.ParallelConfig,
        {
            "communication_type": api.CommunicationType.MPI, "communication_mode": api.CommunicationMode.ORCHESTRATOR,
            "device_ids": [0, 1], "participant_ids": [4, 5], "orchestrator_config": api.OrchestratorConfig(),
            "num_nodes": 2,
        },
        {
            "communication_mode": api.CommunicationMode.LEADER,
            **_all_none("device_ids", "participant_ids", "orchestrator_config", "num_nodes"),
        },
    ),
    Listed(
        api.PeftCacheConfig,
        {
            "num_host_module_layer": 1, "num_device_module_layer": 2, "optimal_adapter_size": 3, "max_adapter_size": 4,
            "num_put_workers": 5, "num_ensure_workers": 6, "num_copy_streams": 7, "max_pages_per_block_host": 8,
            "max_pages_per_block_device": 9, "device_cache_percent": 0.9, "host_cache_size": 1024,
            "lora_prefetch_dir": "loras",
        },
        {
            "num_host_module_layer": 0, "num_device_module_layer": 0, "optimal_adapter_size": 8, "max_adapter_size": 64,
            "num_put_workers": 1, "num_ensure_workers": 1, "num_copy_streams": 1, "max_pages_per_block_host": 24,
            "max_pages_per_block_device": 8,
            **_all_none("device_cache_percent", "host_cache_size", "lora_prefetch_dir"),
        },
    ),
    Listed(
        api.DecodingConfig,
        {"decoding_mode": api.DecodingMode.TopK()},
        _all_none("decoding_mode", "lookahead_decoding_config", "medusa_choices", "eagle_config"),
    ),
    Listed(
        api.DebugConfig,
        {
            "debug_input_tensors": True, "debug_output_tensors": True, "debug_tensor_names": ["test"],
            "debug_tensors_max_iterations": 5,
        },
        {"debug_input_tensors": False, "debug_output_tensors": False, "debug_tensors_max_iterations": 0},
    ),
    Listed(
        api.LogitsPostProcessorConfig,
        {"processor_map": {"test_pp": None}, "processor_batched": print, "replicate": False},
        {"processor_map": None, "processor_batched": None, "replicate": True},
    ),
    Listed(
        api.ExtendedRuntimePerfKnobConfig,
        {
            "multi_block_mode": False, "enable_context_fmha_fp32_acc": True, "cuda_graph_mode": True,
            "cuda_graph_cache_size": 3,
        },
        {
            "multi_block_mode": True, "enable_context_fmha_fp32_acc": False, "cuda_graph_mode": False,
            "cuda_graph_cache_size": 0,
        },
    ),
    Listed(api.SpeculativeDecodingConfig, {"fast_logits": True}, {"fast_logits": False}),
    Listed(
        api.GuidedDecodingConfig,
        {
            "backend": _BACKENDS.LLGUIDANCE, "encoded_vocab": ["eos", "a"], "tokenizer_str": "{}",
            "stop_token_ids": [0],
        },
        _all_none("encoded_vocab", "tokenizer_str", "stop_token_ids"),
    ),
    Listed(
        api.CacheTransceiverConfig,
        {
            "backend": api.CacheTransceiverBackendType.from_string("UCX"), "max_tokens_in_buffer": 3,
            "kv_transfer_timeout_ms": 4,
        },
        _all_none("backend", "max_tokens_in_buffer", "kv_transfer_timeout_ms"),
    ),
    Listed(
        api.ExecutorConfig,
        _EXECUTOR,
        {
            "max_beam_width": 1, "scheduler_config": api.SchedulerConfig(), "kv_cache_config": api.KvCacheConfig(),
            "enable_chunked_context": False, "normalize_log_probs": True, "iter_stats_max_iterations": 1000,
            "request_stats_max_iterations": 0, "batching_type": api.BatchingType.INFLIGHT,
            "peft_cache_config": api.PeftCacheConfig(), "use_gpu_direct_storage": False, "gpu_weights_percent": 1.0,
            "recv_poll_period_ms": 0, "max_seq_idle_microseconds": 180_000_000, "gather_generation_logits": False,
            "mm_embedding_offloading": False, "enable_trt_overlap": False,
            "fail_fast_on_attention_window_too_large": False,
            **_all_none(
                "max_batch_size", "max_num_tokens", "parallel_config", "logits_post_processor_config",
                "decoding_config", "max_queue_size", "debug_config", "spec_dec_config", "guided_decoding_config",
                "additional_model_outputs", "cache_transceiver_config",
            ),
        },
    ),
]  # fmt: skip
# Classes that are filled by attributes, and methods.
ATTRIBUTES: dict[Any, str] = {
    api.Result: "is_final output_token_ids cum_log_probs log_probs context_logits generation_logits "
    "spec_dec_fast_logits_info encoder_output finish_reasons sequence_index is_sequence_final decoding_iter "
    "avg_decoded_tokens_per_iter context_phase_params request_perf_metrics additional_outputs",
    api.SpeculativeDecodingFastLogitsInfo: "draft_request_id draft_participant_id",
    api.TimingMetrics: "arrival_time first_scheduled_time first_token_time last_token_time kv_cache_transfer_start "
    "kv_cache_transfer_end kv_cache_size",
    api.KvCacheMetrics: "num_total_allocated_blocks num_new_allocated_blocks num_reused_blocks num_missed_blocks "
    "kv_cache_hit_rate",
    api.SpeculativeDecodingMetrics: "acceptance_rate total_accepted_draft_tokens total_draft_tokens",
    api.RequestPerfMetrics: "timing_metrics kv_cache_metrics speculative_decoding first_iter last_iter iter",
    api.KvCacheStats: "max_num_blocks free_num_blocks used_num_blocks tokens_per_block alloc_total_blocks "
    "alloc_new_blocks reused_blocks missed_blocks cache_hit_rate",
    api.StaticBatchingStats: "num_scheduled_requests num_context_requests num_ctx_tokens num_gen_tokens "
    "empty_gen_slots",
    api.InflightBatchingStats: "num_scheduled_requests num_context_requests num_gen_requests num_paused_requests "
    "num_ctx_tokens micro_batch_id avg_num_decoded_tokens_per_iter",
    api.SpecDecodingStats: "num_draft_tokens num_accepted_tokens num_requests_with_draft_tokens acceptance_length "
    "iter_latency_ms draft_overhead",
    api.IterationStats: "timestamp iter iter_latency_ms new_active_requests_queue_latency_ms num_new_active_requests "
    "num_active_requests num_queued_requests num_completed_requests max_num_active_requests gpu_mem_usage "
    "cpu_mem_usage pinned_mem_usage kv_cache_stats cross_kv_cache_stats static_batching_stats "
    "inflight_batching_stats specdec_stats",
    api.DebugTensorsPerIteration: "iter debug_tensors",
    api.DisServingRequestStats: "kv_cache_transfer_ms kv_cache_size",
    api.RequestStats: "id stage context_prefill_position num_generated_tokens avg_num_decoded_tokens_per_iter "
    "scheduled paused dis_serving_stats alloc_total_blocks_per_request alloc_new_blocks_per_request "
    "reused_blocks_per_request missed_blocks_per_request kv_cache_hit_rate_per_request",
    api.RequestStatsPerIteration: "iter request_stats",
    api.DecodingConfig: "decoding_mode lookahead_decoding_config medusa_choices eagle_config",
}
METHODS: dict[Any, str] = {
    api.Executor: "shutdown __enter__ __exit__ enqueue_request enqueue_requests await_responses "
    "get_num_responses_ready cancel_request get_latest_iteration_stats get_latest_request_stats "
    "get_latest_debug_tensors can_enqueue_requests is_participant get_kv_cache_event_manager",
    api.Response: "request_id client_id has_error error_msg result clear_context_logits clear_generation_logits",
    api.SpeculativeDecodingFastLogitsInfo: "to_tensor",
    api: "deserialize_result",
    api.IterationStats: "to_json_str",
    api.RequestStats: "to_json_str",
    api.RequestStatsPerIteration: "to_json_str",
    api.KvCacheConfig: "fill_empty_fields_from_runtime_defaults",
    api.Request: "BATCHED_POST_PROCESSOR_NAME",
    api.GuidedDecodingConfig: "validate",
    api.LookaheadDecodingConfig: "calculate_speculative_resource calculate_speculative_resource_tuple "
    "get_default_lookahead_decoding_window get_default_lookahead_decoding_ngram "
    "get_default_lookahead_decoding_verification_set",
    api.DecodingMode: "Auto TopK TopP TopKTopP BeamSearch Medusa Lookahead ExplicitDraftTokens Eagle isAuto isTopK "
    "isTopP isTopKorTopP isTopKandTopP isBeamSearch isMedusa isLookahead isExplicitDraftTokens isEagle "
    "useVariableBeamWidthSearch name",
}
# Classes of the submodule kv_cache, which only the executor creates, with the attributes that can be read.
READ_ONLY: dict[Any, str] = {
    kv_cache.KVCacheCreatedData: "num_blocks_per_cache_level",
    kv_cache.UniqueToken: "token_id token_extra_id",
    kv_cache.KVCacheStoredBlockData: "block_hash tokens lora_id cache_level priority",
    kv_cache.KVCacheStoredData: "parent_hash blocks",
    kv_cache.KVCacheRemovedData: "block_hashes",
    kv_cache.KVCacheEventDiffInt: "old_value new_value",
    kv_cache.KVCacheUpdatedData: "block_hash cache_level priority",
    kv_cache.KVCacheEvent: "event_id data window_size attention_dp_rank",
    kv_cache.KVCacheEventManager: "get_latest_events",
}
# Attributes that can be created, and are refused when they are used.
REFUSED_IN_USE = {
    "Request": [
        "mrope_config", "encoder_input_token_ids", "encoder_input_features", "encoder_output_length",
        "cross_attention_mask", "skip_cross_attn_blocks", "eagle_config", "language_adapter_uid",
    ],
    "ExecutorConfig": ["gpu_weights_percent", "debug_config"],
}  # fmt: skip


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: str(listed.kind.__name__))
def test_a_constructor_takes_its_arguments_in_order_or_by_name(listed: Listed) -> None:
    values = list(listed.values.items())
    positional, named = values[: listed.num_positional], dict(values[listed.num_positional :])
    made = [listed.kind(*[value for _, value in positional], **named), listed.kind(**listed.values)]
    for item in (*made, copy.copy(made[0])):
        for name, value in values:
            assert getattr(item, listed.renamed.get(name, name)) == value


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: str(listed.kind.__name__))
def test_an_attribute_has_its_default_and_can_be_set(listed: Listed) -> None:
    required = {name: value for name, value in listed.values.items() if name not in listed.defaults}
    if listed.kind is api.SamplingConfig or listed.defaults.keys() == listed.values.keys():
        required = {}
    made = listed.kind(**required)
    for name, value in listed.defaults.items():
        assert getattr(made, listed.renamed.get(name, name)) == value
    for name, value in listed.values.items():
        setattr(made, listed.renamed.get(name, name), value)
        assert getattr(made, listed.renamed.get(name, name)) == value
    with pytest.raises(AttributeError):
        made.max_tokns = 1  # an unknown name is an error


@pytest.mark.parametrize("kind", ATTRIBUTES, ids=lambda kind: str(kind.__name__))
def test_attributes_are_read_and_set(kind: Any) -> None:
    made = kind()
    for name in ATTRIBUTES[kind].split():
        getattr(made, name)
        setattr(made, name, value := object())
        assert getattr(made, name) is value


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: str(kind.__name__))
def test_methods_exist(kind: Any) -> None:
    assert [name for name in METHODS[kind].split() if not hasattr(kind, name)] == []


@pytest.mark.parametrize("kind", READ_ONLY, ids=lambda kind: str(kind.__name__))
def test_what_the_executor_creates_has_its_attributes(kind: Any) -> None:
    known = {item.name for item in fields(kind)} if is_dataclass(kind) else set(dir(kind))
    assert set(READ_ONLY[kind].split()) <= known


@pytest.mark.parametrize("name", REFUSED_IN_USE["Request"])
def test_what_a_request_cannot_use_is_refused_by_name(name: str) -> None:
    request = api.Request(**_REQUEST, **{name: _REQUEST_PARTS[name]})
    with pytest.raises(MidstreamError) as raised:
        request.to_proto()
    assert raised.value.field == name


@pytest.mark.parametrize("name", REFUSED_IN_USE["ExecutorConfig"])
def test_what_an_executor_cannot_use_is_refused_by_name(name: str) -> None:
    config = api.ExecutorConfig(**{name: _EXECUTOR[name]})
    with pytest.raises(MidstreamError) as raised:
        config.environment()
    assert raised.value.field == name


def _used(made: Any) -> Any:
    """Return what the service gets."""
    kind = type(made)
    request, config = api.Request(**_REQUEST), api.ExecutorConfig()
    if kind in _PLACES:
        whole: Any = request if hasattr(request, _PLACES[kind]) else config
        setattr(whole, _PLACES[kind], made)
        return _used(whole)
    if kind is api.SamplingParams:
        return api.GenerationRequest([1], made).to_proto()
    return made.environment("/s") if kind is api.ExecutorConfig else made.to_proto()


_PLACES: dict[Any, str] = {
    api.OutputConfig: "output_config", api.SamplingConfig: "sampling_config", api.SchedulerConfig: "scheduler_config",
    api.KvCacheConfig: "kv_cache_config", api.PeftCacheConfig: "peft_cache_config",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OPTIONAL.items() for name in names.split()])
def test_what_is_optional_may_be_none(kind: Any, name: str) -> None:
    required = {api.Request: _REQUEST, api.GenerationRequest: {"prompt_token_ids": [1]}}.get(kind, {})
    given, assigned = kind(**required, **{name: None}), kind(**required)
    setattr(assigned, name, None)
    assert getattr(given, name) is None
    assert _used(given) == _used(assigned)
    if name not in ("max_tokens", "peft_cache_config"):  # whose defaults are not None
        assert _used(given) == _used(kind(**required))


def test_the_modes_of_decoding() -> None:
    config = api.DecodingConfig()
    config.medusa_choices = [[0, 0], [0, 1]]
    assert config.decoding_mode == api.DecodingMode.Medusa()
    config.eagle_config = api.EagleConfig([[0, 0]])
    assert config.decoding_mode.isEagle()
    assert [api.DecodingMode.TopKTopP().isTopKandTopP(), api.DecodingMode.TopK().isTopP()] == [True, False]


def _outcomes() -> Iterator[tuple[str, str]]:
    """Yield each name and what becomes of it."""
    refused = {f"{kind}.{name}" for kind, names in REFUSED_IN_USE.items() for name in names}
    for listed in LISTED:
        yield f"{listed.kind.__name__}()", "works"
        for name in listed.values:
            full = f"{listed.kind.__name__}.{name}"
            yield full, "refused when it is used" if full in refused else "works"
    for kind, names in [*ATTRIBUTES.items(), *METHODS.items(), *READ_ONLY.items()]:
        yield from ((f"{kind.__name__}.{name}", "works") for name in names.split())


def test_nearly_all_names_work() -> None:
    outcomes = dict(_outcomes())
    num_working = sum(outcome == "works" for outcome in outcomes.values())
    assert len(outcomes) > 400
    assert num_working / len(outcomes) > 0.97


if __name__ == "__main__":
    for name, outcome in _outcomes():
        print(f"{name}: {outcome}")
    found = [outcome for _, outcome in _outcomes()]
    sys.exit(f"{found.count('works')} of {len(found)} work")
