"""The loads, model information, statistics and KV events of a scheduler, read over real sockets."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos import loads_pb2, stats_pb2
from tests.scheduler.running_scheduler import WAIT_S, run_scheduler
from tests.scheduler.test_service import Feed


async def test_information_about_the_cell() -> None:
    async with run_scheduler(name="cell one") as scheduler:
        await scheduler.worker(group_id="one", num_blocks=100)
        await scheduler.submit("a", [1] * 20, 1000)
        feed = await Feed.open(scheduler.stub, "d1")
        feed.reader.attach(1, "a")
        await feed.read()
        info = await scheduler.stub.GetServerInfo(loads_pb2.GetServerInfoRequest())
        assert [(group.group_id, group.num_blocks) for group in info.worker_groups] == [("one", 100)]
        assert [(item.detokenizer_id, item.num_attached) for item in info.detokenizers] == [("d1", 1)]
        assert (info.capacity_policy, info.batching_type, info.journal) == (
            "guaranteed_no_evict",
            "inflight_fused",
            "off",
        )
        loads = (await scheduler.stub.GetLoads(loads_pb2.GetLoadsRequest())).cells
        assert [(load.cell, load.num_running_requests, load.num_blocks) for load in loads] == [("cell one", 1, 100)]
        model = await scheduler.stub.GetModelInfo(loads_pb2.GetModelInfoRequest(model="fake"))
        assert (model.vocab_size, list(model.end_ids), model.fingerprint) == (1000, [999], "print")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.stub.GetModelInfo(loads_pb2.GetModelInfoRequest(model="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_statistics_and_kv_events_can_be_followed() -> None:
    async with run_scheduler() as scheduler:
        iterations = scheduler.stub.GetIterationStats(stats_pb2.GetIterationStatsRequest(stream=True))
        events = scheduler.stub.SubscribeKvEvents(stats_pb2.SubscribeKvEventsRequest(start_sequence_number=1))
        await iterations.wait_for_connection()
        await scheduler.worker()
        await scheduler.submit("a", list(range(40)), 2)
        first = await asyncio.wait_for(iterations.read(), WAIT_S)
        assert first.inflight_batching_stats.num_ctx_tokens == 40
        assert first.inflight_batching_stats.num_context_requests == 1
        assert first.kv_cache_stats.used_num_blocks == 3
        second = await asyncio.wait_for(iterations.read(), WAIT_S)
        assert second.iter == first.iter + 1
        assert second.inflight_batching_stats.num_gen_requests == 1
        kinds: list[tuple[int, str | None]] = []
        while len(kinds) < 3:
            batch = await asyncio.wait_for(events.read(), WAIT_S)
            kinds += [(event.sequence_number, event.WhichOneof("event")) for event in batch.events]
        first_number = kinds[0][0]  # reports that earlier events may be missing
        assert kinds == [(first_number, "cleared"), (first_number + 1, "cleared"), (first_number + 2, "stored")]
        late = scheduler.stub.SubscribeKvEvents(stats_pb2.SubscribeKvEventsRequest(include_snapshot=True))
        snapshot = await asyncio.wait_for(late.read(), WAIT_S)
        assert snapshot.is_snapshot
        assert {event.sequence_number for event in snapshot.events} == {scheduler.service.engine.kv_events.last_number}
        assert [event.WhichOneof("event") for event in snapshot.events] == ["cleared", "stored"]
        assert set(batch.events[-1].stored.block_hashes) <= set(snapshot.events[1].stored.block_hashes)
        late.cancel()
        iterations.cancel()
        events.cancel()


async def test_a_reader_of_an_earlier_schedulers_kv_events_is_told_that_it_missed_some() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", list(range(40)), 2)
        before = scheduler.service.engine.kv_events.last_number
    async with run_scheduler() as scheduler:
        again = scheduler.stub.SubscribeKvEvents(stats_pb2.SubscribeKvEventsRequest(start_sequence_number=before + 1))
        await scheduler.worker()
        batch = await asyncio.wait_for(again.read(), WAIT_S)
        assert batch.events[0].WhichOneof("event") == "cleared"
        assert not batch.events[0].group_id
        assert batch.events[0].sequence_number > before
        again.cancel()
