"""An executor in Python, shaped like TensorRT-LLM's `GenerationExecutor`, whose engine is the service.

with GenerationExecutor.create(model="smollm2") as executor:
    for output in executor.generate_async("Once upon a time", SamplingParams(max_tokens=32), streaming=True):
        print(output.text_diff, end="", flush=True)
"""

from __future__ import annotations

from midstream.executor.batch_manager import BatchManager, InferenceRequest
from midstream.executor.config import (
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    SchedulerConfig,
)
from midstream.executor.executor import GenerationExecutor
from midstream.executor.output import CompletionOutput, Logprob
from midstream.executor.request import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    NGramDecodingConfig,
    PromptAdapterRequest,
    TokenRangeRetentionConfig,
)
from midstream.executor.response import Response, ResponseResult
from midstream.executor.result import GenerationResult
from midstream.executor.sampling_params import GuidedDecodingParams, SamplingParams
from midstream.executor.stats import IterationStats

__all__ = [
    "BatchManager",
    "BatchingType",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "DraftTargetDecodingConfig",
    "ExecutorConfig",
    "GenerationExecutor",
    "GenerationRequest",
    "GenerationResult",
    "GuidedDecodingParams",
    "InferenceRequest",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "Logprob",
    "NGramDecodingConfig",
    "PromptAdapterRequest",
    "Response",
    "ResponseResult",
    "SamplingParams",
    "SchedulerConfig",
    "TokenRangeRetentionConfig",
]
