"""With prefill on one worker and decode on another, the tokens are the same as with combined workers, whichever worker
is killed.

Fifty kills of a prefill worker during transfers take half an hour, and the check of the longest pauses needs an idle
machine: TEST_KILLS=50 pytest -s -o faulthandler_timeout=0 tests/integration/test_roles.py
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.service import Service, eventually, stub_of, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub

NUM_KILLS = int(os.environ.get("TEST_KILLS", "2"))
# Maximum cost of a kill in seconds, in addition to recomputing what was lost.
MAX_PAUSE_S = 0.5
RNG = random.Random(8)
# For a kill during a transfer, several blocks per prompt are enough; tests/faults/test_kill_at_every_step.py kills at
# more moments.
SIZES = (700, 40, 330, 12) if NUM_KILLS > 2 else (200, 40, 100, 12)
PROMPTS = [[RNG.randint(300, 48_000) for _ in range(size)] for size in SIZES]
NUM_TOKENS = 32 if NUM_KILLS > 2 else 16


def metrics(worker: dict[str, Any]) -> dict[str, float]:
    """Return those metrics of a worker that have no labels; empty if the worker is not ready."""
    try:
        with urllib.request.urlopen(f"http://{worker['addresses']['http']}/metrics", timeout=240) as answer:
            return {
                name: float(value)
                for name, value in re.findall(r"^midstream:(\w+) (\S+)$", answer.read().decode(), re.M)
            }
    except OSError:
        return {}


class Timed:
    """The tokens of one stream, with their arrival times; the stream starts at `begun_s`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.begun_s = time.monotonic()

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.begun_s

    @property
    def pauses_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]

    async def read(self, stub: MidstreamAsyncStub, prompt: list[int]) -> Timed:
        async for response in stub.Generate(tokens(prompt, max_tokens=NUM_TOKENS), timeout=400):
            assert response.token_offset == len(self.tokens)
            self.tokens += response.token_ids
            self.times_s += [time.monotonic()] * len(response.token_ids)
        return self


async def answers(service: Service, prompts: list[list[int]]) -> list[Timed]:
    async with stub_of(service.routers()[0]) as stub:
        return await asyncio.gather(*(Timed().read(stub, prompt) for prompt in prompts))


def tokens_of(streams: list[Timed]) -> list[list[int]]:
    return [stream.tokens for stream in streams]


@pytest.mark.timeout(3600 if NUM_KILLS > 2 else 400)
async def test_separate_roles_give_the_same_tokens_even_after_a_death_during_transfer(
    service: Service, tmp_path: Path
) -> None:
    expected = tokens_of(await answers(service, PROMPTS))
    service = Service.start(tmp_path / "apart", "--workers", "2", "--prefill-workers", "1")
    try:
        first = await answers(service, PROMPTS)
        assert tokens_of(first) == expected
        decode = next(worker for worker in service.processes("gpu_worker") if worker["name"] == "worker-1")
        assert metrics(decode)["worker_kv_fetched_blocks_total"] >= sum((size - 1) // 16 for size in SIZES)
        pauses: list[float] = []
        for number in range(NUM_KILLS):
            streams = await _kill_in_a_transfer(service, decode, number)
            assert tokens_of(streams)[1:] == expected
            pauses += [pause for stream in streams for pause in stream.pauses_s]
        # The decode worker recomputes what was lost, which is at most all prompts.
        limit, found = MAX_PAUSE_S + max(stream.first_s for stream in first), sorted(pauses)[len(pauses) * 99 // 100]
        print(f"{NUM_KILLS} kills; p99 of {len(pauses)} pauses: {found:.2f} s, limit {limit:.2f} s")
        assert found <= limit or NUM_KILLS < 50
    finally:
        service.stop()


async def _kill_in_a_transfer(service: Service, decode: dict[str, Any], number: int) -> list[Timed]:
    """Kill the prefill worker while its blocks are being fetched, at a different moment in each call."""

    async def prefill() -> dict[str, Any]:
        return next(worker for worker in service.processes("gpu_worker") if worker["name"] == "worker-0")

    async def num_fetched() -> float:
        return metrics(decode)["worker_kv_fetched_blocks_total"]

    worker = await eventually(prefill, lambda worker: metrics(worker).get("worker_registrations_total") == 1, 60)
    end, attempt = time.monotonic() + 150, 0
    while time.monotonic() < end:
        attempt += 1
        wanted = await num_fetched() + 1 + number % 8 * 5
        new = [300 + (number + 1000 * attempt) % 48_000, *PROMPTS[0]]
        running = asyncio.create_task(answers(service, [new, *PROMPTS]))
        if await eventually(num_fetched, lambda count: count >= wanted or running.done(), 60) >= wanted:  # noqa: B023
            os.kill(worker["pid"], signal.SIGKILL)
            return await running
        # After many deaths of the prefill worker, the scheduler uses only the decode worker for up to a minute.
        await running
    raise AssertionError("no blocks were transferred")
