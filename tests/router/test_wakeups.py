"""In each iteration of the event loop, a limited number of tasks that wait for output continue; clients take turns."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from router.pipeline.wakeups import Wakeups


async def test_clients_take_turns_and_iterations_are_limited() -> None:
    loop = asyncio.get_running_loop()
    wakeups, done = Wakeups(max_per_iteration=4), list[tuple[str, int]]()
    iteration = 0

    async def wait(name: str, waiter: asyncio.Future[None]) -> None:
        await waiter
        done.append((name, iteration))

    names = [*(f"many-{i}" for i in range(10)), "few-0", "few-1"]
    waiters = [loop.create_future() for _ in names]
    tasks = [asyncio.create_task(wait(name, waiter)) for name, waiter in zip(names, waiters, strict=True)]
    await asyncio.sleep(0)
    for name, waiter in zip(names, waiters, strict=True):
        wakeups.wake(name.split("-")[0], waiter)
    while not all(task.done() for task in tasks):
        iteration += 1
        await asyncio.sleep(0)
    assert [name for name, _ in done] == [
        *("many-0", "many-1", "many-2", "many-3"),
        *("many-4", "few-0", "many-5", "few-1"),
        *("many-6", "many-7", "many-8", "many-9"),
    ]
    groups = [[number for _, number in done[i : i + 4]] for i in range(0, 12, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    assert all(first[0] < second[0] for first, second in pairwise(groups))


async def test_a_task_alone_continues_in_the_next_iteration() -> None:
    wakeups = Wakeups(max_per_iteration=1)
    for _ in range(3):
        waiter = asyncio.get_running_loop().create_future()
        wakeups.wake("client", waiter)
        assert waiter.done()
        await asyncio.sleep(0)


async def test_a_cancelled_task_is_skipped() -> None:
    wakeups = Wakeups(max_per_iteration=1)
    waiters = [asyncio.get_running_loop().create_future() for _ in range(3)]
    for waiter in waiters:
        wakeups.wake("client", waiter)
    waiters[1].cancel()
    await asyncio.wait_for(waiters[2], 5)
