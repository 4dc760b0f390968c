"""The state and the statistics of a request while it runs."""

from __future__ import annotations

from midstream.executor import RequestState, RequestStats
from protos import stats_pb2
from scheduler.core.events import AbortRequested, StepDone
from scheduler.core.failure import UNAVAILABLE, Failure
from scheduler.wire.stats import request_stats_proto
from tests.scheduler.harness import Harness


def stats_of(harness: Harness, request_id: str = "a") -> stats_pb2.RequestStats:
    return request_stats_proto(harness.core.lifecycle.requests[request_id])


def state_of(harness: Harness) -> RequestState:
    return RequestStats.from_proto(1, stats_of(harness)).state


def test_a_request_goes_through_its_states() -> None:
    """A prompt of 10 tokens is computed in steps of 4 tokens with blocks of 4 tokens; 3 output tokens follow."""
    harness = Harness(pipeline_depth=1)
    harness.submit("a", 10, 3)
    assert (state_of(harness), stats_of(harness).paused) == (RequestState.PENDING, False)
    harness.add_group(max_num_tokens=4)
    seen = []
    positions = []
    while state_of(harness) is not RequestState.FINISHED:
        harness.turn()
        seen.append(state_of(harness))
        positions.append(stats_of(harness).context_prefill_position)
        assert stats_of(harness).scheduled
        assert stats_of(harness).group_id == "g"
        harness.finish_step()
    context, processing = RequestState.CONTEXT_PHASE, RequestState.PROCESSING
    assert seen == [context, context, processing, RequestState.GENERATION_PHASE, RequestState.GENERATING]
    assert positions == [4, 8, 10, 10, 10]
    stats = stats_of(harness)
    assert (stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_sequences) == (3, 10, 1)
    assert (stats.scheduled, stats.alloc_total_blocks_per_request, stats.group_id) == (False, 0, "")


def test_blocks_are_new_or_reused() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group()
    prompt = list(range(1, 13))
    harness.submit("first", prompt, 1)
    harness.run()
    harness.submit("a", prompt, 4)
    harness.turn()
    stats = stats_of(harness)
    assert stats.alloc_total_blocks_per_request == 3
    assert (stats.reused_blocks_per_request, stats.alloc_new_blocks_per_request) == (2, 1)
    assert stats.missed_blocks_per_request == 1
    assert stats.kv_cache_hit_rate_per_request == 2 / 3


def test_an_aborted_response_reports_it() -> None:
    harness = Harness()
    harness.submit("a", 3, 3)
    harness.handle(AbortRequested(harness.now_ns, "a"))
    assert state_of(harness) is RequestState.ABORTED


def test_tokens_per_iteration_are_those_of_the_steps_that_decoded() -> None:
    harness = Harness()
    harness.add_group()
    harness.submit("a", [1, 2, 3], 4)
    harness.run()
    assert request_stats_proto(harness.core.lifecycle.requests["a"]).avg_num_decoded_tokens_per_iter == 1.0


def test_a_request_that_its_worker_cannot_run_yet_is_not_preempted() -> None:
    """A worker reports it as unavailable, for example while its grammar is compiled."""
    harness = Harness()
    group = harness.add_group()
    harness.submit("a", [1, 2, 3], 2)
    harness.turn()
    plan = group.registration
    step = next(iter(harness.group().in_flight))
    harness.handle(
        StepDone(
            harness.now_ns,
            plan.connection,
            harness.group().epoch,
            step.step_id,
            [0],
            failures=((step.context[0].row, Failure(UNAVAILABLE, "its grammar is being compiled")),),
        )
    )
    request = harness.core.lifecycle.requests["a"]
    assert request in harness.core.queue
    assert (request.counters.num_preemptions, harness.core.totals.num_preemptions) == (0, 0)
    assert harness.core.totals.num_postponements == 1
