"""Both routers are killed in turn while streams of every API run through a proxy: each can be made whole."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.processes import Processes, until
from tests.proxies.proxy import NGINX, Program, Proxy, running
from tests.proxies.readers import READERS, Reader, StreamCutError, read_all, read_chat

NUM_TOKENS = 200
# What a client sees if the router behind its proxy dies: the end of the connection in HTTP, and in gRPC a status that
# our client counts as broken. HAProxy ends a gRPC stream as if it were complete, but without a status.
HTTP_BREAKS = ("RemoteProtocolError: ", "APIConnectionError: ", "status 502", "status 503", "InternalServerError: ")
GRPC_BREAKS = {
    "nginx": ("INTERNAL: ", "UNAVAILABLE: "),
    "haproxy": ("UNKNOWN: ", "UNAVAILABLE: "),
    "caddy": ("INTERNAL: ", "UNAVAILABLE: "),
}


@pytest.fixture(scope="module")
def expected(shared: Processes) -> dict[str, str]:
    """Return the text of each API's stream, read from a router without a proxy."""

    async def read() -> dict[str, str]:
        await shared.stand()
        return await read_all(Proxy(shared.routers[0], shared.urls[0]), NUM_TOKENS)

    return asyncio.run(read())


async def test_every_stream_can_be_made_whole(
    processes: Processes, proxy: Proxy, program: Program, expected: dict[str, str], hold: Callable[[], None]
) -> None:
    readers = {name: Reader(proxy, NUM_TOKENS) for name in READERS}
    before = await num_finished(processes)
    async with asyncio.TaskGroup() as group:
        for name, read in READERS.items():
            group.create_task(read(readers[name]))
        for number in range(2):
            await until(lambda: all(reader.text for reader in readers.values()), state=lambda: readers)
            await processes.kill(f"router-{number}")
            processes.start(f"router-{number}")
            await processes.stand()
        hold()
    for name, reader in readers.items():
        print(f"{program.name} {name}: {reader.breaks}")
        assert reader.text == expected[name]
        allowed = GRPC_BREAKS[program.name] if name == "kserve" else HTTP_BREAKS
        assert reader.breaks
        assert all(error.startswith(allowed) for error in reader.breaks), reader.breaks
    assert await num_finished(processes) == before + len(READERS)  # nothing was computed twice


async def num_finished(processes: Processes) -> int:
    return sum((await processes.stats()).num_finished_by_reason.values())


async def test_over_http_1_0_a_broken_stream_looks_complete(
    processes: Processes, hold: Callable[[], None], tmp_path: Path
) -> None:
    """nginx's own default is not safe, which is why our configuration sets the version."""
    NGINX.path()
    text = NGINX.configuration()
    default = text.replace("            proxy_http_version 1.1;\n", "")
    assert default != text
    async with running(NGINX, tmp_path, processes.routers[:1] * 2, processes.urls[:1] * 2, default) as proxy:
        reader = Reader(proxy, NUM_TOKENS, calls_again=False)
        reading = asyncio.create_task(read_chat(reader))
        await until(lambda: reader.text)
        await processes.kill("router-0")
        with pytest.raises(StreamCutError, match=re.escape("the stream ended without [DONE]")):
            await reading
    hold()
