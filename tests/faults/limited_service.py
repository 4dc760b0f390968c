"""Runs the components with low limits, and reads their metrics."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protos import generation_pb2 as pb
from tests.integration.parts import Parts, running
from tests.integration.service import tokens
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

MAX_BATCH_SIZE, MAX_QUEUE_SIZE = 8, 16
STEP_MS = 2.0
LIMITS = {"MAX_PENDING_BYTES": 16384, "MAX_MESSAGE_BYTES": 4 << 20}


class LimitedService:
    """The running components.

    Attributes:
        parts: The processes of the components.
    """

    def __init__(self, folder: Path, http_port: int) -> None:
        self._http_port = http_port
        flags = ("--max-batch-size", str(MAX_BATCH_SIZE), "--max-queue-size", str(MAX_QUEUE_SIZE), "--journal", "off")
        self.parts = Parts(folder, *flags, "--http-port", str(http_port), step_ms=STEP_MS)

    def metric(self, name: str) -> float:
        """Return a metric of the scheduler."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/metrics", timeout=240) as response:
            text = response.read().decode()
        found = re.search(rf"^midstream:{name} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def resident_bytes(self, name: str) -> int:
        """Return the resident memory of a process in bytes."""
        status = Path(f"/proc/{self.parts.processes[name].pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert found
        return int(found[1]) << 10


@contextlib.contextmanager
def running_limited(folder: Path) -> Iterator[LimitedService]:
    """Start all components; kill them on exit."""
    (http_port,) = free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIMITS.items():
            patch.setenv(f"MIDSTREAM_{name}", str(value))
        limited = LimitedService(folder, http_port)
        with running(limited.parts):
            yield limited


@dataclass
class Reading:
    """A stream that was read to its end."""

    began: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    @property
    def took_s(self) -> float:
        """Seconds from the request to its last token."""
        return self.arrivals[-1] - self.began

    @property
    def pace(self) -> float:
        """Mean seconds per token; not the median, since tokens arrive in groups and most gaps may be 0."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


async def read(stub: Stub, first: int, num_tokens: int) -> Reading:
    """Read a stream of the fake worker, whose tokens count up from `first`; check that it is complete and in order."""
    reading = Reading(time.monotonic())
    async for response in stub.Generate(request(first, num_tokens), timeout=400):
        assert response.token_offset == len(reading.token_ids)
        reading.token_ids += response.token_ids
        reading.arrivals += [time.monotonic()] * len(response.token_ids)
    assert reading.token_ids == list(range(first + 1, first + 1 + num_tokens))
    return reading


def request(first: int, num_tokens: int, prompt: Sequence[int] = ()) -> pb.GenerateRequest:
    return tokens([*prompt, first], max_tokens=num_tokens)
