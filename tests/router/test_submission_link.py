"""Submissions over frames, from a router's cell to a scheduler, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from midstream.errors import DeadlineError, InvalidArgumentError, MidstreamError, OverloadedError, UnavailableError
from midstream.rpc.connection import Connection
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.frames import FrameServer
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import frames_pb2, scheduler_pb2, scheduler_pb2_grpc
from protos import generation_pb2 as pb
from router.pipeline.cells import Cell
from scheduler.edge.submissions import Submissions

MAX_BYTES = 4 << 20
WAIT_S = 240
Answer = Callable[[pb.GenerateRequest], Awaitable[scheduler_pb2.SubmitResponse]]


async def accept(request: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
    return scheduler_pb2.SubmitResponse(num_sequences=len(request.request_id))


class OneScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """A scheduler that answers submissions over frames and calls of Submit with `answer`."""

    def __init__(self) -> None:
        self.answer: Answer = accept
        self.frames = FrameServer("127.0.0.1", 0, max_message_bytes=MAX_BYTES)
        self.connections: list[Connection] = []
        self.num_calls = 0

    async def OpenSubmissions(  # noqa: N802
        self, request: frames_pb2.OpenFramesRequest, context: Any
    ) -> frames_pb2.FramesOffer:
        def open_(connection: Connection) -> Submissions:
            self.connections.append(connection)
            return Submissions(_Scripted(self), connection)

        return self.frames.offer(open_)

    async def Submit(  # noqa: N802
        self, request: scheduler_pb2.SubmitRequest, context: Any
    ) -> scheduler_pb2.SubmitResponse:
        self.num_calls += 1
        return await self.answer(request.request)


class _Scripted:
    """A service whose answers are those of the scheduler's `answer`."""

    def __init__(self, scheduler: OneScheduler) -> None:
        self._scheduler = scheduler

    def submit_now(self, request: pb.GenerateRequest, on_committed: Callable[[Any], None]) -> bool:
        return False

    async def submit(self, request: pb.GenerateRequest, on_committed: Callable[[Any], None]) -> None:
        on_committed(await self._scheduler.answer(request))

    def answer(self, accepted: Any) -> scheduler_pb2.SubmitResponse:
        return scheduler_pb2.SubmitResponse.FromString(accepted.SerializeToString())


@pytest.fixture
async def scheduler() -> AsyncIterator[OneScheduler]:
    servicer = OneScheduler()  # type: ignore[abstract]  # the other calls stay unimplemented
    frames = servicer.frames
    server = Server("midstream.v1.Scheduler", "127.0.0.1", 0, Progress(), max_message_bytes=MAX_BYTES)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server.grpc)
    await frames.start()
    await server.start()
    servicer.address = f"127.0.0.1:{server.port}"  # type: ignore[attr-defined]
    yield servicer
    await frames.close()
    await server.stop()


@pytest.fixture
async def cell(scheduler: OneScheduler) -> AsyncIterator[Cell]:
    address = scheduler.address  # type: ignore[attr-defined]
    cell = Cell("cell", address, LinkSettings(MAX_BYTES))
    async with asyncio.timeout(WAIT_S):
        is_open = False
        while not is_open:
            before = scheduler.num_calls
            await submit(cell, "warm-up")
            is_open = scheduler.num_calls == before
    scheduler.num_calls = 0
    yield cell
    await cell.close()


async def submit(cell: Cell, request_id: str, wait_s: float = WAIT_S, **fields: Any) -> scheduler_pb2.SubmitResponse:
    give_up_at = asyncio.get_running_loop().time() + wait_s
    return await cell.submit(pb.GenerateRequest(request_id=request_id, **fields), give_up_at, None)


async def test_each_submission_gets_its_own_answer(scheduler: OneScheduler, cell: Cell) -> None:
    names = ["r" * number for number in range(1, 65)]
    answers = await asyncio.gather(*(submit(cell, name) for name in names))
    assert [answer.num_sequences for answer in answers] == [*range(1, 65)]
    assert not scheduler.num_calls


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("must not be negative", field="max_tokens"),
        OverloadedError("the queue is full", retry_after_ms=1234),
    ],
)
async def test_a_rejection_keeps_its_field_and_retry_hint(
    scheduler: OneScheduler, cell: Cell, error: MidstreamError
) -> None:
    async def refuse(_: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
        raise error

    scheduler.answer = refuse
    with pytest.raises(type(error)) as raised:
        await submit(cell, "a")
    assert (raised.value.message, raised.value.field) == (error.message, error.field)
    assert getattr(raised.value, "retry_after_ms", 0) == getattr(error, "retry_after_ms", 0)


async def test_an_unexpected_error_is_reported_without_its_details(
    scheduler: OneScheduler, cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
        raise ValueError("secret")

    scheduler.answer = fail
    with pytest.raises(MidstreamError, match="internal error") as raised:
        await submit(cell, "a")
    assert "secret" not in str(raised.value)
    assert "secret" in caplog.text
    scheduler.answer = accept
    assert (await submit(cell, "abc")).num_sequences == 3


async def test_submissions_are_repeated_when_the_connection_breaks(scheduler: OneScheduler, cell: Cell) -> None:
    received = asyncio.Queue[str]()
    is_open = asyncio.Event()

    async def wait(request: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
        received.put_nowait(request.request_id)
        await is_open.wait()
        return await accept(request)

    scheduler.answer = wait
    submitting = [asyncio.create_task(submit(cell, name)) for name in ("a", "bb")]
    first = [await received.get() for _ in submitting]
    is_open.set()
    scheduler.connections[0].fail(ConnectionAbortedError("cut"))
    assert [answer.num_sequences for answer in await asyncio.gather(*submitting)] == [1, 2]
    assert sorted(first) == sorted([received.get_nowait() for _ in submitting]) == ["a", "bb"]


async def test_a_submission_without_an_answer_is_given_up(scheduler: OneScheduler, cell: Cell) -> None:
    async def wait(_: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
        await asyncio.Event().wait()
        raise AssertionError

    scheduler.answer = wait
    with pytest.raises(UnavailableError, match="did not answer in time"):
        await submit(cell, "a", wait_s=0.1)
    deadline = asyncio.get_running_loop().time() + 0.1
    with pytest.raises(DeadlineError):
        await cell.submit(pb.GenerateRequest(request_id="b"), deadline, deadline)


async def test_a_large_request_is_a_call_of_its_own(scheduler: OneScheduler, cell: Cell) -> None:
    assert (await submit(cell, "abc", prompt="x" * (1 << 20))).num_sequences == 3
    assert scheduler.num_calls == 1


async def test_large_submissions_wait_until_the_connection_has_room(scheduler: OneScheduler, cell: Cell) -> None:
    """Together, they exceed the maximum size of the connection's buffer."""
    prompt = "x" * ((1 << 20) - 100)
    answers = await asyncio.gather(*(submit(cell, "a" * number, prompt=prompt) for number in range(1, 13)))
    assert [answer.num_sequences for answer in answers] == [*range(1, 13)]
    assert not scheduler.num_calls
    assert len(scheduler.connections) == 1


async def test_submissions_that_wait_for_room_are_repeated_when_the_connection_breaks(
    scheduler: OneScheduler, cell: Cell
) -> None:
    prompt = "x" * ((1 << 20) - 100)
    submitting = [asyncio.create_task(submit(cell, "a" * number, prompt=prompt)) for number in range(1, 5)]
    await asyncio.sleep(0)  # now each submission is posted or waits
    scheduler.connections[0].fail(ConnectionAbortedError("cut"))
    assert [answer.num_sequences for answer in await asyncio.gather(*submitting)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"attachment": bytes(MAX_BYTES), "prompt": "x" * 100}, "attachment"),
        ({"token_ids": pb.TokenIds(values=[1 << 30] * MAX_BYTES)}, "token_ids"),
        ({"prompt": "x", "images": [pb.Image(data=bytes(MAX_BYTES // 2))] * 2}, "images"),
        ({"prompt_tuning": pb.PromptTuningConfig(table=pb.Tensor(data=bytes(MAX_BYTES)))}, "prompt_tuning.table"),
    ],
)
async def test_a_request_over_the_limit_of_a_message_is_invalid(
    scheduler: OneScheduler, fields: dict[str, Any], field: str
) -> None:
    cell = Cell("cell", scheduler.address, LinkSettings(MAX_BYTES))  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match=str(MAX_BYTES - 4096)) as raised:
        await submit(cell, "a", **fields)
    assert raised.value.field == field
    await cell.close()


async def test_a_request_over_a_lower_limit_of_the_scheduler_is_invalid(scheduler: OneScheduler) -> None:
    """The gRPC server refuses such a message with RESOURCE_EXHAUSTED, which would otherwise mean that the service is
    overloaded.
    """
    cell = Cell("cell", scheduler.address, LinkSettings(1 << 30))  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match="larger than max") as raised:
        await submit(cell, "a", prompt="x" * (MAX_BYTES + 1))
    assert raised.value.field == "prompt"
    await cell.close()
