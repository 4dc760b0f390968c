"""A scheduler dies, is replaced, or cannot write: real processes, with a worker without a model."""

from __future__ import annotations

import asyncio
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midstream.python_process import python_command
from protos import loads_pb2
from tests.integration.named_processes import environment
from tests.integration.parts import Parts, running
from tests.integration.service import eventually, tokens
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.generation_pb2 import GenerateRequest
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 200
STEP_MS = 20
# The delay with which `midstream up` restarts a process that has died for the first time.
BACKOFF_S = 0.25


async def read(stub: Stub, first: int, half_way: asyncio.Event) -> tuple[list[int], float]:
    """Read the stream of one request; check that no token is missing or duplicated; return the longest time without a
    token, in seconds.
    """
    received: list[int] = []
    longest, last = 0.0, time.monotonic()
    async for response in stub.Generate(tokens([first], max_tokens=NUM_TOKENS), timeout=400):
        assert response.token_offset == len(received)
        received += response.token_ids
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if len(received) > NUM_TOKENS // 4:
            half_way.set()
    return received, longest


async def num_accepted(stub: Stub, count: int) -> int:
    """Return the number of requests at the scheduler as soon as it is `count`, or at a time limit."""

    async def ask() -> int:
        loads = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=240)
        return sum(load.num_running_requests + load.num_queued_requests for load in loads.cells)

    return await eventually(ask, lambda found: found == count, 60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Start all components but the scheduler."""
    parts = Parts(tmp_path_factory.mktemp("parts"), step_ms=STEP_MS)
    with running(parts, "worker", "detokenizer", "router"):
        yield parts


@pytest.fixture
def parts(shared: Parts, tmp_path: Path) -> Iterator[Parts]:
    """Start a scheduler whose journal and log file are new, in the test's folder."""
    shared.folder, shared.flags = tmp_path, ()
    shared.start("scheduler")
    yield shared
    shared.kill("scheduler")
    shared.hold.unlink(missing_ok=True)


async def test_a_scheduler_with_a_full_disk_yields_to_its_successor(parts: Parts, tmp_path: Path) -> None:
    async with parts.stub() as stub:
        # The limit on the file size must not affect the scheduler's log file, so the journal must be larger than the
        # log file.
        async for _ in stub.Generate(tokens([40_000] * 8000, max_tokens=1), timeout=240):
            pass
        half_way = asyncio.Event()
        parts.hold.touch()
        stream = asyncio.create_task(read(stub, 1000, half_way))
        await half_way.wait()
        process = parts.processes["scheduler"]
        size = _num_journal_bytes(tmp_path)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
        parts.hold.unlink()
        assert await asyncio.to_thread(process.wait, 60) == 1
        parts.start("scheduler")
        received, _ = await stream
    assert received == list(range(1001, 1001 + NUM_TOKENS))
    assert "the journal failed" in parts.log("scheduler")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for one segment of the log, and a part of another."""
    disk = tmp_path / "journal"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m,mode=700", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system, so it cannot fill one up")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_streams_continue_once_the_disk_has_room_for_the_next_segment(
    shared: Parts, small_disk: Path, tmp_path: Path
) -> None:
    """The scheduler exits when the segment cannot be written, and so do its successors until there is room."""
    shared.folder, shared.flags = tmp_path, ("--max-queue-size", "1000")
    shared.start("scheduler")
    async with shared.stub() as stub:
        half_way = asyncio.Event()
        shared.hold.touch()
        streams = [asyncio.create_task(read(stub, first, half_way)) for first in (1000, 2000, 3000)]
        await half_way.wait()
        # The worker pauses, but the scheduler writes all requests that it accepts: 4 MiB.
        more = [asyncio.create_task(_first_of(stub, tokens([40_000] * 8000, max_tokens=1))) for _ in range(220)]
        for _ in range(2):
            assert await asyncio.to_thread(shared.processes["scheduler"].wait, 60) == 1
            shared.start("scheduler")
        remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
        await asyncio.to_thread(subprocess.run, remount, check=True)
        for task in more:
            task.cancel()
        shared.hold.unlink()
        if not shared.is_running("scheduler"):
            shared.start("scheduler")
        results = await asyncio.gather(*streams)
        await asyncio.gather(*more, return_exceptions=True)
    shared.kill("scheduler")
    for first, (received, _) in zip((1000, 2000, 3000), results, strict=True):
        assert received == list(range(first + 1, first + 1 + NUM_TOKENS))
    assert "No space left on device" in shared.log("scheduler")


async def _first_of(stub: Stub, request: GenerateRequest) -> None:
    async for _ in stub.Generate(request, timeout=400):
        return


def _num_journal_bytes(folder: Path) -> int:
    """Return the number of bytes in the current file of the journal."""
    return len((folder / "journal" / "00000001.log").read_bytes().rstrip(b"\0"))


async def test_a_journal_deleted_while_in_use_is_recreated_and_a_successor_continues(
    parts: Parts, tmp_path: Path
) -> None:
    async with parts.stub() as stub:
        half_way = asyncio.Event()
        parts.hold.touch()
        streams = [asyncio.create_task(read(stub, first, half_way)) for first in (1000, 2000)]
        await half_way.wait()
        assert await num_accepted(stub, 2) == 2
        shutil.rmtree(tmp_path / "journal")
        await asyncio.to_thread(parts.wait_for_log, "scheduler", "began a new journal")
        await asyncio.to_thread(parts.kill, "scheduler")
        parts.hold.unlink()
        parts.start("scheduler")
        results = await asyncio.gather(*streams)
    assert [received for received, _ in results] == [
        list(range(first + 1, first + 1 + NUM_TOKENS)) for first in (1000, 2000)
    ]
    assert '"num_unfinished": 2' in parts.log("scheduler")


async def test_a_scheduler_that_was_replaced_ends_without_a_further_write(parts: Parts, tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    async with parts.stub() as stub:
        await read(stub, 1000, asyncio.Event())
        port, worker_port = free_ports(2)
        flags = ["--port", str(port), "--worker-port", str(worker_port)]
        command = python_command("scheduler", *flags, "--journal-path", path)
        successor = await asyncio.to_thread(subprocess.Popen, command, env=environment(), stderr=subprocess.DEVNULL)
        try:
            assert await asyncio.to_thread(parts.processes["scheduler"].wait, 60) == 1
            assert successor.poll() is None
        finally:
            successor.kill()
            successor.wait()
    assert "superseded" in parts.log("scheduler")


def test_a_journal_that_cannot_be_opened_is_named() -> None:
    path = "/proc/nowhere/journal"
    flags = ["--port", "0", "--worker-port", "0", "--journal-path", path]
    command = python_command("scheduler", *flags)
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 1
    assert path in result.stderr
    assert "Traceback" not in result.stderr
