"""Two processes stand still at the same time, and continue in the opposite order."""

from __future__ import annotations

import asyncio
import signal

import pytest

from midstream.client import AsyncClient
from tests.faults.processes import Processes, Streams
from tests.faults.test_worker_faults import FIRSTS, all_blocks_are_back

# Longer than the timeout of workers (conftest.py), and long enough that streams leave a silent detokenizer or router.
STILL_S = 3.0


@pytest.mark.parametrize(
    "names",
    [
        ("scheduler", "worker-0"),
        ("worker-0", "scheduler"),
        ("scheduler", "detokenizer-0"),
        ("scheduler", "router-0"),
        ("worker-0", "worker-1"),
        ("detokenizer-0", "detokenizer-1"),
        ("detokenizer-0", "router-0"),
        ("router-0", "worker-0"),
    ],
    ids="-".join,
)
async def test_two_processes_that_stand_still_cost_no_token(
    processes: Processes, client: AsyncClient, names: tuple[str, str]
) -> None:
    streams = Streams(client, FIRSTS, 100)
    await streams.reach(20)
    for name in names:
        processes.send(name, signal.SIGSTOP)
    await asyncio.sleep(STILL_S)
    for name in reversed(names):
        processes.send(name, signal.SIGCONT)
        await asyncio.sleep(STILL_S / 10)
    await streams.check()
    await Streams(client, FIRSTS, 10).check()
    await all_blocks_are_back(processes)
