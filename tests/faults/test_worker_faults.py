"""Workers that die, hang or are shut down."""

from __future__ import annotations

import asyncio
import signal

import pytest

from midstream.client import AsyncClient, SamplingParams
from midstream.errors import ExecutionError, UnavailableError
from tests.faults.processes import Processes, Streams, until

FIRSTS = [1000 * number for number in range(1, 9)]


async def all_blocks_are_back(processes: Processes) -> None:
    async def are_back() -> bool:
        stats = await processes.stats()
        assert stats.num_conservation_violations == 0
        return stats.kv_cache_stats.used_num_blocks == 0 and stats.num_active_requests == 0

    await until(are_back)


async def no_workers_are_left(processes: Processes) -> None:
    """Wait until the scheduler has detected the deaths of all workers, so that it assigns no request to a dead
    worker.
    """

    async def are_lost() -> bool:
        return (await processes.stats()).kv_cache_stats.max_num_blocks == 0

    await until(are_lost)


async def a_worker_is_ready(processes: Processes) -> None:
    async def is_ready() -> bool:
        return (await processes.stats()).kv_cache_stats.max_num_blocks > 0

    await until(is_ready)


async def test_a_worker_killed_in_generation_costs_no_token(processes: Processes, client: AsyncClient) -> None:
    streams = Streams(client, FIRSTS, 100)
    await streams.reach(20)
    await processes.kill("worker-0")
    results = await streams.check()
    again = await Streams(client, FIRSTS, 100).check()
    assert [result.text for result in results] == [result.text for result in again]
    await all_blocks_are_back(processes)


async def test_a_worker_that_is_asked_to_end_hands_over(processes: Processes, client: AsyncClient) -> None:
    streams = Streams(client, FIRSTS, 100)
    await streams.reach(20)
    processes.send("worker-1", signal.SIGTERM)
    assert await processes.wait("worker-1") == 0
    await streams.check()
    await all_blocks_are_back(processes)


async def test_a_worker_killed_in_a_chunked_prompt_gives_its_blocks_back(
    processes: Processes, client: AsyncClient
) -> None:
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    await no_workers_are_left(processes)
    processes.worker_flags = ("--max-num-tokens", "16")
    processes.start("worker-0")
    asking = asyncio.create_task(client.generate(token_ids=[5] * 4000, sampling=sampling, timeout_s=100).result())

    async def has_begun() -> bool:
        return (await processes.stats()).inflight_batching_stats.num_ctx_tokens > 0

    await until(has_begun)
    await processes.kill("worker-0")
    processes.worker_flags = ()
    processes.start("worker-1")
    assert (await asking).token_ids == list(range(6, 16))
    await all_blocks_are_back(processes)


async def test_a_suspended_worker_is_replaced_and_its_later_messages_are_dropped(
    processes: Processes, client: AsyncClient
) -> None:
    before = (await processes.stats()).num_stale_messages
    streams = Streams(client, FIRSTS, 200)
    await streams.reach(20)
    processes.send("worker-0", signal.SIGSTOP)
    await streams.check()
    processes.send("worker-0", signal.SIGCONT)

    async def was_dropped() -> bool:
        return (await processes.stats()).num_stale_messages > before

    await until(was_dropped)
    await all_blocks_are_back(processes)


async def test_without_any_worker_requests_are_refused_in_time_or_wait(
    processes: Processes, client: AsyncClient
) -> None:
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    async with AsyncClient(processes.routers, unavailable_timeout_s=1) as impatient, asyncio.timeout(240):
        with pytest.raises(UnavailableError):
            await impatient.generate(token_ids=[5], sampling=sampling).result()
    patient = asyncio.create_task(client.generate(token_ids=[5], sampling=sampling, timeout_s=60).result())
    await asyncio.sleep(0.5)
    assert not patient.done()
    processes.start("worker-0")
    assert (await patient).token_ids == [6, 7, 8]


async def test_a_request_that_kills_workers_is_ended_and_its_neighbours_finish(
    processes: Processes, client: AsyncClient
) -> None:
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
    await no_workers_are_left(processes)
    processes.worker_flags = ("--die-token", "777")
    processes.start("worker-0", "worker-1")
    neighbours = Streams(client, FIRSTS, 100, timeout_s=150)
    await neighbours.reach(10)

    async def supervise() -> None:
        while True:
            for name in ("worker-0", "worker-1"):
                if not processes.is_running(name):
                    processes.start(name)
            await asyncio.sleep(0.05)

    supervisor = asyncio.create_task(supervise())
    with pytest.raises(ExecutionError, match="died while running this request"):
        await client.generate(token_ids=[777], timeout_s=100).result()
    # A worker that the request killed may appear to be running for a moment.
    await neighbours.check()
    await all_blocks_are_back(processes)
    supervisor.cancel()
    processes.worker_flags = ()
    for name in ("worker-0", "worker-1"):
        await processes.kill(name)
