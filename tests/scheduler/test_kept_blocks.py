"""The blocks of a worker survive the end of an epoch and of the scheduler, and are not recomputed."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from scheduler.core.effects import GroupRefused, KvChanged
from scheduler.core.prefix_cache import BlocksStored, CacheCleared
from tests.scheduler.harness import Harness

PROMPT = list(range(100, 110))  # 2.5 blocks


def test_a_new_scheduler_has_only_the_newest_tokens_computed() -> None:
    old = Harness()
    before = old.add_group()
    old.submit("a", PROMPT, 40)
    old.turn()
    for _ in range(11):
        old.step()
    known = PROMPT + old.tokens["a", 0]
    assert len(known) == 21
    new = Harness(scheduler_epoch=8)
    group = new.add_group(after=before)
    new.submit("a again", known, 30)
    new.run()
    # 5 blocks are full, but only 4 are reused: the last step filled the fifth block, and the step that would have
    # reported this was discarded.
    assert new.core.lifecycle.requests["a again"].counters.num_cached_tokens == 16
    assert group.model.num_context_tokens == 5
    new.check_is_empty()


def test_a_worker_recomputes_little_after_a_link_failure() -> None:
    harness = Harness()
    before = harness.add_group(incarnation=5)
    harness.submit("a", PROMPT, 12)
    harness.turn()
    for _ in range(4):
        harness.step()
    again = harness.add_group(after=before, incarnation=5)
    harness.run()
    harness.check_is_empty()
    assert again.model.num_context_tokens < len(PROMPT)


def test_kept_blocks_are_reported_as_stored() -> None:
    harness = Harness()
    before = harness.add_group(incarnation=5)
    harness.submit("a", PROMPT, 2)
    harness.run()
    stored = harness.core.groups[0].prefix_cache.contents(4).block_hashes
    first = len(harness.effects)
    harness.add_group(after=before, incarnation=5)
    changes = [item for effect in harness.effects[first:] if isinstance(effect, KvChanged) for item in effect.changes]
    assert changes[-2:] == [CacheCleared(), BlocksStored(0, stored, array("I"), "", 4)]
    assert len(stored) == 2


def test_blocks_that_a_step_in_flight_may_change_are_not_kept() -> None:
    old = Harness()
    before = old.add_group(num_blocks=4)
    old.submit("a", PROMPT, 2)
    old.run()
    assert len(before.begin_anew().kept_blocks) == 2
    old.submit("b", list(range(200, 214)), 2)
    old.turn()  # the step uses all blocks; it counts once the worker has received it, even if it has not run
    assert len(before.begin_anew().kept_blocks) == 0


def test_a_scheduler_without_reuse_makes_workers_forget_them() -> None:
    old = Harness()
    before = old.add_group()
    old.submit("a", PROMPT, 2)
    old.run()
    new = Harness(enable_block_reuse=False)
    group = new.add_group(after=before)
    new.submit("b", PROMPT, 2)
    new.run()
    assert group.model.num_context_tokens == len(PROMPT)
    assert len(group.begin_anew().kept_blocks) == 0


@pytest.mark.parametrize(("blocks", "hashes"), [((1, 1), (7, 8)), ((1, 2), (7,)), ((64,), (7,))])
def test_invalid_kept_blocks_are_rejected(blocks: tuple[int, ...], hashes: tuple[int, ...]) -> None:
    harness = Harness()
    group = harness.add_group()
    again = replace(group.registration, connection=b"again", kept_blocks=blocks, kept_hashes=hashes)
    (refused,) = harness.handle(again)
    assert isinstance(refused, GroupRefused)
    assert refused.field == "kept_blocks"


@pytest.mark.parametrize("seed", range(40))
def test_kept_blocks_have_the_contents_of_their_hashes(seed: int) -> None:
    """There are few blocks and common prefixes, and epochs end at any time; the fake model checks the contents of each
    block.
    """
    dice = random.Random(seed)
    harness = Harness(pipeline_depth=2)
    group = harness.add_group(num_blocks=24, max_batch_size=6, incarnation=5)
    for number in range(30):
        prompt = [
            *range(100, 100 + dice.randrange(1, 20)),
            *(dice.randrange(300, 900) for _ in range(dice.randrange(3))),
        ]
        harness.submit(f"r{number}", prompt, dice.randrange(1, 20))
        harness.turn()
        for _ in range(dice.randrange(6)):
            if group.plans:
                harness.step()
        if dice.random() < 0.3:
            group = harness.add_group(after=group, num_blocks=24, max_batch_size=6, incarnation=5)
    harness.run()
    harness.check_is_empty()
