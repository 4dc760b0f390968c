"""The wall clock of each component jumps under load, which changes nothing except timestamps.

The components are real processes, with a worker without a model. Deadlines are checked against the times that the
scheduler records, since this process may observe them late on a loaded machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from scheduler.replay.recording import read_recording
from tests.integration.named_processes import ROOT
from tests.integration.parts import Parts, running
from tests.integration.service import tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

PARTS = ("scheduler", "worker", "detokenizer", "router")
JUMPS_S = (3, -3, 30, -30, 3600, -3600)
BETWEEN_S = 0.25
NUM_TOKENS = 60
DEADLINE_S, MAX_TOKENS = 1.5, 3000
TOLERANCE_S = 0.1
TIMEOUTS = ("--worker-timeout-ms", "60000", "--worker-progress-timeout-ms", "60000")

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


class ShiftedParts(Parts):
    """Processes whose wall clocks are shifted one at a time."""

    def __init__(self, folder: Path) -> None:
        self.recording = folder / "recording"
        super().__init__(folder, *TIMEOUTS, "--record", str(self.recording))
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


async def time_out(stub: Stub, stop: asyncio.Event) -> list[float]:
    """Run requests that time out halfway; return the times at which they were sent, by the monotonic clock."""
    sent = []
    while not stop.is_set():
        sent.append(time.monotonic())
        request = tokens([5000], max_tokens=MAX_TOKENS, timeout_ms=int(DEADLINE_S * 1000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request, timeout=60):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() > sent[-1] + DEADLINE_S - TOLERANCE_S
    return sent


@dataclass
class Deadline:
    """The scheduler's record of a request with a deadline; times are in seconds of the monotonic clock.

    Attributes:
        submitted: Time at which the scheduler got the request.
        deadline: The request's deadline.
        before_end: Time of the last turn before the request's end; a turn ends all requests that are past their
            deadlines.
        ended: Time at which the scheduler ended it.
    """

    submitted: float
    deadline: float
    before_end: float = 0.0
    ended: float = 0.0


def recorded_deadlines(path: Path) -> list[Deadline]:
    """Return the recorded deadlines of the requests that `time_out` sent."""
    offset_ns = time.time_ns() - time.monotonic_ns()  # the scheduler's clock started at the unshifted wall time
    found: dict[str, Deadline] = {}
    before = 0.0
    for record in read_recording(path):
        now = (record.time_ns - offset_ns) / 1e9
        if record.HasField("submitted") and record.submitted.max_tokens == MAX_TOKENS:
            found[record.submitted.request_id] = Deadline(now, (record.submitted.deadline_ns - offset_ns) / 1e9)
        for end in record.ends:
            if end.request_id in found:
                found[end.request_id].before_end, found[end.request_id].ended = before, now
        if record.turn:
            before = now
    return list(found.values())


@pytest.mark.timeout(300)
async def test_jumps_of_each_parts_clock_harm_no_request(tmp_path: Path) -> None:
    with running(ShiftedParts(tmp_path)) as parts:
        assert isinstance(parts, ShiftedParts)
        async with parts.stub() as stub:
            stop = asyncio.Event()
            streams = [asyncio.create_task(one_after_the_other(stub, 1000 * i, stop)) for i in range(1, 5)]
            timing_out = asyncio.create_task(time_out(stub, stop))
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
            sent = await timing_out
        log = parts.log("scheduler")
        parts.send("scheduler", signal.SIGTERM)  # so that it writes the rest of its recording
        assert parts.processes["scheduler"].wait(60) == 0
    assert all(count >= 2 for count in counts)
    deadlines = recorded_deadlines(parts.recording)
    late = [each.ended - each.deadline for each in deadlines]
    print(f"{sum(counts)} requests, {len(late)} deadlines, off by {min(late):+.3f} to {max(late):+.3f} s")
    for began, each in zip(sent, deadlines, strict=True):
        # The router and the scheduler use the same deadline as the client.
        assert began - TOLERANCE_S < each.deadline - DEADLINE_S < each.submitted + TOLERANCE_S
        # The first turn after the deadline ended the request. A loaded machine may have delayed that turn.
        assert each.before_end - TOLERANCE_S < each.deadline < each.ended + TOLERANCE_S
    assert "ended the epoch of a worker group" not in log
    assert "lost the connection of a worker" not in log
    assert {name: parts.processes[name].pid for name in PARTS} == pids
