"""Routers are restarted one after the other behind a proxy: no request fails."""

from __future__ import annotations

import asyncio
import signal

from tests.faults.processes import Processes, until
from tests.proxies.proxy import IS_REQUIRED, Program, Proxy
from tests.proxies.readers import READERS, Reader, StreamCutError

NUM_RESTARTS = 20 if IS_REQUIRED else 2
NUM_TOKENS = 5


async def test_no_request_fails(processes: Processes, proxy: Proxy, program: Program) -> None:
    counts, errors, is_over = dict.fromkeys(READERS, 0), list[str](), asyncio.Event()

    async def call_on(name: str) -> None:
        while not is_over.is_set():
            try:
                await READERS[name](Reader(proxy, NUM_TOKENS, calls_again=False))
            except StreamCutError as error:
                errors.append(f"{name}: {error}")
            counts[name] += 1

    async def until_each_has_called() -> None:
        before = dict(counts)
        await until(lambda: all(counts[name] > before[name] for name in READERS))

    async with asyncio.TaskGroup() as group:
        for name in READERS:
            group.create_task(call_on(name))
        for number in range(NUM_RESTARTS):
            await until_each_has_called()
            router = f"router-{number % 2}"
            processes.send(router, signal.SIGTERM)
            assert await processes.wait(router) == 0
            processes.start(router)
            await processes.stand()
        is_over.set()
    print(f"{program.name}: {counts} {errors}")
    assert errors == []
