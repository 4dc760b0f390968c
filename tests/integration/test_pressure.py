"""A KV pool that is too small, with a prefix that many requests share, with the real model."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from protos import generation_pb2 as pb
from tests.integration.service import Service, collect, eventually_idle, latest_stats, midstream, stub_of, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 48


def crowd() -> list[pb.GenerateRequest]:
    """Return 8 requests that each fill 64 tokens of cache before they end, so that any two that overlap compete for
    blocks.
    """
    rng = random.Random(8)
    return [tokens([rng.randint(300, 48_999) for _ in range(16)], max_tokens=NUM_TOKENS) for _ in range(8)]


async def outputs(stub: Stub) -> list[list[int]]:
    return [answer.token_ids for answer in await asyncio.gather(*(collect(stub, request) for request in crowd()))]


async def test_a_pool_of_an_eighth_finishes_everything_with_the_same_tokens(service: Service, tmp_path: Path) -> None:
    async with stub_of(service.routers()[0]) as stub:
        unconstrained = await outputs(stub)
    recording = tmp_path / "recording"
    small = Service.start(
        tmp_path / "run",
        MIDSTREAM_CAPACITY_POLICY="max_utilization",
        MIDSTREAM_MAX_KV_TOKENS="64",
        MIDSTREAM_RECORD=str(recording),
    )
    try:
        async with stub_of(small.routers()[0]) as stub:
            assert await outputs(stub) == unconstrained
            stats = await eventually_idle(stub)
        assert stats.kv_cache_stats.max_num_blocks * stats.kv_cache_stats.tokens_per_block == 64
        assert stats.num_preemptions > 0
        assert stats.num_finished_by_reason == {"length": 8}
        assert stats.num_conservation_violations == 0
        shown = midstream("stats", "--json", "--run-dir", str(small.run_dir))
        assert json.loads(shown.stdout)["numFinishedByReason"] == {"length": 8}
    finally:
        small.stop()
    replayed = midstream("replay", str(recording))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all as recorded" in replayed.stdout


async def test_64_requests_behind_one_prefix_compute_it_once_per_worker(service: Service) -> None:
    rng = random.Random(512)
    prefix = [rng.randint(300, 48_999) for _ in range(512)]
    requests = [tokens([*prefix, 300 + number], max_tokens=1) for number in range(64)]
    num_workers = len(service.processes("gpu_worker"))
    async with stub_of(service.routers()[0]) as stub:
        before = (await latest_stats(stub)).kv_cache_stats
        answers = await asyncio.gather(*(collect(stub, request) for request in requests))
        after = (await eventually_idle(stub)).kv_cache_stats
    # If blocks of a prompt are not in the cache, another request is computing them.
    assert after.missed_blocks - before.missed_blocks <= num_workers * 512 // after.tokens_per_block
    assert sum(answer.final.usage.cached_tokens == 512 for answer in answers) >= 64 - num_workers
