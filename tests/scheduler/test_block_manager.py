from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from scheduler.core.adoption import Adoption
from scheduler.core.block_manager import BlockManager, Retention
from scheduler.core.prefix_cache import BlocksRemoved, PrefixCache

NUM_BLOCKS = 6


def manager(num_blocks: int = 4) -> BlockManager:
    return BlockManager(num_blocks, PrefixCache())


def cache(blocks: BlockManager, block: int, value: int) -> None:
    """Leave a computed block in the cache."""
    assert blocks.prefix_cache.publish(block, value)
    blocks.release([block], 0)


def test_released_blocks_are_free_again_and_published_ones_cached() -> None:
    blocks = manager()
    first, second = blocks.allocate(2, 0)
    blocks.prefix_cache.publish(first, 11)
    blocks.release([second, first], 0)
    assert (blocks.num_free, blocks.num_cached, blocks.num_held) == (3, 1, 0)
    blocks.share([first], 0)
    assert (blocks.num_free, blocks.num_cached, blocks.num_held) == (3, 0, 1)
    assert blocks.check([[first]]) == []


def test_a_pending_block_is_released_with_its_last_owner() -> None:
    blocks = manager()
    (block,) = blocks.allocate(1, 0)
    blocks.prefix_cache.publish(block, 11)
    blocks.prefix_cache.claim([block], Adoption())
    blocks.release([block], 0)
    assert (blocks.num_free, blocks.num_cached) == (4, 0)
    assert blocks.prefix_cache.find([11]) == []
    assert blocks.prefix_cache.take_changes() == []  # has never been reported as stored


def test_the_block_released_first_is_evicted_first() -> None:
    blocks = manager(3)
    taken = blocks.allocate(3, 0)
    for block, value in zip(taken, (11, 12, 13), strict=True):
        cache(blocks, block, value)
    blocks.share([taken[0]], 0)
    blocks.release([taken[0]], 0)  # used again, so it is now the most recently used
    blocks.allocate(2, 0)
    assert blocks.prefix_cache.find([11]) == [taken[0]]
    assert blocks.prefix_cache.take_changes() == [BlocksRemoved((12,)), BlocksRemoved((13,))]
    assert blocks.counts.evicted == 2


def test_a_lower_retention_priority_is_evicted_before_an_older_block() -> None:
    blocks = manager(3)
    taken = blocks.allocate(3, 0)
    blocks.retain(taken[0], Retention(80, None))
    blocks.retain(taken[2], Retention(10, None))
    for block, value in zip(taken, (11, 12, 13), strict=True):
        cache(blocks, block, value)
    evicted = [blocks.allocate(1, 0)[0] for _ in range(3)]
    assert evicted == [taken[2], taken[1], taken[0]]


def test_retention_ends_with_its_duration_after_the_last_use() -> None:
    blocks = manager(2)
    taken = blocks.allocate(2, 0)
    blocks.retain(taken[0], Retention(80, 100))
    blocks.prefix_cache.publish(taken[0], 11)
    blocks.prefix_cache.publish(taken[1], 12)
    blocks.release([taken[0]], 0)
    blocks.release([taken[1]], 50)
    assert blocks.allocate(1, 99) == [taken[1]]
    blocks.prefix_cache.publish(taken[1], 12)
    blocks.release([taken[1]], 99)
    # At time 100, the first block returns to the default priority and is evicted after the other block.
    assert blocks.allocate(2, 100) == [taken[1], taken[0]]


def test_a_duration_counts_from_the_last_use() -> None:
    blocks = manager(2)
    kept, other = blocks.allocate(2, 0)
    blocks.retain(kept, Retention(80, 100))
    blocks.prefix_cache.publish(kept, 11)
    blocks.prefix_cache.publish(other, 12)
    blocks.release([kept], 0)
    blocks.share([kept], 60)
    blocks.release([kept], 60)
    blocks.release([other], 70)
    # The expiry that was set before the block's last use no longer matters.
    assert blocks.allocate(1, 159) == [other]
    blocks.release([other], 159)
    cache(blocks, blocks.allocate(1, 159)[0], 12)
    assert blocks.allocate(2, 160) == [other, kept]


def test_an_expired_duration_does_not_restart_on_reuse() -> None:
    blocks = manager(2)
    kept, other = blocks.allocate(2, 0)
    blocks.retain(kept, Retention(80, 100))
    blocks.prefix_cache.publish(kept, 11)
    blocks.prefix_cache.publish(other, 12)
    blocks.release([kept], 0)
    blocks.share([kept], 200)
    blocks.release([kept, other], 200)
    assert blocks.allocate(1, 201) == [kept]


@pytest.mark.parametrize(
    ("first", "second", "holds_at_50"),
    [
        ((35, None), (90, None), True),
        ((35, None), (90, 40), False),
        ((90, 40), (90, 60), True),
        ((90, 40), (90, None), True),
        ((90, None), (90, 40), True),
        ((90, 60), (50, None), True),
        ((90, None), (10, None), True),
        ((10, None), (20, None), False),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_retention_of_a_block_that_can_be_found_is_only_raised(
    first: tuple[int, int | None], second: tuple[int, int | None], *, holds_at_50: bool, is_held: bool
) -> None:
    blocks = manager(2)
    kept, other = blocks.allocate(2, 0)
    blocks.retain(kept, Retention(*first))
    blocks.prefix_cache.publish(kept, 11)
    if not is_held:
        blocks.release([kept], 0)
    blocks.raise_retention(kept, Retention(*second), 0)
    if is_held:
        blocks.release([kept], 0)
    blocks.retain(other, Retention(40, None))
    cache(blocks, other, 12)
    assert blocks.allocate(1, 50) == [other if holds_at_50 else kept]


def test_blocks_used_again_and_again_take_no_more_memory() -> None:
    blocks = manager(2)
    (block,) = blocks.allocate(1, 0)
    blocks.retain(block, Retention(80, 1 << 60))
    cache(blocks, block, 11)
    for time in range(100):
        blocks.share([block], time)
        blocks.release([block], time)
    assert len(blocks._expiries) <= 4


def test_a_second_block_with_the_same_contents_is_not_published() -> None:
    blocks = manager()
    first, second = blocks.allocate(2, 0)
    assert blocks.prefix_cache.publish(first, 11)
    assert not blocks.prefix_cache.publish(second, 11)
    blocks.release([first, second], 0)
    assert (blocks.num_free, blocks.num_cached) == (3, 1)


class BlockManagerMachine(RuleBasedStateMachine):
    """Compares the block manager with a model: a list of tables and an ordered list of cached (block, value) pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache()
        self.blocks = BlockManager(NUM_BLOCKS, self.cache)
        self.tables: list[list[int]] = []
        self.values: dict[int, int] = {}
        self.cached: list[int] = []
        self.next_value = 100

    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @precondition(lambda self: self.blocks.num_available > 0)
    @rule(count=st.integers(1, 3), publish=st.booleans())
    def allocate(self, count: int, publish: bool) -> None:
        count = min(count, self.blocks.num_available)
        num_free = NUM_BLOCKS - len(self.held()) - len(self.cached)
        evicted = self.cached[: max(0, count - num_free)]
        table = self.blocks.allocate(count, 0)
        assert set(evicted) <= set(table)
        self.cached = self.cached[len(evicted) :]
        for block in evicted:
            del self.values[block]
        assert not set(table) & self.held()
        self.tables.append(table)
        if publish:
            for block in table:
                self.next_value += 1
                assert self.cache.publish(block, self.next_value)
                self.values[block] = self.next_value

    @precondition(lambda self: self.values)
    @rule(pick=st.integers(0, 99))
    def share(self, pick: int) -> None:
        block = sorted(self.values)[pick % len(self.values)]
        assert self.cache.find([self.values[block]]) == [block]
        self.blocks.share([block], 0)
        self.tables.append([block])
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        table = self.tables.pop(pick % len(self.tables))
        self.blocks.release(reversed(table), 0)
        for block in reversed(table):
            if block not in self.held() and block in self.values:
                self.cached.append(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.blocks.check(self.tables) == []
        assert self.blocks.is_conserved
        assert self.blocks.num_held == len(self.held())
        assert self.blocks.num_cached == len(self.cached)


@pytest.mark.timeout(300)
def test_blocks_are_conserved_whatever_happens() -> None:
    run_state_machine_as_test(
        BlockManagerMachine, settings=settings(settings.get_profile("scheduler"), stateful_step_count=30)
    )
