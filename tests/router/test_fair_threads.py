"""Work that would block the event loop runs in threads, which are shared fairly among clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from midstream.errors import OverloadedError
from router.authentication import Caller, current_caller
from router.pipeline.fair_threads import FairThreads


class Gate:
    """Functions that record their names when they begin, and then wait until they are released."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._let_go = threading.Semaphore(0)

    def function(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self._let_go.acquire(timeout=240)
            return name

        return run

    def let_go(self, count: int = 1) -> None:
        self._let_go.release(count)

    async def until_begun(self, count: int) -> list[str]:
        async with asyncio.timeout(240):
            while len(self.begun) < count:  # noqa: ASYNC110 (threads append)
                await asyncio.sleep(0.001)
        return self.begun


def run_for(client: str, threads: FairThreads, function: Callable[[], str]) -> asyncio.Task[str]:
    token = current_caller.set(Caller(client))
    task = asyncio.create_task(threads.run(function))
    current_caller.reset(token)
    return task


async def test_a_client_does_not_wait_for_all_requests_of_another() -> None:
    threads, gate = FairThreads(1, "test"), Gate()
    flood = [run_for("a", threads, gate.function(f"a{number}")) for number in range(5)]
    await gate.until_begun(1)
    later = [run_for("b", threads, gate.function(name)) for name in ("b0", "b1")]
    await asyncio.sleep(0)
    gate.let_go(7)
    assert await asyncio.gather(*flood, *later) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]
    assert gate.begun == ["a0", "a1", "b0", "a2", "b1", "a3", "a4"]
    threads.close()


async def test_a_client_cannot_occupy_all_threads() -> None:
    threads, gate = FairThreads(2, "test", num_per_client=1), Gate()
    flood = [run_for("a", threads, gate.function(f"a{number}")) for number in range(2)]
    await gate.until_begun(1)
    other = run_for("b", threads, gate.function("b0"))
    assert await gate.until_begun(2) == ["a0", "b0"]
    gate.let_go(3)
    await asyncio.gather(*flood, other)
    threads.close()


async def test_a_thread_is_free_when_its_function_ends_and_not_when_its_caller_leaves() -> None:
    threads, gate = FairThreads(1, "test"), Gate()
    left, waiting, next_one = (run_for("a", threads, gate.function(name)) for name in ("left", "waiting", "next"))
    await gate.until_begun(1)
    left.cancel()
    waiting.cancel()
    await asyncio.gather(left, waiting, return_exceptions=True)
    assert gate.begun == ["left"]
    assert threads.num_waiting == 1
    gate.let_go(2)
    assert await next_one == "next"
    assert gate.begun == ["left", "next"]
    threads.close()


async def test_the_work_of_a_client_that_waits_is_limited() -> None:
    threads, gate = FairThreads(1, "test", max_waiting_per_client=1), Gate()
    tasks = [run_for("a", threads, gate.function(f"a{number}")) for number in range(2)]
    await gate.until_begun(1)
    with pytest.raises(OverloadedError):
        await run_for("a", threads, gate.function("a2"))
    tasks.append(run_for("b", threads, gate.function("b0")))
    gate.let_go(3)
    assert await asyncio.gather(*tasks) == ["a0", "a1", "b0"]
    threads.close()


async def test_waiting_callers_that_are_cancelled_in_the_iteration_in_which_a_thread_ends_take_no_slot() -> None:
    """Cancelling a task cancels its place in the queue at once, but the task itself handles the cancellation only
    later.
    """
    threads, gate = FairThreads(1, "test"), Gate()
    first = run_for("a", threads, gate.function("first"))
    await gate.until_begun(1)
    left = [run_for(client, threads, gate.function("left")) for client in ("b", "b", "c")]
    last = run_for("d", threads, gate.function("last"))
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    threads._release("a")  # as if the first function ended in this iteration
    threads._take("a")
    for error in await asyncio.gather(*left, return_exceptions=True):
        assert isinstance(error, asyncio.CancelledError)
    gate.let_go(2)
    assert [await first, await last] == ["first", "last"]
    assert threads.num_waiting == 0
    threads.close()
