"""A Python executor with the interface of TensorRT-LLM's `GenerationExecutor`, which runs requests on the service.

with GenerationExecutor.create(model="smollm2") as executor:
    for output in executor.generate_async("Once upon a time", SamplingParams(max_tokens=32), streaming=True):
        print(output.text_diff, end="", flush=True)
"""

from __future__ import annotations

from midstream.executor.api_request import OutputConfig, Request, SamplingConfig
from midstream.executor.batch_manager import BatchManager, InferenceRequest, OptionalParams
from midstream.executor.config import (
    BATCHED_POST_PROCESSOR_NAME,
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    ParallelConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from midstream.executor.executor import Executor, GenerationExecutor, ModelType
from midstream.executor.lifecycle import RequestState, RequestStats
from midstream.executor.output import AdditionalModelOutput, CompletionOutput, Logprob
from midstream.executor.request import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    MultimodalParams,
    NGramDecodingConfig,
    PromptAdapterRequest,
    TokenRangeRetentionConfig,
)
from midstream.executor.response import Response, ResponseResult
from midstream.executor.result import GenerationResult, ResultQueue
from midstream.executor.sampling_params import GuidedDecodingParams, SamplingParams
from midstream.executor.stats import IterationStats

# TensorRT-LLM's other name for the class.
SchedulerPolicy = CapacitySchedulerPolicy

__all__ = [
    "BATCHED_POST_PROCESSOR_NAME",
    "AdditionalModelOutput",
    "BatchManager",
    "BatchingType",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "DraftTargetDecodingConfig",
    "Executor",
    "ExecutorConfig",
    "GenerationExecutor",
    "GenerationRequest",
    "GenerationResult",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InferenceRequest",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "LogitsPostProcessorConfig",
    "Logprob",
    "ModelType",
    "MultimodalParams",
    "NGramDecodingConfig",
    "OptionalParams",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptAdapterRequest",
    "Request",
    "RequestState",
    "RequestStats",
    "Response",
    "ResponseResult",
    "ResultQueue",
    "SamplingConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerPolicy",
    "TokenRangeRetentionConfig",
]
