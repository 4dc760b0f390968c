"""The wall clock of each component jumps under load, which changes nothing except timestamps.

The components are real processes, with a worker without a model.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from tests.integration.named_processes import ROOT
from tests.integration.parts import Parts, running
from tests.integration.service import tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

PARTS = ("scheduler", "worker", "detokenizer", "router")
JUMPS_S = (3, -3, 30, -30, 3600, -3600)
BETWEEN_S = 0.25
NUM_TOKENS = 60
DEADLINE_S = 1.5
# The machine may stall for seconds. If a jump moved a deadline, some deadline would also expire too early.
TOLERANCE_S = 20
TIMEOUTS = ("--worker-timeout-ms", "60000", "--worker-progress-timeout-ms", "60000")

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


class ShiftedParts(Parts):
    """Processes whose wall clocks are shifted one at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, *TIMEOUTS)
        self._library = folder / "shifted_clock.so"
        source = Path(__file__).with_name("shifted_clock.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"], check=True)

    def launch(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        self.shift(name, 0)
        environment = os.environ | {"LD_PRELOAD": str(self._library), "SHIFT_FILE": str(self._shift_file(name))}
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *words]
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        return self.processes[name]

    def shift(self, name: str, seconds: int) -> None:
        """Set the clock offset of a process, in seconds."""
        with os.fdopen(os.open(self._shift_file(name), os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.write(struct.pack("=q", seconds * 1_000_000_000))

    def _shift_file(self, name: str) -> Path:
        return self.folder / f"{name}.shift"


async def one_after_the_other(stub: Stub, first: int, stop: asyncio.Event) -> int:
    """Send requests one after another and check their tokens; return the number of completed requests."""
    for count in itertools.count():
        if stop.is_set():
            return count
        received: list[int] = []
        async for response in stub.Generate(tokens([first], max_tokens=NUM_TOKENS, timeout_ms=25_000), timeout=60):
            received += response.token_ids
        assert received == list(range(first + 1, first + 1 + NUM_TOKENS))
    raise AssertionError("unreachable")


async def deadlines(stub: Stub, stop: asyncio.Event) -> AsyncIterator[float]:
    """Run requests that time out halfway; yield by how many seconds each deadline was off."""
    while not stop.is_set():
        began = time.monotonic()
        request = tokens([5000], max_tokens=3000, timeout_ms=int(DEADLINE_S * 1000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request, timeout=60):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        yield time.monotonic() - began - DEADLINE_S


@pytest.mark.timeout(300)
async def test_jumps_of_each_parts_clock_harm_no_request(tmp_path: Path) -> None:
    with running(ShiftedParts(tmp_path)) as parts:
        assert isinstance(parts, ShiftedParts)
        async with parts.stub() as stub:
            stop = asyncio.Event()
            streams = [asyncio.create_task(one_after_the_other(stub, 1000 * i, stop)) for i in range(1, 5)]

            async def measure() -> list[float]:
                return [late async for late in deadlines(stub, stop)]

            measuring = asyncio.create_task(measure())
            await asyncio.sleep(1)
            pids = {name: parts.processes[name].pid for name in PARTS}
            for name in PARTS:
                for jump_s in JUMPS_S:
                    parts.shift(name, jump_s)
                    await asyncio.sleep(BETWEEN_S)
                parts.shift(name, 0)
            await asyncio.sleep(1)
            stop.set()
            counts = await asyncio.gather(*streams)
            late = await measuring
    assert all(count >= 2 for count in counts)
    print(f"{sum(counts)} requests, {len(late)} deadlines, off by {min(late):+.3f} to {max(late):+.3f} s")
    assert all(-0.05 < each < TOLERANCE_S for each in late), late
    assert "ended the epoch of a worker group" not in parts.log("scheduler")
    assert "lost the connection of a worker" not in parts.log("scheduler")
    assert {name: parts.processes[name].pid for name in PARTS} == pids
