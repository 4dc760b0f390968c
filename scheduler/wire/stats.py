"""Statistics and KV events as they cross the wire."""

from __future__ import annotations

from datetime import UTC, datetime

from protos import stats_pb2
from scheduler.core.prefix_cache import BlocksRemoved, BlocksStored, KvChange
from scheduler.core.stats import IterationStats

_NS_PER_MS = 1e6


def iteration_stats_proto(stats: IterationStats) -> stats_pb2.IterationStats:
    """One iteration, under TensorRT-LLM's names."""
    requests, kv, step = stats.requests, stats.kv, stats.step
    reused_and_missed = kv.reused + kv.missed
    cpu_bytes, gpu_bytes, pinned_bytes = stats.memory
    return stats_pb2.IterationStats(
        timestamp=datetime.fromtimestamp(stats.time_ns / 1e9, UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
        iter=stats.iteration,
        iter_latency_ms=step.latency_ns / _NS_PER_MS,
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


def kv_event_proto(sequence_number: int, group_id: str, change: KvChange, tokens_per_block: int) -> stats_pb2.KvEvent:
    """One change of a prefix cache."""
    event = stats_pb2.KvEvent(sequence_number=sequence_number, group_id=group_id)
    if isinstance(change, BlocksStored):
        event.stored.parent_hash = change.parent_hash
        event.stored.block_hashes.extend(change.block_hashes)
        event.stored.token_ids.extend(change.token_ids)
        event.stored.tokens_per_block = tokens_per_block
        event.stored.lora_name = change.lora_name
    elif isinstance(change, BlocksRemoved):
        event.removed.block_hashes.extend(change.block_hashes)
    else:
        event.cleared.SetInParent()
    return event
