"""Requests of which a client sends everything except the last byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.client import AsyncClient
from midstream.errors import DeadlineError, InvalidArgumentError, OverloadedError
from router.authentication import Authenticator, Caller, TokenFile, current_caller
from router.pipeline.message_slots import MessageSlots
from router.pipeline.refusals import Refusals
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
        async with asyncio.timeout(20):
            while sum(count == 4 + NUM_BYTES for count in calls.num_sent.values()) < 32:  # noqa: ASYNC110 (a task counts)
                await asyncio.sleep(0.01)
        return sorted(calls.num_sent.values())

    counts = await until_read()
    async with AsyncClient(part.address, token=PROBE) as probe:
        assert len(await first_tokens(cluster, probe, 3)) == 3
    # For the other calls, gRPC buffers as much as its flow-control window allows.
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


async def test_calls_that_waited_in_vain_end_one_after_the_other() -> None:
    refusals, loop = Refusals(0.01), asyncio.get_running_loop()
    began = loop.time()

    async def refused() -> float:
        await refusals.turn()
        return loop.time() - began

    times = await asyncio.gather(*(refused() for _ in range(5)))
    assert all(time > 0.009 * number for number, time in enumerate(times))
