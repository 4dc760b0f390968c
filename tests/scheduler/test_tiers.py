"""Blocks stored in tiers are fetched instead of recomputed, a few per step."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core import worker_group
from scheduler.core.effects import KvChanged
from scheduler.core.events import WorkerBeat
from scheduler.core.prefix_cache import BlocksRemoved, BlocksStored, BlocksUpdated
from scheduler.core.request import FinishReason
from scheduler.core.request_spec import RetentionRange
from tests.scheduler.fake_group import FakeGroup
from tests.scheduler.harness import Harness

PROMPT = list(range(100, 122))  # 5 blocks of 4 tokens and a partial one
STEP_BYTES = 32 << 20


def stored(**group: Any) -> tuple[Harness, FakeGroup]:
    """Return a worker group whose pool is empty and whose tiers hold the prompt's blocks."""
    harness = Harness(pipeline_depth=1)
    first = harness.add_group("g")
    harness.submit("first", PROMPT, 4)
    harness.run()
    harness.cut("g")
    hashes = tuple(int(value) for value in first.hashes if value)
    return harness, harness.add_group("h", tier_store="host", stored_hashes=hashes, **group)


def test_a_new_request_begins_with_stored_blocks() -> None:
    harness, group = stored()
    harness.submit("a", [*PROMPT[:12], *range(300, 310)], 4)
    harness.run()
    assert group.num_adopted == 3
    assert group.model.num_context_tokens == 22 - 12
    assert (
        harness.core.lifecycle.requests["a"].counters.num_cached_tokens == harness.core.totals.prefix_cache_hits == 12
    )
    assert harness.ended["a"] is FinishReason.LENGTH
    harness.check_is_empty()


def test_a_step_fetches_a_limited_number_of_blocks() -> None:
    harness, group = stored(block_bytes=STEP_BYTES // 2)
    harness.submit("a", PROMPT, 4)
    harness.turn()
    asked = []
    while group.batches and group.batches[0].adopted_blocks:
        asked.append(len(group.batches[0].adopted_blocks))
        harness.step("h")
    assert asked == [2, 2, 1]
    harness.run()
    assert group.model.num_context_tokens == 22 - 20
    harness.check_is_empty()


def test_requests_that_share_a_prefix_fetch_it_once() -> None:
    harness, group = stored()
    for name in "abc":
        harness.submit(name, PROMPT, 4)
    harness.run()
    assert group.num_adopted == 5
    assert group.model.num_context_tokens == 3 * 2
    harness.check_is_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_blocks_that_are_given_back_before_they_were_fetched_are_not_written_to(num_steps: int) -> None:
    harness, group = stored(block_bytes=STEP_BYTES, num_blocks=12)
    harness.submit("a", PROMPT, 4)
    harness.turn()
    for _ in range(num_steps):
        harness.step("h")
    harness.core.lifecycle.end(harness.core.lifecycle.requests["a"], FinishReason.ABORT)
    harness.submit("b", 40, 4)
    harness.run()
    assert harness.ended["b"] is FinishReason.LENGTH
    assert group.num_adopted <= num_steps + 1
    harness.check_is_empty()


def test_a_sharing_sequence_computes_blocks_that_the_first_did_not_fetch() -> None:
    harness, group = stored(block_bytes=STEP_BYTES)
    for name in "ab":
        harness.submit(name, PROMPT, 4)
    harness.turn()
    harness.core.lifecycle.end(harness.core.lifecycle.requests["a"], FinishReason.ABORT)
    harness.run()
    assert harness.ended["b"] is FinishReason.LENGTH
    assert group.num_adopted <= 1
    harness.check_is_empty()


def test_missing_blocks_are_computed_and_not_looked_up_again() -> None:
    harness, group = stored()
    group.store.clear()
    harness.submit("a", PROMPT, 4)
    harness.run()
    assert (group.num_adopted, group.model.num_context_tokens) == (0, 22)
    assert harness.core.lifecycle.requests["a"].counters.num_cached_tokens == 0
    assert len(harness.group("h").stored) == 1  # the block that contains output of `first`
    harness.check_is_empty()


def test_heartbeats_tell_what_changed() -> None:
    harness, group = stored()
    known = set(harness.group("h").stored)
    some = min(known)
    connection = group.registration.connection
    harness.handle(WorkerBeat(harness.now_ns, connection, group.epoch, 0, (0, 0, 0), (5,), (some,)))
    assert harness.group("h").stored == known - {some} | {5}


def test_kv_events_tell_which_blocks_are_in_tiers() -> None:
    """A pool of 6 blocks has 4 of the prompt's 5 blocks evicted, of which the tiers hold all but one."""
    harness, group = stored(num_blocks=6)
    connection = group.registration.connection
    harness.submit("a", PROMPT, 1)
    harness.run()
    known = list(changes(harness, "h")[-1].block_hashes[-1:])  # of the block that was stored last
    harness.handle(WorkerBeat(harness.now_ns, connection, group.epoch, 0, (0, 0, 0), (), tuple(known)))
    num_before = len(changes(harness, "h"))
    harness.submit("b", list(range(500, 516)), 1)
    harness.run()
    evicted = [change for change in changes(harness, "h")[num_before:] if not isinstance(change, BlocksStored)]
    below = [change.block_hashes[0] for change in evicted if isinstance(change, BlocksUpdated)]
    assert [change.block_hashes[0] for change in evicted if isinstance(change, BlocksRemoved)] == known
    assert all(change.cache_level == 1 for change in evicted if isinstance(change, BlocksUpdated))
    assert len(below) >= 2
    assert set(below) <= harness.group("h").stored
    assert set(harness.group("h").prefix_cache.contents_below().block_hashes) == set(below)
    # What another worker removes from the shared tiers is gone for both.
    other = harness.add_group("i", tier_store="host")
    gone = below[0]
    beat = WorkerBeat(harness.now_ns, other.registration.connection, other.epoch, 0, (0, 0, 0), (), (gone, 77))
    harness.handle(beat)
    assert changes(harness, "h")[-1] == BlocksRemoved((gone,))
    harness.cut("i")
    harness.submit("c", PROMPT, 1)
    harness.run()
    again = [value for item in changes(harness, "h") if isinstance(item, BlocksStored) for value in item.block_hashes]
    assert again.count(below[-1]) == 2
    assert below[-1] not in harness.group("h").prefix_cache.contents_below().block_hashes


def changes(harness: Harness, group_id: str) -> list[Any]:
    effects = [item for item in harness.effects if isinstance(item, KvChanged) and item.group_id == group_id]
    return [change for effect in effects for change in effect.changes]


def test_a_worker_cannot_fill_the_memory_with_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_MAX_STORED", 10)
    harness, group = stored()
    connection = group.registration.connection
    for beat in range(100):
        hashes = (10 * beat, 10 * beat + 1)
        harness.handle(WorkerBeat(harness.now_ns, connection, group.epoch, 0, (0, 0, 0), hashes))
    harness.add_group("i", tier_store="host", stored_hashes=tuple(range(5000, 5100)))
    assert 10 <= len(harness.group("i").stored) <= 11


def test_groups_of_one_store_know_the_same() -> None:
    harness, group = stored()
    other = harness.add_group("i", tier_store="host", stored_hashes=(5,))
    assert harness.group("i").stored is harness.group("h").stored
    assert harness.group("h").stored == {5, *group.registration.stored_hashes}
    for name in ("h", "i"):
        harness.cut(name)
    harness.add_group("j", tier_store="host", stored_hashes=(6,))
    assert harness.group("j").stored == {6}
    assert other.num_adopted == 0


def test_a_worker_that_dies_while_it_fetches_is_not_followed_by_another() -> None:
    harness, group = stored()
    harness.submit("a", PROMPT, 4)
    harness.turn()
    assert group.batches[0].adopted_blocks
    harness.cut("h")
    heir = harness.add_group("i", tier_store="host", stored_hashes=group.registration.stored_hashes)
    harness.run()
    assert (heir.num_adopted, heir.model.num_context_tokens) == (0, 22)
    harness.check_is_empty()


def test_a_group_whose_tiers_hold_the_prefix_is_preferred() -> None:
    harness, group = stored()
    others = [harness.add_group(name) for name in ("a", "b")]
    harness.cut("h")
    group = harness.add_group("i", tier_store="host", stored_hashes=group.registration.stored_hashes)
    harness.submit("a", PROMPT, 4)
    harness.run()
    assert (group.num_adopted, [other.model.num_context_tokens for other in others]) == (5, [0, 0])
    harness.submit("b", [*PROMPT[:8], *range(300, 314)], 4)
    harness.submit("c", 40, 4)
    harness.turn()
    assert [len(other.plans) for other in others] in ([1, 0], [0, 1])
    harness.run()
    harness.check_is_empty()


def retained(group: FakeGroup) -> dict[int, tuple[int, int]]:
    """Return the (priority, duration in milliseconds) of retained blocks in the oldest step, by hash."""
    batch = group.batches[0]
    asked = zip(batch.retained_priorities, batch.retained_ms, strict=True)
    return dict(zip(batch.retained_hashes, asked, strict=True))


def test_retention_is_passed_on_to_the_tiers() -> None:
    harness = Harness(pipeline_depth=1)
    group = harness.add_group("g")
    harness.submit("a", PROMPT[:10], 1, retention=(RetentionRange(0, 4, 90), RetentionRange(4, 8, 80, 5 * 10**9)))
    harness.turn()
    first, second = (value for value in group.batches[0].block_hashes if value)
    assert retained(group) == {first: (90, 0), second: (80, 5000)}
    harness.run()
    # The duration starts when the block is no longer in use.
    harness.submit("b", [7], 1)
    harness.turn()
    assert retained(group) == {second: (80, 5000)}
    harness.run()
    # A request raises the retention of blocks that it finds.
    harness.submit("c", PROMPT[:10], 1, retention=(RetentionRange(0, 8, 85),))
    harness.turn()
    assert retained(group) == {first: (90, 0), second: (85, 0)}
    harness.run()
    harness.submit("d", [8], 1)
    harness.turn()
    assert retained(group) == {}


def test_blocks_of_waiting_requests_are_read_ahead() -> None:
    harness, group = stored(max_batch_size=1)
    hashes = harness.group("h").stored
    harness.submit("running", [7], 8)
    harness.submit("next", [*PROMPT[:12], *range(300, 310)], 4)
    harness.submit("last", PROMPT, 4)
    ahead = list[int]()
    harness.turn()
    while "running" not in harness.ended:
        ahead += group.batches[0].ahead_hashes
        harness.step("h")
    assert len(ahead) == len(set(ahead)) == 3, "those of the request that is next, once"
    assert set(ahead) <= hashes
    harness.run()
    assert group.num_adopted == 5


def test_while_a_step_adopts_blocks_those_of_the_next_step_are_read() -> None:
    harness, group = stored(block_bytes=STEP_BYTES // 2)
    harness.submit("a", PROMPT, 4)
    harness.turn()
    read = list[list[int]]()
    for _ in range(3):
        assert not read or list(group.batches[0].adopted_hashes) == read[-1]
        read.append(list(group.batches[0].ahead_hashes))
        harness.step("h")
    assert [len(hashes) for hashes in read] == [2, 1, 0]
