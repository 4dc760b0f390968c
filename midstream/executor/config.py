"""How an executor that starts its own services sets them up, under TensorRT-LLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class CapacitySchedulerPolicy(StrEnum):
    """Which requests may hold KV blocks; see docs/scheduler.md."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class BatchingType(StrEnum):
    """How steps are made up."""

    STATIC = "static"
    INFLIGHT = "inflight"
    INFLIGHT_FUSED = "inflight_fused"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The capacity policy."""

    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Size and use of the KV cache; None is the service's default."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: int | None = None
    free_gpu_memory_fraction: float | None = None
    tokens_per_block: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Settings of the services; None is their default.

    Attributes:
        settings: Any other setting of any service by its name, such as `{"num_threads": 1}`.
    """

    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_queue_size: int | None = None
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    batching_type: BatchingType = BatchingType.INFLIGHT_FUSED
    enable_chunked_context: bool = True
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The variables that the services read."""
        cache = self.kv_cache_config
        values = {
            "max_batch_size": self.max_batch_size,
            "max_num_tokens": self.max_num_tokens,
            "max_queue_size": self.max_queue_size,
            "capacity_policy": self.scheduler_config.policy.value,
            "batching_type": self.batching_type.value,
            "enable_chunked_context": self.enable_chunked_context,
            "enable_block_reuse": cache.enable_block_reuse,
            "max_kv_tokens": cache.max_tokens,
            "max_attention_window": cache.max_attention_window,
            "free_memory_fraction": cache.free_gpu_memory_fraction,
            "tokens_per_block": cache.tokens_per_block,
            **self.settings,
        }
        return {f"MIDSTREAM_{name.upper()}": str(value) for name, value in values.items() if value is not None}
