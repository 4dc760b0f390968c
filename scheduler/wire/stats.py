"""Converts statistics and KV events to protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from midstream.clock import SteadyClock
from protos import stats_pb2
from scheduler.core.prefix_cache import BlocksRemoved, BlocksStored, BlocksUpdated, CacheCleared, KvChange
from scheduler.core.request import FinishReason, Request, RequestState
from scheduler.core.stats import IterationStats
from scheduler.core.worker_group import WorkerGroup

_NS_PER_MS = 1e6


def iteration_stats_proto(stats: IterationStats, clock: SteadyClock) -> stats_pb2.IterationStats:
    """Return the statistics of one iteration, under TensorRT-LLM's names."""
    requests, kv, step = stats.requests, stats.kv, stats.step
    reused_and_missed = kv.reused + kv.missed
    cpu_bytes, gpu_bytes, pinned_bytes = stats.memory
    return stats_pb2.IterationStats(
        timestamp=datetime.fromtimestamp(clock.to_unix_ns(stats.time_ns) / 1e9, UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
        iter=stats.iteration,
        iter_latency_ms=step.latency_ns / _NS_PER_MS,
        num_new_active_requests=step.num_new_requests,
        new_active_requests_queue_latency_ms=step.queue_latency_ns / _NS_PER_MS,
        num_active_requests=requests.num_active,
        num_queued_requests=requests.num_queued,
        num_completed_requests=requests.num_completed,
        max_num_active_requests=requests.max_num_active,
        cpu_mem_usage=cpu_bytes,
        gpu_mem_usage=gpu_bytes,
        pinned_mem_usage=pinned_bytes,
        kv_cache_stats=stats_pb2.KvCacheStats(
            max_num_blocks=kv.num_blocks,
            free_num_blocks=kv.num_free,
            used_num_blocks=kv.num_used,
            tokens_per_block=kv.tokens_per_block,
            alloc_total_blocks=kv.allocated,
            alloc_new_blocks=kv.allocated_new,
            reused_blocks=kv.reused,
            cached_num_blocks=kv.num_cached,
            missed_blocks=kv.missed,
            cache_hit_rate=kv.reused / reused_and_missed if reused_and_missed else 0.0,
            evicted_blocks=kv.evicted,
        ),
        inflight_batching_stats=stats_pb2.InflightBatchingStats(
            num_scheduled_requests=step.num_scheduled_requests,
            num_context_requests=step.num_context_requests,
            num_gen_requests=step.num_generation_requests,
            num_paused_requests=step.num_paused_requests,
            num_ctx_tokens=step.num_context_tokens,
            micro_batch_id=step.micro_batch_id,
            avg_num_decoded_tokens_per_iter=(
                step.num_decoded_tokens / step.num_scheduled_requests if step.num_scheduled_requests else 0.0
            ),
        ),
        static_batching_stats=stats_pb2.StaticBatchingStats(
            num_scheduled_requests=step.num_scheduled_requests,
            num_context_requests=step.num_context_requests,
            num_ctx_tokens=step.num_context_tokens,
            num_gen_tokens=step.num_generation_tokens,
            empty_gen_slots=step.empty_generation_slots,
        ),
        group_id=stats.group_id,
        num_finished_by_reason=stats.num_finished_by_reason,
        num_stale_messages=stats.num_stale_messages,
        num_conservation_violations=stats.num_conservation_violations,
        speculative_stats=stats_pb2.SpeculativeStats(
            num_draft_tokens=step.num_draft_tokens,
            num_accepted_tokens=step.num_accepted_tokens,
            acceptance_rate=step.num_accepted_tokens / step.num_draft_tokens if step.num_draft_tokens else 0.0,
        ),
        num_preemptions=stats.num_preemptions,
    )


def request_stats_proto(request: Request) -> stats_pb2.RequestStats:
    num_prompt, num_steps = len(request.spec.prompt), request.num_decoding_steps if request.sequences else 0
    stats = stats_pb2.RequestStats(
        id=request.request_id,
        num_prompt_tokens=num_prompt,
        num_sequences=len(request.sequences),
        num_generated_tokens=request.num_output_tokens,
        num_preemptions=request.counters.num_preemptions,
        avg_num_decoded_tokens_per_iter=request.num_output_tokens / num_steps if num_steps else 0.0,
    )
    if request.state is RequestState.FINISHED:
        stats.stage = stats_pb2.RequestStats.STAGE_GENERATION_COMPLETE
        stats.context_prefill_position = num_prompt if request.num_output_tokens else 0
        stats.is_aborted = any(item.end and item.end.reason is FinishReason.ABORT for item in request.sequences)
    elif request.state is RequestState.QUEUED or request.group is None:
        stats.stage = stats_pb2.RequestStats.STAGE_QUEUED
        stats.paused = request.times.first_scheduled_ns != 0
    else:
        _fill_active(stats, request, num_prompt)
    return stats


def _fill_active(stats: stats_pb2.RequestStats, request: Request, num_prompt: int) -> None:
    group = request.group
    assert group is not None
    placed = [sequence for sequence in request.placed_sequences if sequence.table]
    stats.group_id = group.group_id
    stats.scheduled = request.request_id in group.inflight_request_ids
    num_computed = max((sequence.num_computed for sequence in placed), default=0)
    stats.context_prefill_position = min(num_computed, num_prompt)
    if any(sequence.request is request for sequence in group.context):
        is_planned = stats.scheduled or request.num_decoding_steps > 0
        stage = "STAGE_CONTEXT_IN_PROGRESS" if is_planned else "STAGE_SCHEDULED"
        stats.stage = stats_pb2.RequestStats.Stage.Value(stage)
    elif request.num_output_tokens:
        stats.stage = stats_pb2.RequestStats.STAGE_GENERATION_IN_PROGRESS
    else:
        stats.stage = stats_pb2.RequestStats.STAGE_CONTEXT_IN_PROGRESS  # its last chunk has no result yet
    num_blocks = len({block for sequence in placed for block in sequence.held_blocks})
    num_reused = max((sequence.num_hit_blocks for sequence in placed), default=0)
    num_missed = max(num_prompt // group.tokens_per_block - num_reused, 0)
    stats.alloc_total_blocks_per_request = num_blocks
    stats.alloc_new_blocks_per_request = max(num_blocks - num_reused, 0)
    stats.reused_blocks_per_request = num_reused
    stats.missed_blocks_per_request = num_missed
    stats.kv_cache_hit_rate_per_request = num_reused / (num_reused + num_missed) if num_reused + num_missed else 0.0


def kv_event_proto(sequence_number: int, group_id: str, change: KvChange) -> stats_pb2.KvEvent:
    """Return the event for one change of a prefix cache."""
    event = stats_pb2.KvEvent(sequence_number=sequence_number, group_id=group_id)
    if isinstance(change, BlocksStored):
        event.stored.parent_hash = change.parent_hash
        event.stored.block_hashes.extend(change.block_hashes)
        event.stored.token_ids.extend(change.token_ids)
        event.stored.tokens_per_block = change.tokens_per_block
        event.stored.lora_name = change.lora_name
        event.stored.priorities.extend(change.priorities)
    elif isinstance(change, BlocksRemoved):
        event.removed.block_hashes.extend(change.block_hashes)
    elif isinstance(change, BlocksUpdated):
        event.updated.CopyFrom(
            stats_pb2.KvBlocksUpdated(
                block_hashes=change.block_hashes, cache_level=change.cache_level, priority=change.priority
            )
        )
    else:
        event.cleared.SetInParent()
    return event


def kv_snapshot_proto(sequence_number: int, groups: Iterable[WorkerGroup]) -> stats_pb2.KvEventBatch:
    """Return the contents of the groups' prefix caches as of the event with this number."""
    batch = stats_pb2.KvEventBatch(is_snapshot=True)
    batch.events.append(kv_event_proto(sequence_number, "", CacheCleared()))
    for group in groups:
        stored, below = group.prefix_cache.contents(group.tokens_per_block), group.prefix_cache.contents_below()
        for change in (stored, below) if below.block_hashes else (stored,):
            batch.events.append(kv_event_proto(sequence_number, group.group_id, change))
    return batch
