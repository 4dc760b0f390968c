"""Routing by cached prefixes, with 16 real scheduler cores whose events are late, lost and duplicated.

Every token of each cell's output is checked; it must be correct even if the index is wrong.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from midstream.kv_hashes import chain_hash, chain_seed
from protos import stats_pb2
from router.pipeline.cell_choice import choose_cell
from router.pipeline.kv_index import KvIndex, PromptBlocks
from scheduler.core.effects import KvChanged
from scheduler.wire.stats import kv_event_proto, kv_snapshot_proto
from tests.scheduler.harness import Harness

NUM_CELLS, NUM_SESSIONS, NUM_TURNS = 16, 40, 5


@dataclass
class Cell:
    """A core with one worker group, and a router's index of its cache."""

    name: str
    load: int = 0
    index: KvIndex = field(default_factory=KvIndex)
    harness: Harness = field(default_factory=Harness)
    number: int = 0
    waiting: list[stats_pb2.KvEventBatch] = field(default_factory=list)
    num_snapshots: int = 0

    def __post_init__(self) -> None:
        self.harness.add_group("g", num_blocks=96)
        self.waiting.append(self.snapshot())

    def snapshot(self) -> stats_pb2.KvEventBatch:
        self.num_snapshots += 1
        self.num_read = len(self.harness.effects)
        return kv_snapshot_proto(self.number, self.harness.core.groups)

    def run(self, request_id: str, prompt: list[int]) -> None:
        self.harness.submit(request_id, prompt, 4)
        self.harness.run()
        for effect in self.harness.effects[self.num_read :]:
            if isinstance(effect, KvChanged):
                for change in effect.changes:
                    self.number += 1
                    event = kv_event_proto(self.number, effect.group_id, change)
                    self.waiting.append(stats_pb2.KvEventBatch(events=[event]))
        self.num_read = len(self.harness.effects)

    def deliver(self) -> None:
        for batch in self.waiting:
            if not self.index.apply(batch):
                self.waiting = [self.snapshot()]
                return
        self.waiting.clear()


Deliver = Callable[[Cell, random.Random], None]


def in_time(cell: Cell, _: random.Random) -> None:
    cell.deliver()


def late(cell: Cell, dice: random.Random) -> None:
    if dice.random() < 0.2:
        cell.deliver()


def lost(cell: Cell, dice: random.Random) -> None:
    cell.waiting = [batch for batch in cell.waiting if batch.is_snapshot or dice.random() > 0.1]
    cell.deliver()


def repeated(cell: Cell, dice: random.Random) -> None:
    cell.waiting += [batch for batch in cell.waiting if not batch.is_snapshot and dice.random() < 0.5]
    cell.deliver()


def out_of_order(cell: Cell, dice: random.Random) -> None:
    if dice.random() < 0.1:
        dice.shuffle(cell.waiting)
    cell.deliver()


def never(_: Cell, __: random.Random) -> None:
    pass


def num_hits(deliver: Deliver) -> tuple[int, list[Cell]]:
    """Run a trace of sessions with four common prefixes; return the number of prompt tokens that were found in the
    caches of the chosen cells, and the cells.
    """
    dice, faults = random.Random(11), random.Random(12)
    cells = [Cell(f"cell {number}") for number in range(NUM_CELLS)]
    sessions = [[100 * (number % 4) + place for place in range(20)] for number in range(NUM_SESSIONS)]
    order = [number for number in range(NUM_SESSIONS) for _ in range(NUM_TURNS)]
    dice.shuffle(order)
    for turn, number in enumerate(order):
        sessions[number] += [dice.randrange(900) for _ in range(12)]
        for cell in cells:
            cell.load = dice.randrange(2)
            deliver(cell, faults)
        choose_cell(cells, sessions[number], "").run(f"r{turn}", sessions[number])
    for cell in cells:
        cell.harness.check_is_empty()
        assert set(cell.harness.tokens) == {(request_id, 0) for request_id in cell.harness.accepted}
    return sum(cell.harness.core.totals.prefix_cache_hits for cell in cells), cells


def oracle(cell: Cell, _: random.Random) -> None:
    """Make a cell's index match its cache."""
    cell.index = KvIndex()
    cell.index.apply(kv_snapshot_proto(0, cell.harness.core.groups))


def test_events_give_the_hits_of_an_oracle_and_faults_only_cost_some() -> None:
    best, _ = num_hits(oracle)
    fallback, _ = num_hits(never)
    assert num_hits(in_time)[0] >= 0.95 * best
    assert best > 1.2 * fallback
    hits, cells = num_hits(repeated)
    assert hits >= 0.95 * best
    assert sum(cell.num_snapshots for cell in cells) == NUM_CELLS
    for faulty in (late, lost, out_of_order):
        hits, cells = num_hits(faulty)
        assert hits > fallback
        assert faulty is late or sum(cell.num_snapshots for cell in cells) > NUM_CELLS


def stored(number: int, hashes: list[int], group: str = "g", tokens_per_block: int = 2) -> stats_pb2.KvEvent:
    blocks = stats_pb2.KvBlocksStored(block_hashes=hashes, tokens_per_block=tokens_per_block)
    return stats_pb2.KvEvent(sequence_number=number, group_id=group, stored=blocks)


def chain(tokens: list[int], salt: str = "") -> list[int]:
    first = chain_hash(chain_seed((salt, "", "", "")), array("I", tokens[:2]))
    return [first, chain_hash(first, array("I", tokens[2:4]))]


def test_the_index_follows_the_numbers_of_events() -> None:
    index, prompt = KvIndex(), PromptBlocks([1, 2, 3, 4, 5], "")
    first, second = chain([1, 2, 3, 4])
    clear = stats_pb2.KvEvent(sequence_number=7, cleared=stats_pb2.KvCacheCleared())
    assert index.apply(stats_pb2.KvEventBatch(is_snapshot=True, events=[clear, stored(7, [first])]))
    assert index.num_cached(prompt) == 2
    assert index.apply(stats_pb2.KvEventBatch(events=[stored(8, [second])]))
    assert index.num_cached(prompt) == 4
    removed = stats_pb2.KvEvent(sequence_number=8, group_id="g")
    removed.removed.block_hashes.append(first)
    assert index.apply(stats_pb2.KvEventBatch(events=[removed]))  # duplicate, so it is ignored
    assert index.num_cached(prompt) == 4
    removed.sequence_number = 10
    assert not index.apply(stats_pb2.KvEventBatch(events=[removed]))  # event 9 was lost
    removed.sequence_number = 9
    assert index.apply(stats_pb2.KvEventBatch(events=[removed]))
    assert index.num_cached(prompt) == 0


def test_blocks_below_the_pool_count_until_they_are_removed() -> None:
    index, prompt = KvIndex(), PromptBlocks([1, 2, 3, 4, 5], "")
    first, second = chain([1, 2, 3, 4])
    below = stats_pb2.KvEvent(sequence_number=1, group_id="g")
    below.updated.block_hashes.append(second)
    below.updated.cache_level = 1
    index.apply(stats_pb2.KvEventBatch(is_snapshot=True, events=[stored(1, [first]), below]))
    assert index.num_cached(prompt) == 4
    below.sequence_number, below.updated.block_hashes[:] = 2, [first]
    raised = stats_pb2.KvEvent(sequence_number=3, group_id="g")
    raised.updated.block_hashes.append(99)
    raised.updated.priority = 90
    removed = stats_pb2.KvEvent(sequence_number=4, group_id="g")
    removed.removed.block_hashes.append(second)
    for event, num_cached in ((below, 4), (raised, 4), (removed, 2)):
        assert index.apply(stats_pb2.KvEventBatch(events=[event]))
        assert index.num_cached(prompt) == num_cached


@pytest.mark.parametrize(("tokens", "salt", "num_cached"), [([1, 2, 3, 4], "", 2), ([1, 2, 3, 4, 9], "salt", 0)])
def test_the_last_token_is_computed_and_salts_share_nothing(tokens: list[int], salt: str, num_cached: int) -> None:
    index = KvIndex()
    index.apply(stats_pb2.KvEventBatch(is_snapshot=True, events=[stored(1, chain([1, 2, 3, 4]))]))
    assert index.num_cached(PromptBlocks(tokens, salt)) == num_cached


def test_blocks_of_two_groups_are_no_prefix_together() -> None:
    index, (first, second) = KvIndex(), chain([1, 2, 3, 4])
    events = [stored(1, [first], "g"), stored(1, [second], "h")]
    index.apply(stats_pb2.KvEventBatch(is_snapshot=True, events=events))
    assert index.num_cached(PromptBlocks([1, 2, 3, 4, 5], "")) == 2


def test_groups_may_have_blocks_of_different_sizes() -> None:
    index, tokens = KvIndex(), [1, 2, 3, 4, 5]
    first, _ = chain(tokens[:4])
    (large,) = PromptBlocks(tokens, "").hashes(4)
    index.apply(stats_pb2.KvEventBatch(is_snapshot=True, events=[stored(1, [large], "h", 4), stored(1, [first], "g")]))
    assert index.num_cached(PromptBlocks(tokens, "")) == 4
    assert index.num_cached(PromptBlocks([1, 2, 9, 9, 9], "")) == 2
