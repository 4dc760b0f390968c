"""A request with more sequences than a worker group has rows runs in parts, under every policy and despite losses."""

from __future__ import annotations

import pytest

from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.micro_batch_scheduler import InflightFused
from scheduler.core.request_scheduler import RequestScheduler, SimpleScheduler
from scheduler.list_schedulers import (
    BindCapacityScheduler,
    BindMicroBatchScheduler,
    CapacityScheduler,
    KvCacheManager,
    ListCapacity,
    ListScheduler,
    RequestList,
)
from scheduler.list_schedulers import SimpleScheduler as ListSimpleScheduler
from tests.scheduler.harness import Harness


class Everything(CapacityScheduler):
    """Lets all requests start, in order, and pauses none."""

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return active_requests, []


class InOneCall(ListSimpleScheduler):
    def __init__(self) -> None:
        super().__init__(Everything(), BindMicroBatchScheduler())


class Built(BindCapacityScheduler):
    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager) -> None:
        super().__init__(max_num_requests, kv_cache_manager)


POLICIES: dict[str, RequestScheduler] = {
    **{name: SimpleScheduler(policy(), InflightFused()) for name, policy in CAPACITY_SCHEDULERS.items()},
    "list": SimpleScheduler(ListCapacity(Everything), InflightFused()),
    "built-in list": SimpleScheduler(ListCapacity(Built), InflightFused()),
    "one call": ListScheduler(InOneCall),
}


def largest_step(harness: Harness, name: str) -> int:
    return max(plan.count(f"{name}/") for plan in harness.plans)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_larger_than_the_batch_runs_in_parts(policy: str) -> None:
    harness = Harness(scheduler=POLICIES[policy])
    harness.add_group(num_blocks=16, max_batch_size=3)
    harness.submit("x", 3, 6, client_id="other")
    harness.submit("n", 9, 5, num_sequences=8)
    harness.submit("y", 4, 3, client_id="other")
    harness.run()
    harness.check_is_empty()
    assert [len(harness.tokens["n", index]) for index in range(8)] == [5] * 8
    assert [len(harness.tokens[name, 0]) for name in "xy"] == [6, 3]
    assert 1 < largest_step(harness, "n") <= 3


def test_parts_start_as_rows_become_free() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=16, max_batch_size=2)
    harness.submit("n", 4, 2, num_sequences=5)
    assert harness.turn() == ["+n/0[0:4]"]
    assert harness.step() == ["+n/1[3:4] | n/0"]  # the partly filled block is copied from the first sequence
    assert harness.step() == ["+n/2[3:4] | n/1"]
    assert harness.step() == ["+n/3[3:4] | n/2"]
    assert harness.step() == ["+n/4[3:4] | n/3"]
    assert harness.step() == ["n/4"]
    harness.run()
    harness.check_is_empty()


def test_a_static_batch_of_one_request_is_followed_by_its_next_part() -> None:
    harness = Harness(pipeline_depth=1, capacity="static_batch")
    harness.add_group(num_blocks=16, max_batch_size=2)
    harness.submit("n", 5, 1, num_sequences=5)
    harness.run()
    harness.check_is_empty()
    assert harness.plans == ["+n/0[0:5] +n/1[4:5]", "+n/2[4:5] +n/3[4:5]", "+n/4[4:5]"]


def test_others_run_while_a_large_request_waits_for_rows() -> None:
    """Another client's requests do not wait until all parts have run."""
    harness = Harness(pipeline_depth=1)
    harness.add_group(num_blocks=64, max_batch_size=4)
    harness.submit("n", 4, 8, num_sequences=40)
    for _ in range(10):
        harness.turn() if not harness.plans else harness.step()
    harness.submit("x", 4, 4, client_id="other")
    for _ in range(20):
        harness.step()
    assert "x" in harness.ended
    assert "n" not in harness.ended
    harness.run()
    harness.check_is_empty()


@pytest.mark.parametrize("num_steps", range(1, 16, 2))
def test_parts_survive_the_loss_of_their_worker(num_steps: int) -> None:
    """The harness checks each token, and that none is emitted twice."""
    harness = Harness(capacity="max_utilization")
    group = harness.add_group(num_blocks=9, max_batch_size=3)
    harness.submit("n", 9, 7, num_sequences=7)
    harness.submit("x", 9, 9, client_id="other")
    harness.turn()
    for _ in range(num_steps):
        harness.step()
    harness.cut("g")
    harness.add_group(num_blocks=9, max_batch_size=3, after=group, incarnation=99)
    harness.run()
    harness.check_is_empty()
    assert [len(harness.tokens["n", index]) for index in range(7)] == [7] * 7


def test_a_request_whose_rows_do_not_fit_into_the_blocks_of_its_parts_is_refused() -> None:
    """Two rows of 17 tokens need 5 blocks each, of which they share the first; there are 6 blocks."""
    harness = Harness()
    harness.add_group(num_blocks=6, max_batch_size=2)
    harness.submit("n", 5, 13, num_sequences=3)
    harness.run()
    failure = harness.core.lifecycle.requests["n"].failure
    assert failure is not None
    assert failure.message == "prompt and output may need 36 tokens of KV cache; the workers have 24"
