"""A scheduler with real sockets in this process, and fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc.aio

from midstream.config import SchedulerConfig
from midstream.model.folder import ModelFolder
from midstream.rpc import frames
from midstream.rpc.channel import open_channel
from midstream.rpc.connection import Connection
from protos import frames_pb2, generation_pb2, scheduler_pb2, stats_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.service import SchedulerService
from tests.fakes.worker import FakeWorker, FakeWorkerConfig

MODEL = ModelFolder(
    path=Path(),
    name="fake",
    architecture="llama",
    vocab_size=1000,
    hidden_size=8,
    num_layers=1,
    max_sequence_length=2048,
    end_ids=(999,),
    pad_id=None,
    bos_id=None,
    chat_template=None,
    fingerprint="print",
    weights_format="gguf",
    weight_files=(),
    config={},
)
WAIT_S = 240


class FeedReader:
    """A detokenizer's end of a token feed.

    Attributes:
        lost: Set when the feed has ended.
    """

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self._batches: asyncio.Queue[scheduler_pb2.FeedBatch | None] = asyncio.Queue()
        self._connection: Connection | None = None

    @classmethod
    async def open(cls, stub: Any, name: str = "d", channel: grpc.aio.Channel | None = None) -> Self:
        """Open the feed of a scheduler, within a call over `channel` if it is given, and say hello."""
        reader = await cls.connect(stub, channel)
        reader.send(hello=scheduler_pb2.FeedHello(detokenizer_id=name))
        return reader

    @classmethod
    async def connect(cls, stub: Any, channel: grpc.aio.Channel | None = None) -> Self:
        reader, offer, max_bytes = cls(), await stub.OpenTokenFeed(frames_pb2.OpenFramesRequest()), 64 << 20
        if channel is None:
            reader._connection = await frames.connect(offer, "127.0.0.1:1", reader, max_message_bytes=max_bytes)
        else:
            reader._connection = await frames.connect_within(channel, offer, reader, max_message_bytes=max_bytes)
        return reader

    def attach(self, stream: int, request_id: str) -> None:
        self.send(attach=scheduler_pb2.FeedAttach(stream=stream, request_id=request_id))

    def send(self, **command: Any) -> None:
        assert self._connection is not None
        self._connection.send(scheduler_pb2.FeedCommand(**command))

    async def read(self) -> scheduler_pb2.FeedBatch:
        """Return the next batch. Raises ConnectionResetError if the feed has ended."""
        batch = await asyncio.wait_for(self._batches.get(), WAIT_S)
        if batch is None:
            raise ConnectionResetError("the feed has ended")
        return batch

    def close(self) -> None:
        """End the feed as a crash would."""
        assert self._connection is not None
        self._connection.fail(ConnectionAbortedError())

    # FrameHandler

    message_class = scheduler_pb2.FeedBatch

    def take(self, batch: scheduler_pb2.FeedBatch) -> None:
        self._batches.put_nowait(batch)

    def resume(self) -> None:
        pass

    def lose(self, error: Exception | None) -> None:
        self.lost.set()
        self._batches.put_nowait(None)


class RunningScheduler:
    """A scheduler, its workers and one token feed."""

    def __init__(self, service: SchedulerService, stub: Any) -> None:
        self.service = service
        self.stub = stub
        self.workers: list[FakeWorker] = []

    async def worker(self, **settings: Any) -> FakeWorker:
        address = f"tcp://127.0.0.1:{self.service.worker_port}"
        chosen: dict[str, Any] = {"scheduler": address, "model_fingerprint": "print", "checks": True} | settings
        worker = FakeWorker(FakeWorkerConfig(**chosen)).start()
        self.workers.append(worker)
        await until(lambda: worker.registered.is_set() or worker.rejected is not None)
        return worker

    async def submit(self, request_id: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Any:
        request = generation_pb2.GenerateRequest(
            request_id=request_id, token_ids=generation_pb2.TokenIds(values=prompt), max_tokens=max_tokens, **fields
        )
        return await self.stub.Submit(scheduler_pb2.SubmitRequest(request=request))

    async def stats(self) -> stats_pb2.IterationStats:
        stats: stats_pb2.IterationStats = await self.stub.GetIterationStats(stats_pb2.GetIterationStatsRequest()).read()
        return stats


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the other side is a thread)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_scheduler(**settings: Any) -> AsyncIterator[RunningScheduler]:
    # The machine that runs the tests may stall for some seconds.
    values: dict[str, Any] = {"port": 0, "worker_port": 0, "journal": "off", "worker_timeout_ms": 60_000} | settings
    config = SchedulerConfig(**values)
    service = SchedulerService(config, MODEL)
    await service.start()
    async with open_channel(f"127.0.0.1:{service.port}") as channel:
        scheduler = RunningScheduler(service, SchedulerStub(channel))
        try:
            yield scheduler
        finally:
            for worker in scheduler.workers:
                await asyncio.to_thread(worker.stop)
            await service.stop()
    assert [worker.error for worker in scheduler.workers if worker.error is not None] == []
