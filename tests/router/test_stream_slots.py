"""Request streams may use only a limited part of a router's memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from unittest.mock import Mock

import pytest

from midstream.errors import OverloadedError
from protos import kserve_pb2 as pb
from router.authentication import Caller, current_caller
from router.pipeline.stream_slots import StreamSlots
from router.protocols.kserve import servicer as kserve


class Stream:
    """A client's stream; a task reads requests from it until it is cancelled or the stream is ended."""

    def __init__(self, slots: StreamSlots, client: str) -> None:
        self.queue: asyncio.Queue[pb.ModelInferRequest] = asyncio.Queue()
        self.received: asyncio.Queue[Callable[[object], None]] = asyncio.Queue()
        token = current_caller.set(Caller(client))
        self.task = asyncio.create_task(self._read(slots))
        current_caller.reset(token)

    async def _messages(self) -> AsyncIterator[pb.ModelInferRequest]:
        while True:
            yield await self.queue.get()

    async def _read(self, slots: StreamSlots) -> None:
        async for _, ended in slots.stream(self._messages()).requests():
            self.received.put_nowait(ended)

    async def send(self, num_bytes: int = 0) -> Callable[[object], None]:
        """Send a request; once it has been read, return the function that marks its end."""
        self.queue.put_nowait(pb.ModelInferRequest(id="x" * num_bytes))
        async with asyncio.timeout(240):
            return await self.received.get()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_the_stream_that_was_idle_longest_is_ended_for_one_that_needs_its_memory() -> None:
    slots = StreamSlots(4, 2, min_idle_s=0.0)
    first, second, other = Stream(slots, "a"), Stream(slots, "a"), Stream(slots, "b")
    await asyncio.sleep(0)
    third = Stream(slots, "a")
    with pytest.raises(OverloadedError, match="idle"):
        await asyncio.wait_for(first.task, 240)
    for stream in (second, third, other):
        (await stream.send())(None)
        await stream.close()


async def test_a_stream_whose_request_runs_is_not_ended_and_leaves_the_slots_to_idle_ones() -> None:
    slots = StreamSlots(4, 2, min_idle_s=0.0)
    streams = [Stream(slots, "a") for _ in range(2)]
    ends = [await stream.send() for stream in streams]  # now only one of the two has a slot for another request
    newcomers = [Stream(slots, "a") for _ in range(2)]
    ends += [await stream.send() for stream in newcomers]
    assert not any(stream.task.done() for stream in (*streams, *newcomers))
    for ended in ends:
        ended(None)
    for stream in (*streams, *newcomers):
        await stream.close()


async def test_requests_in_memory_hold_up_the_next_ones_of_their_client_alone() -> None:
    slots = StreamSlots(4, 4, max_bytes_per_client=100_000)
    large, other = Stream(slots, "a"), Stream(slots, "b")
    ended = await large.send(50_000)
    large.queue.put_nowait(pb.ModelInferRequest())
    (await other.send())(None)
    assert large.received.empty()
    ended(None)
    async with asyncio.timeout(240):
        (await large.received.get())(None)
    await large.close()
    await other.close()


async def test_a_stream_that_finds_no_slot_is_refused() -> None:
    slots = StreamSlots(1, 1, min_idle_s=60.0, wait_s=0.0)
    holding = Stream(slots, "a")
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many"):
        await asyncio.wait_for(Stream(slots, "a").task, 240)
    await holding.close()


async def test_idle_streams_do_not_keep_streams_whose_requests_run_from_reading_more() -> None:
    slots = StreamSlots(4, 2)
    busy = Stream(slots, "a")
    ends = [await busy.send()]
    idle = [Stream(slots, client) for client in "aabb"]
    await asyncio.sleep(0)
    ends += [await busy.send(), await busy.send()]
    assert not any(stream.task.done() for stream in idle)
    for ended in ends:
        ended(None)
    for stream in (busy, *idle):
        await stream.close()


async def test_streams_that_became_idle_are_ended_for_those_whose_requests_run() -> None:
    slots = StreamSlots(2, 2, min_idle_s=0.0)
    first, second = Stream(slots, "a"), Stream(slots, "a")
    (await first.send())(None)
    ended = await second.send()
    third = Stream(slots, "a")
    await asyncio.sleep(0)
    ended(None)  # now three streams are idle
    fourth = Stream(slots, "a")
    with pytest.raises(OverloadedError, match="idle"):
        await asyncio.wait_for(first.task, 240)
    for stream in (second, third, fourth):
        await stream.close()


async def test_streams_that_waited_too_long_are_not_all_refused_at_once() -> None:
    slots = StreamSlots(1, 1, min_idle_s=60.0, wait_s=0.0)
    holding, waiting = Stream(slots, "a"), [Stream(slots, "a") for _ in range(20)]
    await asyncio.wait_for(asyncio.wait([stream.task for stream in waiting], return_when="FIRST_COMPLETED"), 240)
    await asyncio.sleep(0)
    assert sum(stream.task.done() for stream in waiting) <= 8
    for stream in waiting:
        with pytest.raises(OverloadedError, match="too many"):
            await asyncio.wait_for(stream.task, 240)
    await holding.close()


async def test_a_cancelled_waiting_stream_releases_its_slot() -> None:
    slots = StreamSlots(1, 1, min_idle_s=60.0)
    holding, waiting, last = (Stream(slots, "a") for _ in range(3))
    await asyncio.sleep(0)
    await waiting.close()
    await holding.close()
    (await last.send())(None)
    await last.close()


class Silent(AsyncIterator[pb.ModelInferRequest]):
    """A client that sends nothing."""

    async def __anext__(self) -> pb.ModelInferRequest:
        await asyncio.Event().wait()
        raise StopAsyncIteration


@pytest.mark.parametrize(("min_idle_s", "refusal"), [(60.0, "too many"), (0.0, "idle")])
async def test_a_refused_call_is_freed_without_a_garbage_collection(
    monkeypatch: pytest.MonkeyPatch, min_idle_s: float, refusal: str
) -> None:
    slots = StreamSlots(1, 1, min_idle_s=min_idle_s, wait_s=0.0 if min_idle_s else 60.0)
    monkeypatch.setattr(kserve, "StreamSlots", lambda: slots)
    servicer, messages, refusals = kserve.KserveServicer(Mock(), {}), [Silent(), Silent()], list[str]()

    async def call(number: int) -> None:
        token = current_caller.set(Caller("a"))
        try:
            context = Mock(invocation_metadata=tuple)
            async for _ in servicer.ModelStreamInfer(messages[number], context):
                pass
        except OverloadedError as error:
            refusals.append(str(error))
        current_caller.reset(token)

    first, second = asyncio.create_task(call(0)), asyncio.create_task(call(1))
    refused, other = (second, first) if min_idle_s else (first, second)
    sent = weakref.ref(messages[1 if min_idle_s else 0])
    gc.disable()
    try:
        await asyncio.wait_for(refused, 240)
        messages.clear()
        await asyncio.sleep(0)
        assert sent() is None
    finally:
        gc.enable()
    assert refusal in refusals[0]
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
