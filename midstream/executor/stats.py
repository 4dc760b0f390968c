"""Statistics with TensorRT-LLM's names: of iterations, and of requests in each iteration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from midstream.executor.enums import RequestStage
from midstream.executor.lifecycle import RequestState, state_of
from midstream.executor.tensors import AnyTensor
from protos import stats_pb2 as pb

# Fields whose JSON name is not the field's in camel case.
_JSON_NAMES = {
    "iter_latency_ms": "iterLatencyMS",
    "new_active_requests_queue_latency_ms": "newActiveRequestsQueueLatencyMS",
    "kv_cache_transfer_ms": "kvCacheTransferMS",
    "specdec_stats": "specDecodingStats",
}
_STAGES: dict[int, RequestStage] = {
    pb.RequestStats.STAGE_QUEUED: RequestStage.QUEUED,
    pb.RequestStats.STAGE_SCHEDULED: RequestStage.QUEUED,
    pb.RequestStats.STAGE_CONTEXT_IN_PROGRESS: RequestStage.CONTEXT_IN_PROGRESS,
    pb.RequestStats.STAGE_GENERATION_IN_PROGRESS: RequestStage.GENERATION_IN_PROGRESS,
    pb.RequestStats.STAGE_GENERATION_COMPLETE: RequestStage.GENERATION_COMPLETE,
}


@dataclass(slots=True)
class KvCacheStats:
    """The KV cache; numbers of blocks unless stated otherwise."""

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass(slots=True)
class StaticBatchingStats:
    """The step of an iteration, with static batching."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0


@dataclass(slots=True)
class InflightBatchingStats:
    """The step of an iteration, with in-flight batching."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass(slots=True)
class SpecDecodingStats:
    """Drafts of an iteration."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    iter_latency_ms: float = 0.0
    draft_overhead: float = 0.0


@dataclass(slots=True)
class IterationStats:
    """Statistics of one iteration.

    Attributes:
        group_id: The worker group of the iteration; empty if these are the sums over several.
        cells: The statistics of each cell, if this is their sum.
    """

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: SpecDecodingStats | None = None
    group_id: str = ""
    cells: Sequence[IterationStats] = ()

    @property
    def current_batch_size(self) -> int:
        """Number of requests in the iteration's step."""
        step = self.inflight_batching_stats or self.static_batching_stats
        return step.num_scheduled_requests if step else 0

    def to_json_str(self) -> str:
        """Return the statistics in TensorRT-LLM's JSON format."""
        return json.dumps(_as_json(self))

    @staticmethod
    def from_fields(found: Mapping[str, Any]) -> IterationStats:
        """Build this from the message, as JSON."""
        stats = IterationStats(**_values(IterationStats, found))
        for name, kind in _PARTS.items():
            part = found.get(_json_name(name))
            if part is not None:
                setattr(stats, name, kind(**_values(kind, part)))
        drafts = found.get("speculativeStats")
        if drafts is not None:
            stats.specdec_stats = SpecDecodingStats(**_values(SpecDecodingStats, drafts))
        return stats

    def labelled(self) -> dict[str, object]:
        """Return the statistics under the labels used in the batch manager's documentation."""
        kv, step = self.kv_cache_stats or KvCacheStats(), self.inflight_batching_stats or InflightBatchingStats()
        static = self.static_batching_stats or StaticBatchingStats()
        return {
            "Timestamp": self.timestamp.partition(".")[0],
            "Iteration Counter": self.iter,
            "Active Request Count": self.num_active_requests,
            "Max Request Count": self.max_num_active_requests,
            "Max KV cache blocks": kv.max_num_blocks,
            "Free KV cache blocks": kv.free_num_blocks,
            "Used KV cache blocks": kv.used_num_blocks,
            "Tokens per KV cache block": kv.tokens_per_block,
            "Scheduled Requests": step.num_scheduled_requests,
            "Context Requests": step.num_context_requests,
            "Generation Requests": step.num_gen_requests,
            "Total Context Tokens": step.num_ctx_tokens,
            "MicroBatch ID": step.micro_batch_id,
            "Total Generation Tokens": static.num_gen_tokens,
            "Empty Generation Slots": static.empty_gen_slots,
        }


_PARTS: dict[str, type[Any]] = {
    "kv_cache_stats": KvCacheStats,
    "static_batching_stats": StaticBatchingStats,
    "inflight_batching_stats": InflightBatchingStats,
}


@dataclass(slots=True)
class DisServingRequestStats:
    """Transfer of a request's KV blocks; never set, since disaggregated serving is not supported."""

    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass(slots=True)
class RequestStats:
    """A request's statistics as known to the scheduler.

    Attributes:
        id: Id that the executor gave the request.
        context_prefill_position: Number of prompt tokens that are computed or in a step in flight.
        num_generated_tokens: Number of generated tokens, over all sequences.
        scheduled: Whether the request is in a step in flight.
        paused: Whether the request ran before and is waiting to run again.
        state: The request's life-cycle state, which is finer than `stage`.
    """

    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False
    dis_serving_stats: DisServingRequestStats | None = None
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0
    state: RequestState = RequestState.PENDING

    def to_json_str(self) -> str:
        """Return the statistics in TensorRT-LLM's JSON format."""
        return json.dumps(_as_json(self))

    @staticmethod
    def from_proto(request_id: int, stats: pb.RequestStats) -> RequestStats:
        """Build this from the message."""
        names = {item.name for item in fields(RequestStats)} - {"id", "stage", "dis_serving_stats", "state"}
        values = {name: getattr(stats, name) for name in names}
        return RequestStats(id=request_id, stage=_STAGES[stats.stage], state=state_of(stats), **values)


@dataclass(slots=True)
class RequestStatsPerIteration:
    """The statistics of all unfinished requests after an iteration."""

    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)

    def to_json_str(self) -> str:
        """Return the statistics in TensorRT-LLM's JSON format."""
        return json.dumps(_as_json(self))


@dataclass(slots=True)
class DebugTensorsPerIteration:
    """Tensors of an iteration; executors return none."""

    iter: int = 0
    debug_tensors: dict[str, AnyTensor] = field(default_factory=dict)


def sum_up(cells: Sequence[Mapping[str, Any]]) -> IterationStats:
    """Combine statistics of several cells: sums of counts, blocks and bytes; maxima of iteration ids and latencies."""
    found = [IterationStats.from_fields(cell) for cell in cells]
    if len(found) < 2:
        return found[0] if found else IterationStats()
    total: IterationStats = _sum(found)
    total.group_id, total.cells = "", found
    if total.kv_cache_stats is not None:
        kv = total.kv_cache_stats
        looked_up = kv.reused_blocks + kv.missed_blocks
        kv.cache_hit_rate = kv.reused_blocks / looked_up if looked_up else 0.0
    if total.inflight_batching_stats is not None:
        steps = [cell.inflight_batching_stats for cell in found if cell.inflight_batching_stats is not None]
        tokens = sum(step.avg_num_decoded_tokens_per_iter * step.num_scheduled_requests for step in steps)
        num_requests = total.inflight_batching_stats.num_scheduled_requests
        total.inflight_batching_stats.avg_num_decoded_tokens_per_iter = tokens / num_requests if num_requests else 0.0
    return total


# Statistics for which the maximum over cells is used, or that are equal in all cells.
_LARGEST = {
    "iter",
    "iter_latency_ms",
    "new_active_requests_queue_latency_ms",
    "micro_batch_id",
    "tokens_per_block",
    "timestamp",
    "group_id",
    "cells",
}


def _sum(items: Sequence[Any]) -> Any:
    values: dict[str, Any] = {}
    for item in fields(items[0]):
        found = [value for value in (getattr(one, item.name) for one in items) if value is not None]
        if not found:
            values[item.name] = None
        elif is_dataclass(found[0]):
            values[item.name] = _sum(found)
        else:
            values[item.name] = max(found) if item.name in _LARGEST else sum(found)
    return type(items[0])(**values)


def _values(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of a message for the fields of a class; protobuf writes 64-bit numbers as texts."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        value = found.get(_json_name(item.name))
        if isinstance(value, str) and item.type == "int":
            values[item.name] = int(value)
        elif isinstance(value, int | float | str):
            values[item.name] = value
    return values


def _as_json(stats: Any) -> Any:
    if isinstance(stats, list | tuple):
        return [_as_json(item) for item in stats]
    if not is_dataclass(stats):
        return stats
    own = {"cells", "state"}
    return {
        _json_name(item.name): _as_json(getattr(stats, item.name)) for item in fields(stats) if item.name not in own
    }


def _json_name(name: str) -> str:
    first, *others = name.split("_")
    return _JSON_NAMES.get(name, first + "".join(part.capitalize() for part in others))
