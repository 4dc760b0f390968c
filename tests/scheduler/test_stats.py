from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from midstream.clock import SteadyClock
from protos import stats_pb2
from scheduler.core.effects import IterationDone
from scheduler.core.events import WorkerBeat
from scheduler.edge.feed_batch import perf_metrics_of
from scheduler.wire.stats import iteration_stats_proto
from tests.scheduler.harness import MS, Harness

# TensorRT-LLM's names, by section of the statistics.
NAMES = {
    "": (
        "timestamp iter iterLatencyMS newActiveRequestsQueueLatencyMS numNewActiveRequests numActiveRequests "
        "numQueuedRequests numCompletedRequests maxNumActiveRequests cpuMemUsage gpuMemUsage pinnedMemUsage"
    ),
    "kvCacheStats": (
        "maxNumBlocks freeNumBlocks usedNumBlocks tokensPerBlock allocTotalBlocks allocNewBlocks reusedBlocks "
        "missedBlocks cacheHitRate"
    ),
    "inflightBatchingStats": (
        "numScheduledRequests numContextRequests numGenRequests numPausedRequests numCtxTokens microBatchId "
        "avgNumDecodedTokensPerIter"
    ),
    "staticBatchingStats": "numScheduledRequests numContextRequests numCtxTokens numGenTokens emptyGenSlots",
}


def iterations(**settings: Any) -> tuple[Harness, list[dict[str, Any]]]:
    """Return the statistics of a busy run as JSON."""
    harness = Harness(pipeline_depth=1, max_num_tokens=24, **settings)
    harness.add_group(num_blocks=8, max_batch_size=3)
    for number in range(6):
        harness.submit(f"r{number}", [*range(7, 13), 50 + number], 5 + number)
    harness.advance(3)
    group = harness.groups["g"]
    while group.plans:
        harness.now_ns += 2 * MS
        beat = WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, 0, (1, 2, 3))
        harness.handle(beat)
        harness.handle(group.run(harness.now_ns))
        harness.turn()
    stats = [
        iteration_stats_proto(effect.stats, SteadyClock())
        for effect in harness.effects
        if isinstance(effect, IterationDone)
    ]
    return harness, [MessageToDict(item, always_print_fields_with_no_presence=True) for item in stats]


def test_every_field_is_filled() -> None:
    lives = [
        *iterations(capacity="max_utilization")[1],
        *iterations(capacity="static_batch", batching="static")[1],
    ]
    for part, names in NAMES.items():
        values = [life[part] if part else life for life in lives]
        for name in names.split():
            assert all(name in item for item in values), name
            assert any(float(item[name]) if name != "timestamp" else item[name] for item in values), name


def test_one_iteration_by_hand() -> None:
    harness = Harness(pipeline_depth=1)
    group = harness.add_group(num_blocks=8)
    harness.submit("a", 6, 3)
    harness.advance(3)
    harness.now_ns += 2 * MS
    harness.handle(WorkerBeat(harness.now_ns, group.registration.connection, group.epoch, 0, (10, 20, 30)))
    harness.handle(group.run(harness.now_ns))
    harness.submit("b", 5, 3)
    harness.turn()
    harness.now_ns += 4 * MS
    harness.finish_step()
    first, second = [effect.stats for effect in harness.effects if isinstance(effect, IterationDone)]
    stats = iteration_stats_proto(first, SteadyClock())
    assert stats.timestamp == "01-01-1970 00:00:01.005000"
    assert (stats.iter, stats.iter_latency_ms, stats.new_active_requests_queue_latency_ms) == (1, 2.0, 3.0)
    assert (stats.cpu_mem_usage, stats.gpu_mem_usage, stats.pinned_mem_usage) == (10, 20, 30)
    assert [iteration_stats_proto(each, SteadyClock()).num_new_active_requests for each in (first, second)] == [1, 1]
    kv = stats.kv_cache_stats
    assert (kv.max_num_blocks, kv.used_num_blocks, kv.free_num_blocks, kv.tokens_per_block) == (8, 2, 6, 4)
    assert (kv.alloc_total_blocks, kv.alloc_new_blocks, kv.reused_blocks, kv.missed_blocks) == (2, 2, 0, 1)
    stats = iteration_stats_proto(second, SteadyClock())
    assert (stats.num_active_requests, stats.num_queued_requests, stats.max_num_active_requests) == (2, 0, 64)
    batch = stats.inflight_batching_stats
    assert (batch.num_context_requests, batch.num_gen_requests, batch.num_scheduled_requests) == (1, 1, 2)
    assert (batch.num_ctx_tokens, batch.micro_batch_id, batch.avg_num_decoded_tokens_per_iter) == (5, 2, 1.0)


def test_queued_requests_are_not_active() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(max_batch_size=1)
    harness.submit("a", 6, 3)
    harness.submit("b", 6, 3)
    harness.turn()
    harness.finish_step()
    counts = next(effect.stats for effect in harness.effects if isinstance(effect, IterationDone)).requests
    assert (counts.num_active, counts.num_queued, counts.max_num_active) == (1, 1, 1)


def test_performance_metrics_of_a_preempted_request() -> None:
    harness = Harness(capacity="max_utilization", pipeline_depth=1, max_num_tokens=4)
    harness.add_group(num_blocks=4)
    harness.submit("a", 6, 6)
    harness.submit("b", 2, 8)
    start_ns = harness.now_ns
    harness.now_ns += 3 * MS
    harness.turn()
    num_steps = {"a": 0, "b": 0}
    while harness.groups["g"].plans:
        for name in num_steps:
            num_steps[name] += name in harness.plans[-1].replace("+", "").replace("[", " ").split()
        harness.now_ns += MS
        harness.step()
    for name in ("a", "b"):
        request = harness.core.lifecycle.requests[name]
        metrics = perf_metrics_of(request, SteadyClock())
        assert metrics.arrival_unix_ns == start_ns
        assert metrics.num_steps == num_steps[name]
        assert metrics.arrival_unix_ns < metrics.first_scheduled_unix_ns < metrics.first_token_unix_ns
        assert metrics.first_token_unix_ns < metrics.last_token_unix_ns == request.times.finished_ns
    assert (
        perf_metrics_of(harness.core.lifecycle.requests["a"], SteadyClock()).first_scheduled_unix_ns
        == start_ns + 3 * MS
    )
    assert [perf_metrics_of(harness.core.lifecycle.requests[name], SteadyClock()).num_preemptions for name in "ab"] == [
        0,
        1,
    ]


def test_json_names_are_those_of_tensorrt_llm() -> None:
    names = {field.json_name for field in stats_pb2.IterationStats.DESCRIPTOR.fields}
    assert set(NAMES[""].split()) <= names


def test_statistics_are_not_computed_without_readers() -> None:
    harness = Harness(pipeline_depth=1)
    harness.core.report_iterations(enabled=False)
    harness.add_group()
    harness.submit("a", 4, 3)
    harness.run()
    assert not any(isinstance(effect, IterationDone) for effect in harness.effects)
    stats = harness.core.current_stats(0)  # the state can still be queried
    assert (stats.iteration, stats.step.num_decoded_tokens) == (3, 1)
