"""Requests whose last byte the client never sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from midstream.client import AsyncClient
from midstream.errors import DeadlineError, InvalidArgumentError, OverloadedError
from midstream.rpc.http2.messages import Messages
from router.authentication import Authenticator, Caller, TokenFile, current_caller
from router.pipeline import message_slots
from router.pipeline.message_slots import MessageSlots, Refusals
from tests.router.conftest import Cluster
from tests.router.test_stream_hoarders import HOARDER, PROBE, first_tokens
from tests.router.unfinished import UnfinishedCalls

GENERATE = "/midstream.v1.Midstream/Generate"
NUM_BYTES = 1 << 18


async def test_a_client_holds_memory_of_thirty_two_unfinished_messages(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{HOARDER} hoarder\n{PROBE} probe\n")
    authenticator = Authenticator(tokens=TokenFile(str(tmp_path / "tokens")))
    part = await cluster.add_router(await cluster.add_detokenizer(), authenticator=authenticator)
    calls = await UnfinishedCalls.connect(part.server.port)
    for _ in range(40):
        calls.begin(GENERATE, NUM_BYTES, HOARDER)

    async def until_read() -> list[int]:
        async with asyncio.timeout(240):
            while sum(count == 4 + NUM_BYTES for count in calls.num_sent.values()) < 32:  # noqa: ASYNC110 (a task counts)
                await asyncio.sleep(0.01)
        return sorted(calls.num_sent.values())

    counts = await until_read()
    async with AsyncClient(part.address, token=PROBE) as probe:
        assert len(await first_tokens(cluster, probe, 3)) == 3
    # For calls without a slot, gRPC buffers as much as its flow-control window allows.
    assert await until_read() == counts
    assert max(counts[:8]) < 1 << 16
    await calls.close()
    async with AsyncClient(part.address, token=HOARDER) as client:
        assert len(await first_tokens(cluster, client, 1)) == 1


async def test_a_lost_message_is_not_awaited_forever() -> None:
    slots, forever = MessageSlots(1, 1, timeout_s=0.01), asyncio.Event()

    async def messages(*values: bytes, stays: bool = False) -> AsyncIterator[bytes]:
        for value in values:
            yield value
        if stays:
            await forever.wait()

    with pytest.raises(DeadlineError, match="did not arrive"):
        await slots.read(messages(stays=True))
    with pytest.raises(InvalidArgumentError, match="no request"):
        await slots.read(messages())
    assert await slots.read(messages(b"one")) == b"one"


async def test_waiting_has_a_time_limit_and_health_checks_do_not_wait() -> None:
    slots = MessageSlots(1, 1, timeout_s=10, wait_s=0.01)
    is_read, forever = asyncio.Event(), asyncio.Event()

    async def messages(*values: bytes) -> AsyncIterator[bytes]:
        is_read.set()
        if not values:
            await forever.wait()
        for value in values:
            yield value

    holding = asyncio.create_task(slots.read(messages()))
    await is_read.wait()
    with pytest.raises(OverloadedError):
        await slots.read(messages(b"request"))
    token = current_caller.set(Caller("probe", roles=frozenset()))
    assert await slots.read(messages(b"check")) == b"check"
    current_caller.reset(token)
    holding.cancel()


async def hold(slots: MessageSlots, name: str) -> asyncio.Task[bytes]:
    """Start to read a client's message that never arrives; return the task that waits for it."""
    is_read = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        is_read.set()
        await asyncio.Event().wait()
        yield b""

    token = current_caller.set(Caller(name))
    task = asyncio.create_task(slots.read(messages()))
    current_caller.reset(token)
    await is_read.wait()
    return task


async def one_message() -> AsyncIterator[bytes]:
    yield b"one"


async def test_unfinished_messages_are_limited_per_client_and_in_total() -> None:
    slots = MessageSlots(2, 1, timeout_s=10, wait_s=0.01)
    tasks = [await hold(slots, "a")]
    current_caller.set(Caller("a"))
    with pytest.raises(OverloadedError):
        await slots.read(one_message())
    current_caller.set(Caller("b"))
    assert await slots.read(one_message()) == b"one"
    tasks.append(await hold(slots, "b"))
    current_caller.set(Caller("c"))
    with pytest.raises(OverloadedError):
        await slots.read(one_message())
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await slots.read(one_message()) == b"one"


async def test_the_calls_of_a_client_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_slots, "_MAX_WAITING", 1)
    slots = MessageSlots(1, 1, timeout_s=10, wait_s=10)
    holding = await hold(slots, "a")
    current_caller.set(Caller("a"))
    waiting = asyncio.create_task(slots.read(one_message()))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="of this client"):
        await slots.read(one_message())
    holding.cancel()
    assert await waiting == b"one"


async def test_a_message_that_has_arrived_takes_no_slot() -> None:
    slots = MessageSlots(1, 1, timeout_s=10, wait_s=0.01)
    unfinished, complete = (Messages(Mock(), 1024, b"") for _ in range(2))
    unfinished.feed(b"\0\0\0\0\x03on", 7)
    holding = asyncio.create_task(slots.read(unfinished))
    await asyncio.sleep(0)  # now the unfinished message has the only slot
    complete.feed(b"\0\0\0\0\x03two", 8)
    assert await slots.read(complete) == b"two"
    with pytest.raises(OverloadedError):
        await slots.read(complete)  # its next message has not arrived, and there is no slot
    unfinished.feed(b"e", 1)
    assert await holding == b"one"


async def test_calls_that_waited_in_vain_end_one_after_the_other() -> None:
    refusals, loop = Refusals(0.01), asyncio.get_running_loop()
    began = loop.time()

    async def refused() -> float:
        await refusals.turn()
        return loop.time() - began

    times = await asyncio.gather(*(refused() for _ in range(5)))
    assert all(time > 0.009 * number for number, time in enumerate(times))
