"""The gRPC and ZeroMQ ports of the scheduler on real sockets, with the fake worker and a detokenizer driven by the
test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import zmq

from midstream.config import SchedulerConfig
from midstream.errors import ConfigError, ExecutionError
from protos import generation_pb2, loads_pb2, scheduler_pb2, worker_pb2
from scheduler.core.events import StepDone
from scheduler.core.request import Request
from scheduler.service import SchedulerService, core_config
from tests.scheduler.running_scheduler import MODEL, WAIT_S, FeedReader, run_scheduler, until


class Feed:
    """Stores everything that a detokenizer receives over a token feed, by stream."""

    def __init__(self, reader: FeedReader) -> None:
        self.reader = reader
        self.tokens: dict[int, list[int]] = {}
        self.opened: dict[int, scheduler_pb2.FeedOpened] = {}
        self.ends: dict[int, scheduler_pb2.FeedSequenceEnd] = {}
        self.ended: dict[int, scheduler_pb2.FeedEnded] = {}

    @classmethod
    async def open(cls, stub: Any, name: str = "detokenizer", channel: grpc.aio.Channel | None = None) -> Feed:
        return cls(await FeedReader.open(stub, name, channel))

    async def read(self) -> None:
        batch = await self.reader.read()
        for opened in batch.opened:
            self.opened[opened.stream] = opened
            if opened.HasField("error"):
                continue
            self.tokens[opened.stream] = []
        start = 0
        counts = list(batch.num_tokens) or [1] * len(batch.streams)
        for stream, offset, count in zip(batch.streams, batch.token_offsets, counts, strict=True):
            assert offset == len(self.tokens[stream])
            self.tokens[stream] += batch.token_ids[start : start + count]
            start += count
        assert start == len(batch.token_ids)
        self.ends.update({end.stream: end for end in batch.sequence_ends})
        self.ended.update({ended.stream: ended for ended in batch.ended})

    async def read_until(self, *streams: int) -> None:
        while not set(streams) <= set(self.ended):
            await self.read()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("pipeline_depth", {"pipeline_depth": 0}),
        ("max_num_tokens", {"max_num_tokens": 0}),
        ("tokens_per_block", {"tokens_per_block": -1}),
        ("max_context_chunk", {"max_context_chunk": 8, "enable_chunked_context": False}),
    ],
)
def test_settings_under_which_nothing_could_run_are_errors(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerService(SchedulerConfig(**settings), MODEL)
    assert caught.value.field == field


def test_every_setting_of_the_core_can_be_changed() -> None:
    changed: dict[str, Any] = {"lost_kind": "wait"}
    for item in dataclasses.fields(SchedulerConfig):
        if isinstance(item.default, int | float):
            changed[item.name] = not item.default if isinstance(item.default, bool) else item.default + 1
    usual, other = (core_config(SchedulerConfig(**values), MODEL, 1) for values in ({}, changed))
    of_the_model = {"scheduler_epoch", "vocab_size", "max_sequence_length", "model_fingerprint"}
    same = {item.name for item in dataclasses.fields(usual) if getattr(usual, item.name) == getattr(other, item.name)}
    assert same == of_the_model


async def test_from_submit_to_the_last_token() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker()
        answer = await scheduler.submit("a", [5, 6, 7], 4, output=generation_pb2.OutputConfig(return_perf_metrics=True))
        assert not answer.attached
        assert answer.num_sequences == 1
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        await feed.read_until(1)
        assert feed.tokens[1] == [8, 9, 10, 11]
        assert feed.opened[1].num_prompt_tokens == 3
        assert feed.opened[1].streaming
        assert feed.ends[1].finish_reason == generation_pb2.FINISH_REASON_LENGTH
        usage = feed.ended[1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 0)
        assert feed.ended[1].perf_metrics.first_token_unix_ns > 0
        await scheduler.submit("b", [5, 6, 7], 4)
        feed.reader.attach(2, "b")
        await feed.read_until(2)
        assert not feed.ended[2].HasField("perf_metrics")


async def test_late_readers_get_all_output_and_unknown_requests_an_error() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1], 6)
        first = await Feed.open(scheduler.stub, "one")
        first.reader.attach(1, "a")
        await first.read_until(1)
        second = await Feed.open(scheduler.stub, "two")
        second.reader.attach(7, "a")
        second.reader.attach(8, "nobody")
        await second.read_until(7)
        assert second.tokens[7] == first.tokens[1] == [2, 3, 4, 5, 6, 7]
        while 8 not in second.opened:
            await second.read()
        assert second.opened[8].error.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_forgotten_requests_are_freed_without_the_collector() -> None:
    def num_requests() -> int:
        # isinstance() would call into other modules' proxies
        return sum(type(item) is Request for item in gc.get_objects())

    async with run_scheduler(max_num_finished=1) as scheduler:
        await scheduler.worker()
        feed = await Feed.open(scheduler.stub)
        gc.collect()
        gc.disable()
        try:
            before = num_requests()
            for stream in range(5):
                await scheduler.submit(str(stream), [5, 6, 7], 4)
                feed.reader.attach(stream, str(stream))
                await feed.read_until(stream)
            assert num_requests() == before + 1
        finally:
            gc.enable()


async def test_a_request_whose_reader_was_lost_is_not_taken_for_unread() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.submit("a", [5, 6, 7], 4)
        hub = scheduler.service.engine.hub
        abort = loads_pb2.AbortRequest(request_id="a", only_if_unread=True)
        lost, leaving = [await Feed.open(scheduler.stub) for _ in range(2)]
        lost.reader.attach(1, "a")
        await until(lambda: any(feed.num_attached for feed in hub.feeds))
        lost.reader.close()
        await until(lambda: len(hub.feeds) == 1)
        assert not (await scheduler.stub.Abort(abort)).was_running
        # Nor does a lost feed keep the request alive when another, older feed ends.
        another = await Feed.open(scheduler.stub)
        leaving.reader.attach(1, "a")
        another.reader.attach(1, "a")
        await until(lambda: len(hub.feeds) == 2 and all(feed.num_attached for feed in hub.feeds))
        another.reader.close()
        await until(lambda: len(hub.feeds) == 1)
        leaving.reader.send(detach=scheduler_pb2.FeedDetach(stream=1))
        await until(lambda: hub.feeds[0].num_attached == 0)
        assert (await scheduler.stub.Abort(abort)).was_running


async def test_an_abort_does_not_end_a_request_that_another_client_has_submitted_again() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.submit("a", [5, 6, 7], 4)
        await scheduler.submit("a", [5, 6, 7], 4)
        abort = loads_pb2.AbortRequest(request_id="a", only_if_unread=True)
        assert not (await scheduler.stub.Abort(abort)).was_running
        assert (await scheduler.stub.Abort(abort)).was_running


async def test_an_abort_leaves_time_for_a_submission_that_has_not_been_read_yet() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.submit("a", [5, 6, 7], 4)
        abort = asyncio.ensure_future(scheduler.stub.Abort(loads_pb2.AbortRequest(request_id="a", only_if_unread=True)))
        await scheduler.submit("a", [5, 6, 7], 4)
        assert not (await abort).was_running


async def test_an_abort_does_not_end_a_request_submitted_again_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free, fdatasync = threading.Event(), os.fdatasync

    def wait_and_sync(file: int) -> None:
        is_free.wait(WAIT_S)
        fdatasync(file)

    abort = loads_pb2.AbortRequest(request_id="a", only_if_unread=True)
    async with run_scheduler(journal="log", journal_path=str(tmp_path / "journal")) as scheduler:
        monkeypatch.setattr(os, "fdatasync", wait_and_sync)
        submitted = [asyncio.ensure_future(scheduler.submit("a", [5, 6, 7], 4)) for _ in range(2)]
        await until(lambda: "a" in scheduler.service.engine.core.lifecycle.requests)
        assert not (await scheduler.stub.Abort(abort)).was_running
        is_free.set()
        assert sorted([(await item).attached for item in submitted]) == [False, True]


async def test_a_deadline_beyond_64_bits_does_not_stop_the_journal(tmp_path: Path) -> None:
    async with run_scheduler(journal="log", journal_path=str(tmp_path / "journal")) as scheduler:
        await scheduler.submit("a", [5, 6, 7], 4, timeout_ms=1 << 60)
        await scheduler.submit("b", [5, 6, 7], 4)


async def test_resubmitting_attaches_but_other_contents_are_rejected() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.submit("a", [1, 2], 6, timeout_ms=60_000, arrival_time_unix_ns=5)
        again = await scheduler.submit("a", [1, 2], 6, timeout_ms=50_000, arrival_time_unix_ns=6)
        assert again.attached
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.submit("a", [1, 3], 6)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_errors_name_their_field_and_overload_a_retry_hint() -> None:
    async with run_scheduler(max_queue_size=1) as scheduler:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.submit("a", [1, 5000])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ("midstream-field", "token_ids") in list(caught.value.trailing_metadata() or ())
        await scheduler.submit("b", [1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.submit("c", [1])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("retry-after-ms", "100") in list(caught.value.trailing_metadata() or ())


async def test_a_stop_word_frees_the_blocks_and_later_tokens_do_not_count() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(step_ms=2)
        await scheduler.submit("a", [1], 1000)
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        while len(feed.tokens.get(1, [])) < 5:
            await feed.read()
        stop = scheduler_pb2.FeedStop(stream=1, num_tokens=3, stop_word="so")
        feed.reader.send(stop=stop)
        await feed.read_until(1)
        assert feed.ends[1].finish_reason == generation_pb2.FINISH_REASON_STOP
        assert feed.ends[1].num_tokens == 3
        assert feed.ended[1].usage.completion_tokens == 3
        assert (await scheduler.stats()).kv_cache_stats.used_num_blocks == 0


async def test_abort_and_deadline_end_the_feed() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(step_ms=2)
        await scheduler.submit("a", [1], 1000)
        await scheduler.submit("b", [1], 1000, timeout_ms=60)
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        feed.reader.attach(2, "b")
        await feed.read()
        assert (await scheduler.stub.Abort(loads_pb2.AbortRequest(request_id="a"))).was_running
        assert not (await scheduler.stub.Abort(loads_pb2.AbortRequest(request_id="a"))).was_running
        await feed.read_until(1, 2)
        assert feed.ends[1].finish_reason == generation_pb2.FINISH_REASON_ABORT
        assert feed.ends[2].finish_reason == generation_pb2.FINISH_REASON_DEADLINE


@pytest.mark.parametrize("how", ["kill", "freeze", "stop"])
async def test_a_worker_lost_in_the_middle_costs_no_token(how: str) -> None:
    # A frozen worker is detected only by its silence, whereas the connection of a dead worker is closed.
    timeout_ms = 400 if how == "freeze" else 600_000
    num_tokens = 250
    async with run_scheduler(worker_timeout_ms=timeout_ms, heartbeat_interval_ms=50) as scheduler:
        first = await scheduler.worker(group_id="one", step_ms=5)
        feed = await Feed.open(scheduler.stub)
        for stream in range(4):
            await scheduler.submit(f"r{stream}", [10 * stream, 3], num_tokens)
            feed.reader.attach(stream, f"r{stream}")
        await scheduler.worker(group_id="two")
        while len(feed.tokens.get(3, [])) < 10:
            await feed.read()
        getattr(first, how)()
        await feed.read_until(0, 1, 2, 3)
        assert all(feed.tokens[stream] == list(range(4, 4 + num_tokens)) for stream in range(4))
        if how == "freeze":
            first.thaw()
            await until(lambda: first.num_registrations >= 2)
            assert scheduler.service.engine.core.totals.num_stale_messages > 0
        stats = await scheduler.stats()
        assert stats.kv_cache_stats.used_num_blocks == 0
        assert stats.num_conservation_violations == 0


async def test_repeated_results_are_processed_once() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(repeat_results=True)
        await scheduler.submit("a", [1], 30)
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        await feed.read_until(1)
        assert feed.tokens[1] == list(range(2, 32))


async def test_an_incompatible_worker_is_told_why() -> None:
    async with run_scheduler() as scheduler:
        worker = await scheduler.worker(tokens_per_block=8)
        assert worker.rejected is not None
        assert worker.rejected.field == "tokens_per_block"
        assert "is 8; this scheduler requires a multiple of 16" in worker.rejected.reason


async def test_garbage_on_the_worker_port_is_dropped_and_counted() -> None:
    async with run_scheduler() as scheduler:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{scheduler.service.worker_port}")
            socket.send(b"\x80\x04\x95garbage")
            socket.send(b"")
            socket.send_multipart([b"", b"two frames"])
            stale = worker_pb2.StepResult(epoch=3, step_id=1, token_ids=[1])
            socket.send(worker_pb2.WorkerMessage(step_result=stale).SerializeToString())
            await until(lambda: scheduler.service.engine.core.totals.num_stale_messages == 1)
            assert scheduler.service.dispatcher.num_malformed == 3
        await scheduler.worker()
        await scheduler.submit("a", [1], 3)
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        await feed.read_until(1)


async def test_a_huge_frame_does_not_reach_the_scheduler() -> None:
    async with run_scheduler() as scheduler:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{scheduler.service.worker_port}")
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            socket.send(bytes((64 << 20) + 1), copy=False)
            assert await asyncio.to_thread(monitor.poll, WAIT_S * 1000)
            socket.disable_monitor()
            monitor.close()
        assert scheduler.service.dispatcher.num_malformed == 0


async def test_a_drain_lets_requests_finish() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(step_ms=2)
        await scheduler.submit("a", [1], 30)
        feed = await Feed.open(scheduler.stub)
        feed.reader.attach(1, "a")
        await feed.read()
        draining = asyncio.create_task(scheduler.service.drain())
        await feed.read_until(1)
        await asyncio.wait_for(draining, WAIT_S)
        assert len(feed.tokens[1]) == 30


async def test_a_feed_begins_with_hello() -> None:
    async with run_scheduler() as scheduler:
        reader = await FeedReader.connect(scheduler.stub)
        reader.attach(1, "a")
        await asyncio.wait_for(reader.lost.wait(), WAIT_S)


async def test_a_slow_reader_costs_a_cursor_and_delays_no_other() -> None:
    async with run_scheduler() as scheduler:
        await scheduler.worker(checks=False)
        slow = await Feed.open(scheduler.stub, "slow")
        fast = await Feed.open(scheduler.stub, "fast")
        for stream in range(8):
            await scheduler.submit(f"r{stream}", [stream], 900)
            slow.reader.attach(stream, f"r{stream}")
            fast.reader.attach(stream, f"r{stream}")
        await fast.read_until(*range(8))
        await slow.read_until(*range(8))
        assert slow.tokens == fast.tokens
        assert [len(tokens) for tokens in slow.tokens.values()] == [900] * 8


async def test_an_error_in_a_workers_message_ends_only_its_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_scheduler() as scheduler:
        good, bad = await scheduler.worker(group_id="good"), await scheduler.worker(group_id="bad")
        core = scheduler.service.engine.core
        handle = core.handle

        def fail_at_bad(event: Any) -> Any:
            groups = {group.connection: group.group_id for group in core.groups}
            if isinstance(event, StepDone) and groups.get(event.connection) == "bad":
                raise KeyError("a defect")
            return handle(event)

        monkeypatch.setattr(core, "handle", fail_at_bad)
        feed = await Feed.open(scheduler.stub)
        for stream in range(6):
            await scheduler.submit(f"r{stream}", [10 * stream, 3], 20)
            feed.reader.attach(stream, f"r{stream}")
        await feed.read_until(*range(6))
        assert all(feed.tokens[stream] == list(range(4, 24)) for stream in range(6))
        assert scheduler.service.engine.num_failed_events > 0
        assert good.num_registrations == 1
        assert bad.num_registrations > 1
        assert scheduler.service.progress.problems() == []


@pytest.mark.parametrize("what", ["planning", "the loop of worker messages"])
async def test_a_scheduler_that_cannot_continue_exits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SchedulerConfig(port=0, worker_port=0, journal="off")
    service = SchedulerService(config, MODEL)
    running = asyncio.create_task(service.run())
    await until(lambda: service.progress.problems() == [] and hasattr(service, "engine"))

    def fail(_: Any) -> Any:
        raise KeyError("a defect")

    if what == "planning":
        monkeypatch.setattr(service.engine.core, "handle", fail)
        service.engine._turn_soon()
    else:
        monkeypatch.setattr(service.dispatcher, "_decode", fail)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{service.worker_port}")
            socket.send(b"anything")
            await asyncio.wait((running,), timeout=WAIT_S)
    with pytest.raises(ExecutionError, match=what):
        await asyncio.wait_for(running, WAIT_S)
