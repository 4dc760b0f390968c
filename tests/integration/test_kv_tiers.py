"""KV blocks on disk are found again after a restart of the whole service, and give the same tokens."""

from __future__ import annotations

import random
import re
import urllib.request
from functools import partial
from pathlib import Path

from tests.integration.service import Service, collect, eventually, stub_of, tokens

TOKENS_PER_BLOCK = 16


def metric(service: Service, name: str) -> float:
    """Return a metric, summed over all tiers and workers."""
    total = 0.0
    for worker in service.processes("gpu_worker"):
        with urllib.request.urlopen(f"http://{worker['addresses']['http']}/metrics", timeout=240) as answer:
            total += sum(
                map(float, re.findall(rf"^midstream:{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.M))
            )
    return total


async def num_stored(service: Service) -> float:
    return metric(service, "worker_kv_tier_blocks")


async def test_a_restart_of_everything_recomputes_nothing_that_was_stored(tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randint(300, 48_000) for _ in range(size)] for size in (200, 110, 49)]
    num_blocks = sum((len(prompt) - 1) // TOKENS_PER_BLOCK for prompt in prompts)
    settings = {"MIDSTREAM_DISK_KV_FOLDER": str(tmp_path / "kv")}
    answers = []
    for turn in range(2):
        service = Service.start(tmp_path / f"run{turn}", "--workers", "1", **settings)
        try:
            async with stub_of(service.routers()[0]) as stub:
                answers.append([(await collect(stub, tokens(prompt, max_tokens=8))).token_ids for prompt in prompts])
            hits = metric(service, "worker_kv_tier_hits_total")
            if turn == 0:
                assert hits == 0

                stored = await eventually(partial(num_stored, service), lambda found: found >= num_blocks, 60)
                assert stored >= num_blocks
            else:
                assert hits >= 0.95 * num_blocks
                assert metric(service, "worker_kv_tier_damaged_total") == 0
                assert metric(service, "worker_kv_saved_seconds_total") > 0
        finally:
            service.stop()
    assert answers[0] == answers[1]
