from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from benchmarks.league.__main__ import row_of
from benchmarks.league.load import Request, make_requests, run_requests
from benchmarks.league.systems import Server


class System:
    """A system that answers in four pieces. After a fault, its plain requests fail, and its guided requests return
    other text.
    """

    def __init__(self) -> None:
        self.is_hurt = False

    def hurt(self) -> None:
        self.is_hurt = True

    async def stream(self, request: Request) -> AsyncIterator[tuple[int, str]]:
        for number in range(4):
            yield 0, f"{request.prompt} {number} "
        if self.is_hurt and request.kind == "plain":
            raise ValueError("the stream broke off")
        yield 0, "other" if self.is_hurt and request.kind == "guided" else "end"


async def test_a_row_counts_what_is_complete_and_what_is_identical() -> None:
    system, requests = System(), make_requests(8, 5)
    expected = await run_requests(system.stream, requests, 8)
    whole = row_of("a system", "nothing", requests, expected, await run_requests(system.stream, requests, 3))
    assert (whole["requests"], whole["complete"], whole["identical"], whole["errors"]) == (8, 8, 8, [])
    system.hurt()
    hurt = row_of("a system", "killed", requests, expected, await run_requests(system.stream, requests, 8))
    assert hurt["by_kind"] == {"plain": [4, 0, 0], "n=3": [2, 2, 2], "guided": [2, 2, 0]}
    assert (hurt["complete"], hurt["identical"], hurt["errors"]) == (4, 2, ["ValueError: the stream broke off"])


async def test_faults_are_evenly_spaced_and_occur_while_streams_are_open() -> None:
    loop = asyncio.get_running_loop()
    faults, num_ended = [asyncio.Event(), asyncio.Event()], 0
    ended_at_faults: list[int] = []
    next_fault = iter(faults)

    def fault() -> None:
        ended_at_faults.append(num_ended)
        loop.call_soon_threadsafe(next(next_fault).set)

    async def stream(request: Request) -> AsyncIterator[tuple[int, str]]:
        nonlocal num_ended
        yield 0, "begin "
        # With one request at a time, two have ended when the third waits for the first fault.
        if request.number in (2, 6):
            await faults[request.number // 4].wait()
        yield 0, "end"
        num_ended += 1

    outcomes = await run_requests(stream, make_requests(8, 5), 1, fault, 2)
    assert ended_at_faults == [2, 6]
    assert [outcome.texts[0] for outcome in outcomes] == ["begin end"] * 8


def test_orphaned_children_end_with_their_server(tmp_path: Path) -> None:
    server = Server("a server", ["bash", "-c", "sleep 600 & echo $!; wait"], 1, tmp_path / "log")
    server.start()
    while not (text := server.log.read_text()).endswith("\n"):
        pass
    child = psutil.Process(int(text))
    server.kill_front()
    assert server.process is not None
    server.process.wait()
    assert child.is_running()
    server.end()
    psutil.wait_procs([child], timeout=240)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
