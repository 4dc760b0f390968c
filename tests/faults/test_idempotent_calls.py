"""Calls with idempotency keys, sent again and again while parts are killed: each runs once.

MIDSTREAM_IDEMPOTENT_CALLS=800 runs that many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from midstream.client import AsyncClient
from midstream.rpc.serving import open_channel
from protos import generation_pb2 as pb
from protos import service_pb2_grpc
from tests.faults.processes import ALL, Processes, until

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_CALLS = int(os.environ.get("MIDSTREAM_IDEMPOTENT_CALLS", "12"))
AT_ONCE = 16
MAX_TOKENS = 40
PAUSE_S = 1.0


@contextlib.asynccontextmanager
async def stubs(processes: Processes) -> AsyncIterator[list[Stub]]:
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for address in processes.routers]
        yield [cast("Stub", service_pb2_grpc.MidstreamStub(channel)) for channel in channels]


async def call(stub: Stub, number: int) -> list[int]:
    """One try, which a client may give up at any time."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=[number % 1000]),
        max_tokens=MAX_TOKENS,
        stopping=pb.StoppingConfig(ignore_eos=True),
        sampling=pb.SamplingConfig(temperature=0.0),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, metadata=(("idempotency-key", f"call {number}"),), timeout=20):
        assert response.token_offset == len(tokens)
        tokens += response.token_ids
    return tokens


async def test_each_key_runs_once_whatever_dies(processes: Processes, client: AsyncClient) -> None:
    dice = random.Random(5)
    num_tries = num_kills = 0

    async def answer(number: int) -> None:
        """As a client with retries: what breaks, or takes too long, is sent again, to the other router."""
        nonlocal num_tries
        async with limit:
            for attempt in range(100):
                num_tries += 1
                patience_s = dice.choice((0.1, 0.3, 30, 30))
                with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                    async with asyncio.timeout(patience_s):
                        tokens = await call(routers[(number + attempt) % 2], number)
                    assert tokens == [(number % 1000 + 1 + i) for i in range(MAX_TOKENS)]
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"call {number} was never answered")

    async def disturb() -> None:
        nonlocal num_kills
        while True:
            name = dice.choice(ALL)
            await processes.kill(name)
            num_kills += 1
            processes.start(name)
            await asyncio.sleep(PAUSE_S)

    limit = asyncio.Semaphore(AT_ONCE)
    async with stubs(processes) as routers:
        killer = asyncio.create_task(disturb())
        try:
            await asyncio.gather(*map(answer, range(NUM_CALLS)))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
        await processes.make_whole(client)
        for number in range(0, NUM_CALLS, 5):
            await call(routers[0], number)
    print(f"{NUM_CALLS} calls, {num_tries} tries, {num_kills} kills")
    path = processes.journal_path.with_name(processes.journal_path.name + ".documents")

    def is_kept_once() -> bool:
        with contextlib.closing(sqlite3.connect(path)) as documents:
            ids = documents.execute("SELECT id FROM midstream_documents WHERE kind = 'request'").fetchall()
        assert len(ids) <= NUM_CALLS
        return len(ids) == NUM_CALLS

    await until(is_kept_once)
