"""Blocks of a dead worker on the same host are reused; only the remaining tokens are recomputed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.core.effects import EpochEnded, KvChanged
from scheduler.core.prefix_cache import BlocksStored
from scheduler.core.request import FinishReason
from tests.scheduler.harness import Harness

PROMPT = list(range(100, 110))  # 2 blocks of 4 tokens and a partial one


def decoding() -> Harness:
    """Run a request with 10 prompt tokens on the first of two workers that share memory, with one step in flight."""
    harness = Harness(pipeline_depth=1)
    harness.add_group("g", kv_store="host")
    harness.submit("a", PROMPT, 12)
    harness.turn()
    harness.add_group("h", kv_store="host")
    for _ in range(7):
        harness.step("g")
    return harness


def test_full_blocks_are_adopted_and_the_rest_is_computed() -> None:
    harness = decoding()
    heir = harness.groups["h"]
    harness.cut("g")
    # 17 tokens are known, and the last one is always computed, so up to 4 full blocks before it are requested. Only
    # three are found, because the report that the fourth is full was lost with the step in flight.
    (asked,) = heir.batches
    assert len(asked.adopted_blocks) == 4
    assert not asked.context_rows
    harness.run()
    assert heir.num_adopted == 3
    assert heir.model.num_context_tokens == 17 - 3 * 4
    assert harness.ended == {"a": FinishReason.LENGTH}
    harness.check_is_empty()


def test_blocks_that_a_worker_leaves_are_adopted() -> None:
    harness = decoding()
    heir = harness.groups["h"]
    harness.leave("g", leaves_blocks=True)
    harness.run()
    assert heir.num_adopted == 3
    assert harness.ended == {"a": FinishReason.LENGTH}
    harness.check_is_empty()


def test_blocks_that_a_worker_takes_with_it_are_computed() -> None:
    harness = decoding()
    harness.leave("g")
    harness.run()
    assert harness.groups["h"].num_adopted == 0
    assert harness.ended == {"a": FinishReason.LENGTH}


def test_neighbours_continue_in_a_step_that_adopts_blocks() -> None:
    harness = decoding()
    harness.submit("b", 6, 12)
    harness.turn()
    assert harness.group("h").active
    harness.step("h")
    harness.cut("g")
    harness.step("h")
    (asked,) = harness.groups["h"].batches
    assert asked.adopted_blocks
    assert asked.repeat_generation
    harness.run()
    harness.check_is_empty()


@pytest.mark.parametrize("store", ["", "another host"])
def test_a_worker_with_other_memory_recomputes_everything(store: str) -> None:
    harness = decoding()
    harness.cut("h")
    other = harness.add_group("h", kv_store=store)
    harness.cut("g")
    harness.run()
    assert other.num_adopted == 0
    assert other.model.num_context_tokens == 17
    harness.check_is_empty()


def test_missing_blocks_are_computed() -> None:
    harness = decoding()
    heir = harness.groups["h"]
    harness.groups["g"].store = []  # the memory of the pool is lost too
    harness.cut("g")
    harness.run()
    assert heir.num_adopted == 0
    assert heir.model.num_context_tokens == 17
    harness.check_is_empty()


def test_requests_that_share_a_prefix_wait_for_one_adoption() -> None:
    harness = decoding()
    harness.submit("b", PROMPT, 12)
    harness.turn()
    harness.step("g")
    harness.step("g")
    heir = harness.groups["h"]
    harness.cut("g")
    harness.run()
    assert heir.num_adopted >= 2
    assert heir.model.num_context_tokens < 2 * 10
    assert set(harness.ended) == {"a", "b"}
    harness.check_is_empty()


def test_a_request_that_ends_in_the_meantime_releases_its_blocks() -> None:
    harness = decoding()
    harness.cut("g")
    assert harness.groups["h"].batches[0].adopted_blocks
    harness.core.lifecycle.end(harness.core.lifecycle.requests["a"], FinishReason.ABORT)
    harness.run()
    harness.check_is_empty()


def test_an_adoption_that_kills_a_worker_is_not_repeated() -> None:
    """The adopted blocks may be the reason why the worker died, so the next worker recomputes them."""
    harness = decoding()
    harness.cut("g")
    assert harness.groups["h"].batches[0].adopted_blocks
    harness.cut("h")
    heir = harness.add_group("i", kv_store="host")
    harness.run()
    assert heir.num_adopted == 0
    assert heir.model.num_context_tokens == 17
    harness.check_is_empty()


def test_the_next_process_of_the_only_worker_takes_over_as_well() -> None:
    harness = decoding()
    harness.cut("h")
    harness.cut("g")
    heir = harness.add_group("g", kv_store="host")
    harness.run()
    assert heir.num_adopted == 3
    harness.check_is_empty()


def test_adopted_blocks_are_reported_as_stored() -> None:
    harness = decoding()
    harness.cut("g")
    harness.effects.clear()
    harness.step("h")
    stored = [
        change
        for effect in harness.effects
        if isinstance(effect, KvChanged)
        for change in effect.changes
        if isinstance(change, BlocksStored)
    ]
    assert [list(change.token_ids) for change in stored[:2]] == [PROMPT[:4], PROMPT[4:8]]


def test_a_block_that_was_not_asked_for_cannot_be_missing() -> None:
    harness = decoding()
    harness.cut("g")
    heir = harness.groups["h"]
    harness.handle(replace(heir.run(harness.now_ns), missing_blocks=frozenset((60,))))
    assert [effect.epoch for effect in harness.effects if isinstance(effect, EpochEnded)] == [heir.epoch]


def test_blocks_not_found_count_as_work_not_as_cached() -> None:
    harness = Harness(pipeline_depth=1)
    harness.add_group("g", kv_store="host", max_num_tokens=8)
    for name in "ab":
        harness.submit(name, 12, 4)
        harness.turn()
    assert set(map(str, harness.group("g").context)) == {"Sequence(a/0, 8 of 12)", "Sequence(b/0, 0 of 12)"}
    harness.groups["g"].store = []  # the memory of the pool is lost too
    heir = harness.add_group("h", kv_store="host", max_num_tokens=8)
    harness.cut("g")
    assert heir.batches[0].adopted_blocks
    harness.step("h")
    assert harness.group("h").num_context_tokens == 24 - 8
    harness.run()
    assert harness.core.lifecycle.requests["b"].counters.num_cached_tokens == 0
    assert heir.model.num_context_tokens == 24


def test_generation_continues_beside_separate_context_steps() -> None:
    harness = Harness(batching="inflight", pipeline_depth=1)
    harness.add_group("g", kv_store="host")
    harness.submit("a", PROMPT, 12)
    harness.turn()
    heir = harness.add_group("h", kv_store="host")
    harness.submit("b", 6, 12)
    harness.turn()
    harness.step("g")
    for _ in range(2):
        harness.step("h")
    harness.cut("g")
    harness.step("h")
    (asked,) = heir.batches
    assert asked.adopted_blocks
    assert asked.generation_rows or asked.repeat_generation
    harness.run()
    harness.check_is_empty()


@pytest.mark.parametrize("seed", range(40))
def test_adopted_blocks_have_the_contents_of_their_hashes(seed: int) -> None:
    """There are few blocks and common prefixes, and workers die at any time; the fake model checks the contents of each
    block.
    """
    dice = random.Random(seed)
    harness = Harness(pipeline_depth=2, max_worker_deaths=1000)
    num_adopted = 0
    for name in "gh":
        harness.add_group(name, num_blocks=24, max_batch_size=6, kv_store="host")
    for number in range(30):
        prompt = [
            *range(100, 100 + dice.randrange(1, 20)),
            *(dice.randrange(300, 900) for _ in range(dice.randrange(3))),
        ]
        harness.submit(f"r{number}", prompt, dice.randrange(1, 20))
        harness.turn()
        for _ in range(dice.randrange(8)):
            name = dice.choice("gh")
            if harness.groups[name].plans:
                harness.step(name)
                harness.check()
        if dice.random() < 0.1:
            active = [request for request in harness.core.lifecycle.requests.values() if request.group]
            if active:
                harness.core.lifecycle.end(dice.choice(active), FinishReason.ABORT)
        if dice.random() < 0.3:
            name = dice.choice("gh")
            num_adopted += harness.groups[name].num_adopted
            harness.cut(name)
            harness.add_group(name, num_blocks=24, max_batch_size=6, kv_store="host")
    harness.run()
    harness.check_is_empty()
    assert num_adopted + sum(group.num_adopted for group in harness.groups.values()) > 0
