"""Routers are killed one after the other behind a proxy, in the middle of streams.

With ALL_PROXY_TESTS=1 (`make test-proxies`), 100 are killed behind each proxy.
"""

from __future__ import annotations

import pytest

from midstream.client import AsyncClient
from tests.faults.processes import Processes, Streams
from tests.proxies.proxy import IS_REQUIRED, Program, Proxy

NUM_KILLS = 100 if IS_REQUIRED else 4
NUM_STREAMS, NUM_TOKENS = 8, 600
FIRSTS = [1000 * number for number in range(1, NUM_STREAMS + 1)]


@pytest.mark.timeout(10 * NUM_KILLS + 120)
async def test_the_streams_of_our_client_are_whole(processes: Processes, proxy: Proxy, program: Program) -> None:
    num_resumes = 0
    async with AsyncClient(proxy.address) as client:
        undisturbed = await Streams(client, FIRSTS, NUM_TOKENS).check()
        expected = [result.text for result in undisturbed]
        streams = Streams(client, FIRSTS, NUM_TOKENS)
        for number in range(NUM_KILLS):
            if streams.have_ended():
                results = await streams.check()
                assert [result.text for result in results] == expected
                num_resumes += sum(stream.num_resumes for stream in streams.streams)
                streams = Streams(client, FIRSTS, NUM_TOKENS)
            await streams.advance(20)
            router = f"router-{number % 2}"
            await processes.kill(router)
            await streams.advance(20)
            processes.start(router)
            await processes.stand()
        results = await streams.check()
        assert [result.text for result in results] == expected
        num_resumes += sum(stream.num_resumes for stream in streams.streams)
    print(f"{program.name}: {NUM_KILLS} kills, {num_resumes} resumed streams")
    assert num_resumes >= NUM_KILLS
