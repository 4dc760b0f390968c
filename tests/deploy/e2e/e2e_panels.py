"""Every panel of the dashboards has data in a service with prefill and decode workers, KV tiers and tenants. Run by
`make e2e-panels`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
from pathlib import Path

import pytest

from midstream.client import AsyncClient, SamplingParams
from midstream.errors import OverloadedError
from tests.deploy.e2e.prometheus import Prometheus, Target, panel_expressions
from tests.integration.service import Service

KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}
PARTS = ("router", "scheduler", "gpu_worker", "detokenizer")


@pytest.mark.timeout(400)
async def test_every_panel_has_data_with_tiers_roles_and_tenants(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{KEYS['alice']} alice\n{KEYS['bob']} bob requests_per_minute=1\n")
    settings = {
        "MIDSTREAM_AUTH": "token",
        "MIDSTREAM_AUTH_TOKENS": str(tmp_path / "tokens"),
        "MIDSTREAM_ANONYMOUS_ROLES": "observe",
        "MIDSTREAM_HOST_KV_BYTES": str(64 << 20),
        "MIDSTREAM_DISK_KV_FOLDER": str(tmp_path / "kv"),
        "MIDSTREAM_MAX_KV_TOKENS": "1024",
    }
    service = Service.start(tmp_path / "run", "--workers", "2", "--prefill-workers", "1", **settings)
    try:
        targets = [
            Target(process["addresses"]["http"], part, process["name"])
            for part in PARTS
            for process in service.processes(part)
        ]
        with Prometheus(targets, tmp_path) as prometheus:
            # A quota's first sample is not an increase, so there is one before and one after a scrape.
            for seed in range(2):
                await load(service.routers(), seed)
            found = {(title, text): prometheus.query(text) for title, text in panel_expressions()}
    finally:
        service.stop()
    assert [at for at, samples in found.items() if not samples] == []
    assert [at for at, samples in found.items() if any(map(math.isnan, samples.values()))] == []
    assert len(found) > 60
    # These would be zero, with data all the same, without what the service is started with.
    for metric in (
        "tier_hits_total",
        "fetched_blocks_total",
        "tier_written_bytes_total",
        "client_refused_requests_total",
    ):
        sums = [sum(samples.values()) for (_, text), samples in found.items() if re.search(rf"{metric}\b", text)]
        assert min(sums) > 0, metric


async def load(routers: list[str], seed: int) -> None:
    """Fill the KV pool with one prompt after another, and ask for the first of them again."""
    rng = random.Random(seed)
    prompts = [[rng.randint(300, 48_000) for _ in range(400)] for _ in range(6)]
    sampling = SamplingParams(max_tokens=8)
    # What is refused is scraped before the load ends.
    async with AsyncClient(routers, token=KEYS["bob"]) as client:
        for _ in range(2):
            with contextlib.suppress(OverloadedError):
                await client.generate("Hi", sampling=sampling, timeout_s=5).result()
    async with AsyncClient(routers, token=KEYS["alice"]) as client:
        for prompt in [*prompts, *prompts[:3]]:
            await client.generate(token_ids=prompt, sampling=sampling).result()
        await asyncio.gather(*(client.generate("Hi", sampling=sampling).result() for _ in range(8)))
