"""Workers whose machines are taken away, under load: streams continue on other workers, and lose nothing.

With TEST_ALL_DRAINS=1 there are many notices, in a model with longer steps, and the times are checked as well; they are
only meaningful on a machine without other load.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.faults.small_model import make_small_model
from tests.integration.service import eventually
from tests.integration.test_kinds import Cell, Stream, run
from tests.ports import free_ports

IS_LONG = bool(os.environ.get("TEST_ALL_DRAINS"))
NUM_NOTICES = 40 if IS_LONG else 4
NUM_STREAMS = 16 if IS_LONG else 6
NUM_TOKENS = 100 if IS_LONG else 400
WORKERS = ("worker-0", "worker-1")


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    if IS_LONG:
        model = open_model_folder("smollm2").path
    else:
        model = tmp_path / "model"
        model.mkdir()
        make_small_model(model)
    cell = Cell(tmp_path, model)
    try:
        for name, port in zip(("metrics", *WORKERS), free_ports(1 + len(WORKERS)), strict=True):
            cell.ports[name] = port
        cell.start("scheduler", "--http-port", str(cell.ports["metrics"]))
        cell.start("detokenizer")
        cell.start("router")
        yield cell
    finally:
        cell.close()


def start(cell: Cell, name: str) -> None:
    """Start a worker, whose notice is the file NAME.notice."""
    notice_of(cell, name).unlink(missing_ok=True)
    flags = ("--shared-kv-folder", str(cell.folder / "kv"), "--http-port", str(cell.ports[name]))
    cell.start(name, *flags, "--notice-file", str(notice_of(cell, name)), "--hash-bytes-per-s", "0")


def notice_of(cell: Cell, name: str) -> Path:
    return cell.folder / f"{name}.notice"


def request_of(number: int, prefix: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"{prefix}-{number}",
        token_ids=pb.TokenIds(values=range(300 + number, 340 + number)),
        max_tokens=NUM_TOKENS,
        sampling=pb.SamplingConfig(temperature=0.9 if number % 2 else 0.0, seed=number),
        stopping=pb.StoppingConfig(ignore_eos=True),
    )


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"midstream:{name} "))


def left_at(cell: Cell, name: str) -> float:
    """Return when the worker last left, in seconds since the epoch."""
    messages = (json.loads(line) for line in cell.log(name).splitlines() if line.startswith("{"))
    times = [message["time"] for message in messages if message["message"] == "left"]
    return datetime.fromisoformat(times[-1]).timestamp()


async def half_way(streams: list[Stream]) -> None:
    """Wait until every stream has some full KV blocks."""

    async def least() -> int:
        return min(len(stream.tokens) for stream in streams)

    await eventually(least, lambda num_tokens: num_tokens >= 40, 240)


async def take_away(cell: Cell, name: str, *, by_signal: bool) -> tuple[float, float]:
    """Give notice to a worker; return the seconds until it has handed over, and until it has ended."""
    started = time.time()
    if by_signal:
        cell.send(name, signal.SIGTERM)
    else:
        notice_of(cell, name).touch()
    code = await asyncio.to_thread(cell.processes[name].wait, 240)
    ended = time.time()
    assert code == 0, cell.log(name)
    return left_at(cell, name) - started, ended - started


@pytest.mark.timeout(3600 if IS_LONG else 400)
async def test_streams_continue_while_machines_are_taken_away(cell: Cell) -> None:
    for name in WORKERS:
        start(cell, name)
    await cell.wait_for_workers(*WORKERS)
    times: list[tuple[float, float]] = []
    async with cell.stub() as stub:
        numbers = range(NUM_STREAMS)
        expected = [stream.tokens for stream in await run(stub, [request_of(number, "quiet") for number in numbers])]
        num_adopted = 0.0
        for notice in range(NUM_NOTICES):
            streams = [Stream() for _ in numbers]
            reading = [
                asyncio.create_task(stream.read(stub, request_of(number, f"spot{notice}")))
                for number, stream in enumerate(streams)
            ]
            await half_way(streams)
            name = WORKERS[notice % 2]
            times.append(await take_away(cell, name, by_signal=notice % 4 < 2))
            start(cell, name)
            await asyncio.gather(*reading)
            assert [stream.tokens for stream in streams] == expected
            (other,) = set(WORKERS) - {name}
            num_adopted += metric(cell.ports[other], "worker_blocks_adopted_total")
            await eventually(cell.groups, lambda found: set(found) == set(WORKERS), 60)
    assert num_adopted > 0
    assert metric(cell.ports["metrics"], "num_worker_deaths_total") == 0
    handed_over, ended = (sorted(column) for column in zip(*times, strict=True))
    print(f"handed over after {handed_over[len(times) // 2] * 1e3:.0f} ms (most {handed_over[-1] * 1e3:.0f} ms), ")
    print(f"ended after {ended[len(times) // 2] * 1e3:.0f} ms (most {ended[-1] * 1e3:.0f} ms)")
    if IS_LONG:
        assert handed_over[-1] <= 0.1
        assert ended[-1] <= 1
