"""Only a few requests of each client start at the same time."""

from __future__ import annotations

import asyncio

import pytest

from midstream.errors import DeadlineError
from router.pipeline.start_slots import StartSlots


class Starts:
    """Requests that record when they get a slot, and hold it until they are released."""

    def __init__(self, slots: StartSlots) -> None:
        self.begun: list[str] = []
        self._slots = slots
        self._let_go = asyncio.Semaphore(0)

    async def run(self, client: str) -> None:
        async with self._slots.hold(client):
            self.begun.append(client)
            await self._let_go.acquire()

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._let_go.release()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_requests_of_a_flood_start_a_few_at_a_time_and_others_at_once() -> None:
    starts = Starts(StartSlots(2))
    tasks = [asyncio.create_task(starts.run("a")) for _ in range(5)]
    await settle()
    assert starts.begun == ["a", "a"]
    tasks.append(asyncio.create_task(starts.run("b")))
    await settle()
    assert starts.begun == ["a", "a", "b"]
    tasks.pop(4).cancel()  # cancels a waiting request
    starts.let_go(5)
    await asyncio.gather(*tasks)
    assert starts.begun == ["a", "a", "b", "a", "a"]


async def test_a_start_that_waits_for_another_component_delays_no_other() -> None:
    slots = StartSlots(1, hold_s=0.01)
    starts = Starts(slots)
    tasks = [asyncio.create_task(starts.run("a")) for _ in range(3)]
    async with asyncio.timeout(240):
        while len(starts.begun) < 3:  # noqa: ASYNC110 (a timer lets them begin)
            await asyncio.sleep(0.001)
    starts.let_go(3)
    await asyncio.gather(*tasks)
    slots._hold_s = 60.0
    one_more = asyncio.create_task(starts.run("a"))
    last = asyncio.create_task(starts.run("a"))
    await settle()
    assert len(starts.begun) == 4  # each slot was released only once
    starts.let_go(2)
    await asyncio.gather(one_more, last)


async def test_waiting_for_a_slot_counts_against_the_deadline() -> None:
    slots = StartSlots(1, hold_s=60)
    async with slots.hold("a"):
        with pytest.raises(DeadlineError):
            async with slots.hold("a", asyncio.get_running_loop().time() + 0.01):
                pass
    async with slots.hold("a", asyncio.get_running_loop().time() + 0.01):
        pass


async def test_a_client_that_is_alone_may_start_more() -> None:
    starts = Starts(StartSlots(2, 3))
    tasks = [asyncio.create_task(starts.run("a")) for _ in range(6)]
    await settle()
    assert starts.begun == ["a"] * 3
    tasks.append(asyncio.create_task(starts.run("b")))
    await settle()
    starts.let_go(4)  # the three requests of a, and that of b; from now on, a has two slots
    await settle()
    assert starts.begun == ["a"] * 3 + ["b"] + ["a"] * 2
    starts.let_go(3)
    await asyncio.gather(*tasks)
