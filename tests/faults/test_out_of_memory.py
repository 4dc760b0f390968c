"""The kernel ends a component that needs more memory than its control group may have."""

from __future__ import annotations

import asyncio
import signal

import pytest

from midstream.client import AsyncClient
from tests.faults.memory_group import memory_group
from tests.faults.processes import WAIT_S, Processes, Streams
from tests.faults.test_worker_faults import FIRSTS, all_blocks_are_back

NUM_TOKENS = 300


@pytest.mark.parametrize("name", ["scheduler", "worker-0", "detokenizer-0", "router-0"])
async def test_a_process_that_runs_out_of_memory_costs_no_token(
    processes: Processes, client: AsyncClient, name: str
) -> None:
    with memory_group() as group:
        await processes.kill(name)
        processes.start(name)
        group.enter(processes.processes[name].pid)
        await processes.make_whole(client)
        await processes.stand()
        try:
            streams = [Streams(client, FIRSTS, NUM_TOKENS)]
            await streams[0].reach(20)
            group.squeeze()
            async with asyncio.timeout(WAIT_S):
                # A process that frees as much as it takes needs more memory only for more requests.
                while processes.is_running(name):
                    streams.append(Streams(client, [20_000 + len(streams)], NUM_TOKENS))
                    await asyncio.sleep(0.02)
                    group.squeeze()
        finally:
            ended = processes.processes[name].poll()
            processes.end(name)
    assert ended == -signal.SIGKILL
    processes.start(name)
    for item in streams:
        await item.check()
    await all_blocks_are_back(processes)
