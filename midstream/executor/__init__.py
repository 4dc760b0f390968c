"""TensorRT-LLM's executor in Python, which runs requests on the service: `Executor` and its parts have the names,
shapes and defaults of `tensorrt_llm.bindings.executor`, and `GenerationExecutor` those of `tensorrt_llm.executor`.

with GenerationExecutor.create(model="smollm2") as executor:
    for output in executor.generate_async("Once upon a time", SamplingParams(max_tokens=32), streaming=True):
        print(output.text_diff, end="", flush=True)
"""

from __future__ import annotations

from midstream.executor.batch_manager import GptManager, TrtGptModelOptionalParams
from midstream.executor.completion_output import CompletionOutput, Logprob
from midstream.executor.config import (
    CacheTransceiverConfig,
    DebugConfig,
    DecodingConfig,
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    RuntimeDefaults,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from midstream.executor.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DecodingMode,
    FinishReason,
    KvCacheTransferMode,
    ModelType,
    RequestStage,
    RequestType,
    TrtGptModelType,
)
from midstream.executor.executor import Executor
from midstream.executor.generation_executor import GenerationExecutor
from midstream.executor.generation_request import (
    GenerationRequest,
    LoRARequest,
    MultimodalParams,
    PromptAdapterRequest,
)
from midstream.executor.generation_result import GenerationResult, ResultQueue
from midstream.executor.inference_request import InferenceRequest, NamedTensor
from midstream.executor.lifecycle import RequestState
from midstream.executor.output_config import AdditionalModelOutput, AdditionalOutput, OutputConfig
from midstream.executor.request import Request
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
)
from midstream.executor.response import (
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingFastLogitsInfo,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from midstream.executor.sampling_config import SamplingConfig
from midstream.executor.sampling_params import SamplingParams
from midstream.executor.serialization import deserialize_result, serialize_result
from midstream.executor.stats import (
    DebugTensorsPerIteration,
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)

# TensorRT-LLM's other name for the class.
SchedulerPolicy = CapacitySchedulerPolicy

__all__ = [
    "AdditionalModelOutput",
    "AdditionalOutput",
    "BatchingType",
    "CacheTransceiverBackendType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DebugConfig",
    "DebugTensorsPerIteration",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleConfig",
    "Executor",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GenerationExecutor",
    "GenerationRequest",
    "GenerationResult",
    "GptManager",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InferenceRequest",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTransferMode",
    "LoRARequest",
    "LogitsPostProcessorConfig",
    "Logprob",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "MultimodalParams",
    "NGramDecodingConfig",
    "NamedTensor",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptAdapterRequest",
    "PromptTuningConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestState",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "ResultQueue",
    "RuntimeDefaults",
    "SamplingConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerPolicy",
    "SpecDecodingStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
    "deserialize_result",
    "serialize_result",
]
