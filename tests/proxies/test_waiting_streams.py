"""Streams that wait for their first token through a proxy: nothing is cut while the service is up.

Router 0 keeps waiting streams open; router 1 does not. In `make test`, the limits of the proxies are lowered to
seconds; with ALL_PROXY_TESTS=1 (`make test-proxies`), they are the proxies' own, and first tokens take 90
seconds and then 20 minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.processes import Processes
from tests.proxies.proxy import CADDY, HAPROXY, IS_REQUIRED, PROGRAMS, Program, Proxy, running
from tests.proxies.readers import READERS, Reader, StreamCutError, read_all, read_background_response, read_native

NUM_TOKENS = 20
WAIT_S, LIMIT_S = (90.0, None) if IS_REQUIRED else (7.0, 3)
LONG_WAIT_S = 20 * 60.0
ALL_READERS = {**READERS, "background responses": read_background_response, "native": read_native}
# What a client sees when nginx or HAProxy ends a stream that was silent for too long: the end of the connection in
# HTTP, UNAVAILABLE in gRPC. Our client resumes, until there was no message for its `unavailable_timeout_s`. Caddy
# has no limit.
CUTS = {"kserve": ("UNAVAILABLE: ",), "native": ("resumed ", "UnavailableError: ")}
HTTP_CUTS = ("RemoteProtocolError: peer closed connection", "APIConnectionError: ")


@dataclass(frozen=True)
class Place:
    """A proxy in front of a router.

    Attributes:
        program: The proxy.
        is_kept_open: Whether the router sends keep-alives.
        has_our_limits: Whether the proxy has the limits of deploy/proxies.
    """

    program: Program
    is_kept_open: bool
    has_our_limits: bool

    def __str__(self) -> str:
        limits = "our limits" if self.has_our_limits else "its own limits"
        return f"{self.program.name} with {limits}, {'kept open' if self.is_kept_open else 'silent'}"


def with_limits(program: Program, limit_s: int | None) -> str:
    """Return the configuration with other limits of silence: `limit_s`, or the program's own if None.

    HAProxy has none of its own; Debian's configuration has 50 seconds.
    """
    text = program.configuration()
    if limit_s is not None:
        return text.replace("1h", f"{limit_s}s")
    return text.replace("1h", "50s") if program is HAPROXY else re.sub(r"\n[^\n]*\b1h;", "", text)


@pytest.fixture
async def routers(processes: Processes) -> AsyncIterator[Processes]:
    """Return the service with router 1 sending no keep-alives."""
    flags = processes.router_flags
    await processes.kill("router-1")
    processes.router_flags = ("--keepalive-interval-s", "0")
    processes.start("router-1")
    await processes.stand()
    yield processes
    await processes.kill("router-1")
    processes.router_flags = flags


async def outcome(name: str, proxy: Proxy) -> tuple[str, str]:
    """Read a stream once; return its text and the error that cut it."""
    reader = Reader(proxy, NUM_TOKENS, calls_again=False)
    with contextlib.suppress(StreamCutError):
        await ALL_READERS[name](reader)
    return reader.text, "; ".join(reader.breaks)


async def outcomes(
    processes: Processes, proxies: dict[Place, Proxy], wait_s: float
) -> dict[Place, dict[str, tuple[str, str]]]:
    """Read a stream of each API through each proxy, while there is no worker for so many seconds."""
    for number in range(2):
        await processes.kill(f"worker-{number}")
    async with asyncio.TaskGroup() as group:
        tasks = {
            place: {name: group.create_task(outcome(name, proxy)) for name in ALL_READERS}
            for place, proxy in proxies.items()
        }
        await asyncio.sleep(wait_s)
        processes.start("worker-0", "worker-1")
    return {place: {name: task.result() for name, task in by_name.items()} for place, by_name in tasks.items()}


@contextlib.asynccontextmanager
async def running_places(
    programs: Sequence[Program], processes: Processes, folder: Path, limit_s: int | None
) -> AsyncIterator[dict[Place, Proxy]]:
    """Run each program three times: with the given limits before a router with keep-alives, with these limits before
    the other router, and as deployed before the other router.
    """
    async with contextlib.AsyncExitStack() as stack:
        found = dict[Place, Proxy]()
        for program in programs:
            for place, router, text in (
                (Place(program, is_kept_open=True, has_our_limits=False), 0, with_limits(program, limit_s)),
                (Place(program, is_kept_open=False, has_our_limits=False), 1, with_limits(program, limit_s)),
                (Place(program, is_kept_open=False, has_our_limits=True), 1, program.configuration()),
            ):
                own = folder / str(len(found))
                own.mkdir()
                address, url = processes.routers[router], processes.urls[router]
                found[place] = await stack.enter_async_context(running(program, own, [address] * 2, [url] * 2, text))
        yield found


async def check(programs: Sequence[Program], processes: Processes, folder: Path, wait_s: float) -> None:
    """Check that a stream is cut only if nothing keeps it open and the proxy has a limit shorter than the wait."""
    expected = await read_all(Proxy(processes.routers[0], processes.urls[0]), NUM_TOKENS)
    expected |= {"background responses": expected["responses"], "native": expected["completions"]}
    async with running_places(programs, processes, folder, LIMIT_S) as proxies:
        found = await outcomes(processes, proxies, wait_s)
    results = [(place, name, *result) for place, by_name in found.items() for name, result in by_name.items()]
    for place, name, _, error in results:
        print(f"{place}, {name}: {error or 'whole'}")
    for place, name, text, error in results:
        if place.is_kept_open or place.has_our_limits or place.program is CADDY:
            assert (text, error) == (expected[name], ""), (place, name)
        else:
            assert error.startswith(CUTS.get(name, HTTP_CUTS)), (place, name)


async def test_a_stream_is_kept_open_until_its_first_token(
    program: Program, routers: Processes, tmp_path: Path
) -> None:
    await check([program], routers, tmp_path, WAIT_S)


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not IS_REQUIRED, reason="takes 21 minutes; make test-proxies runs it")
async def test_a_stream_is_kept_open_for_20_minutes(routers: Processes, tmp_path: Path) -> None:
    await check(PROGRAMS, routers, tmp_path, LONG_WAIT_S)
