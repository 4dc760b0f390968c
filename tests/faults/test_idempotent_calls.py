"""Calls with idempotency keys, retried while processes are killed: each call runs once and is in the ledger once.

For a longer run, set IDEMPOTENT_CALLS=800.
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
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import ledger_pb2, service_pb2_grpc
from tests.faults.processes import ALL, Processes, until

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_CALLS = int(os.environ.get("IDEMPOTENT_CALLS", "12"))
AT_ONCE = 16
MAX_TOKENS = 40
CLIENT = "retries"
PAUSE_S = 0.5
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@contextlib.asynccontextmanager
async def stubs(processes: Processes) -> AsyncIterator[list[Stub]]:
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for address in processes.routers]
        yield [cast("Stub", service_pb2_grpc.MidstreamStub(channel)) for channel in channels]


async def call(stub: Stub, number: int) -> list[int]:
    """Make one attempt, which the client may cancel at any time."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=[number % 1000]),
        max_tokens=MAX_TOKENS,
        client_id=CLIENT,
        stopping=pb.StoppingConfig(ignore_eos=True),
        sampling=pb.SamplingConfig(temperature=0.0),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, metadata=(("idempotency-key", f"call {number}"),), timeout=20):
        assert response.token_offset == len(tokens)
        tokens += response.token_ids
    return tokens


class Retries:
    """A client that retries failed or slow calls through the other router.

    Attributes:
        num_tries: Number of calls, including retries.
    """

    def __init__(self, routers: list[Stub], dice: random.Random) -> None:
        self.num_tries = 0
        self._routers = routers
        self._dice = dice
        self._limit = asyncio.Semaphore(AT_ONCE)

    async def answer(self, number: int) -> None:
        """Retry a call until it is answered; check that the answer is correct."""
        async with self._limit:
            for attempt in range(300):
                self.num_tries += 1
                try:
                    async with asyncio.timeout(self._dice.choice((0.1, 0.3, 30, 30))):
                        tokens = await call(self._routers[(number + attempt) % 2], number)
                except TimeoutError:
                    continue
                except grpc.aio.AioRpcError as error:
                    if error.code() not in RETRIED:
                        raise
                    await asyncio.sleep(0.2)
                else:
                    assert tokens == [(number % 1000 + 1 + i) for i in range(MAX_TOKENS)]
                    return
            raise AssertionError(f"call {number} was never answered")


async def test_each_key_runs_once_whatever_dies(processes: Processes, client: AsyncClient) -> None:
    dice, num_kills = random.Random(5), 0

    async def disturb() -> None:
        nonlocal num_kills
        while True:
            name = dice.choice(ALL)
            await processes.kill(name)
            num_kills += 1
            processes.start(name)
            await processes.stand()
            await asyncio.sleep(PAUSE_S)

    async with stubs(processes) as routers:
        retries, killer = Retries(routers, dice), asyncio.create_task(disturb())
        try:
            await asyncio.gather(*map(retries.answer, range(NUM_CALLS)))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
        await processes.make_whole(client)
        for number in range(0, NUM_CALLS, 5):
            await retries.answer(number)
    print(f"{NUM_CALLS} calls, {retries.num_tries} tries, {num_kills} kills")
    path = processes.journal_path.with_name(processes.journal_path.name + ".documents")

    def is_counted_once() -> bool:
        with contextlib.closing(sqlite3.connect(path)) as documents:
            pages = documents.execute("SELECT data FROM midstream_documents WHERE kind = 'ledger'").fetchall()
        entries = [entry for (page,) in pages for entry in ledger_pb2.LedgerPage.FromString(page).entries]
        entries = [entry for entry in entries if entry.client_id == CLIENT]
        assert len(entries) == len({entry.request_id for entry in entries}) <= NUM_CALLS
        assert {entry.completion_tokens for entry in entries} <= {MAX_TOKENS}
        return len(entries) == NUM_CALLS

    await until(is_counted_once)
