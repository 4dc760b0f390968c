"""The KV events of an executor, as TensorRT-LLM's event manager gives them."""

from __future__ import annotations

import threading
from datetime import timedelta

from midstream.executor.kv_cache import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiffInt,
    KVCacheEventManager,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)
from protos import stats_pb2 as pb


def manager(max_events: int = 100) -> KVCacheEventManager:
    return KVCacheEventManager(max_events, (64, 0), 512, {"seven": 7}.get)


def stored(hashes: list[int], parent: int = 0, lora: str = "", group: str = "g") -> pb.KvEvent:
    tokens = [token for block_hash in hashes for token in (block_hash, block_hash + 1)]
    data = pb.KvBlocksStored(
        parent_hash=parent, block_hashes=hashes, token_ids=tokens, tokens_per_block=2, lora_name=lora
    )
    return pb.KvEvent(group_id=group, stored=data)


def removed(*hashes: int, group: str = "g") -> pb.KvEvent:
    return pb.KvEvent(group_id=group, removed=pb.KvBlocksRemoved(block_hashes=hashes))


def cleared(group: str) -> pb.KvEvent:
    return pb.KvEvent(group_id=group, cleared=pb.KvCacheCleared())


def test_blocks_are_stored_with_their_tokens_and_removed() -> None:
    events = manager()
    events.add([stored([10, 20]), stored([30], parent=20, lora="seven"), removed(20), removed(10, 30)])
    created, first, second, gone = events.get_latest_events(timedelta())
    assert created == KVCacheEvent(0, KVCacheCreatedData((64, 0)), 512)
    blocks = [KVCacheStoredBlockData(start, [UniqueToken(start), UniqueToken(start + 1)]) for start in (10, 20)]
    assert first == KVCacheEvent(1, KVCacheStoredData(None, blocks), 512)
    block = KVCacheStoredBlockData(30, [UniqueToken(30), UniqueToken(31)], lora_id=7)
    assert second == KVCacheEvent(2, KVCacheStoredData(20, [block]), 512)
    # Removals that follow each other are one event.
    assert gone == KVCacheEvent(3, KVCacheRemovedData([20, 10, 30]), 512)
    assert not events.get_latest_events(0.0)
    events.add([removed(40)])
    assert [event.event_id for event in events.get_latest_events()] == [4]


def test_blocks_have_their_priorities() -> None:
    events = manager()
    event = stored([10, 20])
    event.stored.priorities.extend([90, 35])
    events.add([event])
    data = events.get_latest_events()[-1].data
    assert isinstance(data, KVCacheStoredData)
    assert [block.priority for block in data.blocks] == [90, 35]


def test_a_cleared_cache_removes_what_was_stored_in_it() -> None:
    events = manager()
    events.add([stored([10, 20]), stored([50], group="h"), removed(10), cleared("g"), cleared("g")])
    assert events.get_latest_events()[-1].data == KVCacheRemovedData([10, 20])
    # If events were lost, all blocks count as removed.
    events.add([stored([60]), cleared("")])
    assert events.get_latest_events()[-1].data == KVCacheRemovedData([50, 60])


def moved(*hashes: int) -> pb.KvEvent:
    return pb.KvEvent(group_id="g", updated=pb.KvBlocksUpdated(block_hashes=hashes, cache_level=1))


def test_blocks_move_to_host_memory_and_back() -> None:
    events = manager()
    events.add([stored([10, 20, 30]), moved(20), moved(30), removed(30)])
    events.get_latest_events()
    # A block that the pool has again is not stored anew, and the block after it follows it.
    events.add([stored([10, 20, 30]), moved(20), stored([20], parent=10)])
    found = [event.data for event in events.get_latest_events()]
    first, back, second, *again = found
    assert isinstance(first, KVCacheStoredData)
    assert isinstance(second, KVCacheStoredData)
    assert [block.block_hash for block in first.blocks] == [10]
    assert back == KVCacheUpdatedData(20, KVCacheEventDiffInt(1, 0))
    assert (second.parent_hash, [block.block_hash for block in second.blocks]) == (20, [30])
    assert again == [
        KVCacheUpdatedData(20, KVCacheEventDiffInt(0, 1)),
        KVCacheUpdatedData(20, KVCacheEventDiffInt(1, 0)),
    ]


def test_a_priority_changes() -> None:
    events = manager()
    event = stored([10, 20])
    event.stored.priorities.extend([90, 35])
    higher = pb.KvBlocksUpdated(block_hashes=[20], priority=50)
    events.add([event, pb.KvEvent(group_id="g", updated=higher)])
    assert events.get_latest_events()[-1].data == KVCacheUpdatedData(20, None, KVCacheEventDiffInt(35, 50))


def test_blocks_of_an_earlier_scheduler_have_no_tokens() -> None:
    events = manager()
    kept = pb.KvBlocksStored(block_hashes=[10, 20], tokens_per_block=2)
    events.add([pb.KvEvent(group_id="g", stored=kept)])
    data = events.get_latest_events()[-1].data
    assert data == KVCacheStoredData(None, [KVCacheStoredBlockData(10, []), KVCacheStoredBlockData(20, [])])


def test_the_oldest_events_are_dropped_if_there_are_too_many() -> None:
    events = manager(max_events=2)
    events.add([stored([10]), stored([20]), stored([30])])
    assert [event.event_id for event in events.get_latest_events()] == [2, 3]


def test_a_reader_waits_for_an_event_and_for_the_end() -> None:
    events = manager()
    events.get_latest_events()
    assert not events.get_latest_events(0.01)
    found: list[int] = []

    def read() -> None:
        while batch := events.get_latest_events():
            found.extend(event.event_id for event in batch)

    thread = threading.Thread(target=read)
    thread.start()
    events.add([stored([10])])
    events.add([removed(10)])
    events.close()
    thread.join(240)
    assert not thread.is_alive()
    assert found + [event.event_id for event in events.get_latest_events()] == [1, 2]
