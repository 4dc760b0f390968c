"""Prompts on one worker and generation on another: the same tokens as with both on each, whoever dies when.

Fifty kills of a prefill worker in the middle of transfers, in half an hour:
TEST_ALL_KILLS=1 pytest -o faulthandler_timeout=0 tests/integration/test_roles.py
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service import Service, collect, eventually, stub_of, tokens

NUM_KILLS = 50 if os.environ.get("TEST_ALL_KILLS") else 2
RNG = random.Random(8)
PROMPTS = [[RNG.randint(300, 48_000) for _ in range(size)] for size in (700, 40, 330, 12)]


def metrics(worker: dict[str, Any]) -> dict[str, float]:
    """A worker's metrics without labels; empty while it does not serve."""
    try:
        with urllib.request.urlopen(f"http://{worker['addresses']['http']}/metrics", timeout=10) as answer:
            return {
                name: float(value)
                for name, value in re.findall(r"^midstream:(\w+) (\S+)$", answer.read().decode(), re.M)
            }
    except OSError:
        return {}


async def answers(service: Service, prompts: list[list[int]]) -> list[list[int]]:
    async with stub_of(service.routers()[0]) as stub:
        requests = [collect(stub, tokens(prompt, max_tokens=32)) for prompt in prompts]
        return [result.token_ids for result in await asyncio.gather(*requests)]


@pytest.mark.timeout(3600 if NUM_KILLS > 2 else 400)
async def test_roles_apart_and_together_give_the_same_tokens_and_a_death_in_a_transfer_changes_none(
    tmp_path: Path,
) -> None:
    service = Service.start(tmp_path / "together", "--workers", "1")
    try:
        expected = await answers(service, PROMPTS)
    finally:
        service.stop()
    service = Service.start(tmp_path / "apart", "--workers", "2", "--prefill-workers", "1")
    try:
        assert await answers(service, PROMPTS) == expected
        decode = next(worker for worker in service.processes("gpu_worker") if worker["name"] == "worker-1")
        assert metrics(decode)["worker_kv_fetched_blocks"] >= 43 + 2 + 20
        for number in range(NUM_KILLS):
            await _kill_in_a_transfer(service, decode, number, expected)
    finally:
        service.stop()


async def _kill_in_a_transfer(service: Service, decode: dict[str, Any], number: int, expected: list[list[int]]) -> None:
    """Kill the prefill worker while its blocks are fetched, at another moment each time."""

    async def prefill() -> dict[str, Any]:
        return next(worker for worker in service.processes("gpu_worker") if worker["name"] == "worker-0")

    async def num_fetched() -> float:
        return metrics(decode)["worker_kv_fetched_blocks"]

    worker = await eventually(prefill, lambda worker: metrics(worker).get("worker_registrations_total") == 1, 60)
    wanted = await num_fetched() + 1 + number % 8 * 5
    running = asyncio.create_task(answers(service, [[number + 300, *PROMPTS[0]], *PROMPTS]))
    assert await eventually(num_fetched, lambda count: count >= wanted or running.done(), 60) >= wanted
    os.kill(worker["pid"], signal.SIGKILL)
    assert (await running)[1:] == expected
