"""The policy printed in the documentation of the scheduler schedules requests in our core."""

from __future__ import annotations

import random

import pytest

from midstream.executor import CapacitySchedulerPolicy
from scheduler.core.capacity_scheduler import GuaranteedNoEvict
from scheduler.core.micro_batch_scheduler import InflightFused
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.list_schedulers import (
    BindMicroBatchScheduler,
    CapacityScheduler,
    KvCacheManager,
    ListCapacity,
    ListMicroBatch,
    ListScheduler,
    LlmRequest,
    LlmRequestState,
    MicroBatchScheduler,
    RequestList,
    RequestScheduler,
    SchedulerOutput,
)
from scheduler.list_schedulers import SimpleScheduler as ListSimpleScheduler
from tests.scheduler.harness import Harness
from tests.seeds.listings import run

GUARANTEED_NO_EVICT = """
class GuaranteedNoEvictScheduler(CapacityScheduler):
    # only schedule requests has no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int, kv_cache_manager):
        super(GuaranteedNoEvictScheduler, self).__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(
        self, active_requests: RequestList
    ) -> tuple[list[LlmRequest], list[LlmRequest]]:
        scheduled_requests = []
        pending_requests = []
        reserved_blocks = 0
        max_blocks = self.kv_cache_manager.get_max_resource_count()
        for request in active_requests:
            req_state = request.state
            # if request cannot be scheduled yet or request should no longer be scheduled, skip
            if req_state.value < self.no_schedule_until_state.value or req_state.value >= self.no_schedule_after_state.value:
                continue

            if len(scheduled_requests
                   ) >= self.max_num_requests or reserved_blocks >= max_blocks:
                break
            elif req_state == LlmRequestState.GENERATION_IN_PROGRESS or req_state == LlmRequestState.GENERATION_TO_COMPLETE:
                scheduled_requests.append(request)
                reserved_blocks += self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
            else:
                pending_requests.append(request)

        avaiable_blocks = max_blocks - reserved_blocks
        for request in pending_requests:
            req_state = request.state
            if len(scheduled_requests) >= self.max_num_requests:
                break
            elif req_state == LlmRequestState.CONTEXT_INIT:
                needed_blocks = self.kv_cache_manager.get_needed_resource_to_completion(
                    request)
                if needed_blocks <= avaiable_blocks:
                    scheduled_requests.append(request)
                    avaiable_blocks -= needed_blocks
                elif needed_blocks > avaiable_blocks:
                    # If one requests fails to be scheduled, break
                    break

        assert len(scheduled_requests) > 0, (
            "no pending request can get enough resource to complete, "
            "please increase KV cache pool size.")
        return scheduled_requests, []
"""  # noqa: E501


def make_policy() -> type[CapacityScheduler]:
    names = run(
        GUARANTEED_NO_EVICT,
        CapacityScheduler=CapacityScheduler,
        LlmRequest=LlmRequest,
        LlmRequestState=LlmRequestState,
        RequestList=RequestList,
    )
    policy: type[CapacityScheduler] = names["GuaranteedNoEvictScheduler"]
    return policy


def make_harness() -> Harness:
    capacity = ListCapacity(make_policy())
    return Harness(scheduler=SimpleScheduler(capacity, InflightFused()))


def test_the_documented_policy_starts_requests_that_fit_to_their_end() -> None:
    """With 8 blocks of 4 tokens, `a` and `b` need 3 blocks each until they end; `c` waits although its prompt would
    fit.
    """
    harness = make_harness()
    harness.add_group(num_blocks=8)
    for name in "abc":
        harness.submit(name, 4, 8)
    assert harness.turn()[0] == "+a[0:4] +b[0:4]"
    harness.run()
    harness.check_is_empty()
    assert len(harness.ended) == 3
    assert harness.core.totals.num_preemptions == 0


@pytest.mark.parametrize("seed", range(5))
def test_under_load_it_never_pauses_requests_and_finishes_all(seed: int) -> None:
    draw = random.Random(seed)
    harness = make_harness()
    harness.add_group(num_blocks=24, max_batch_size=6, max_num_tokens=16)
    for number in range(30):
        harness.submit(f"{number:02}", draw.randint(1, 30), draw.randint(1, 30))
        if number % 5 == 0:
            harness.turn()
    harness.run()
    harness.check_is_empty()
    assert len(harness.ended) == 30
    assert harness.core.totals.num_preemptions == 0


def test_a_list_of_requests_decides_who_generates_and_whose_prompt_is_computed() -> None:
    """The policy computes prompts one at a time, last first, and generates only when no prompt is left."""

    class LastFirst(MicroBatchScheduler):
        def schedule(
            self, active_requests: RequestList, inflight_request_ids: object
        ) -> tuple[RequestList, RequestList]:
            context = [item for item in active_requests if item.state is LlmRequestState.CONTEXT_INIT]
            return context[-1:], [] if context else active_requests

    harness = Harness(scheduler=SimpleScheduler(GuaranteedNoEvict(), ListMicroBatch(LastFirst)))
    harness.add_group(num_blocks=16)
    for name in "ab":
        harness.submit(name, 4, 2)
    harness.run()
    harness.check_is_empty()
    assert [plan for plan in harness.plans if "+" in plan] == ["+b[0:4]", "+a[0:4]"]
    assert len(harness.ended) == 2


def test_one_class_decides_everything() -> None:
    """At most one request runs at a time, the newest first."""

    class OneByOne(RequestScheduler):
        def schedule_request(self, active_requests: RequestList, inflight_request_ids: object) -> SchedulerOutput:
            running = [item for item in active_requests if not item.is_queued]
            chosen = running or active_requests[-1:]
            context = [item for item in chosen if item.state is LlmRequestState.CONTEXT_INIT]
            return SchedulerOutput(context, [item for item in chosen if item not in context])

    harness = Harness(scheduler=ListScheduler(OneByOne))
    harness.add_group(num_blocks=16)
    for name in "abc":
        harness.submit(name, 4, 2)
    harness.run()
    harness.check_is_empty()
    assert [plan for plan in harness.plans if "+" in plan] == ["+c[0:4]", "+b[0:4]", "+a[0:4]"]


def test_the_listed_policy_and_a_bound_one_make_a_simple_scheduler() -> None:
    policy = make_policy()
    harness = Harness()
    harness.add_group(num_blocks=8)
    manager = KvCacheManager(harness.core.groups[0])
    simple = ListSimpleScheduler(policy(4, manager.impl), BindMicroBatchScheduler(4, 16))
    assert simple.capacity_scheduler.kv_cache_manager is manager


def test_the_policies_have_the_documentations_names() -> None:
    assert {policy.name for policy in CapacitySchedulerPolicy} == {
        "MAX_UTILIZATION",
        "GUARANTEED_NO_EVICT",
        "STATIC_BATCH",
    }
