"""A request without max_tokens that asks for logits gets as many tokens as its tensors may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from midstream.client import AsyncClient, SamplingParams
from tests.router.conftest import Cluster

VOCAB, LIMIT = 49152, 256 << 20


async def test_the_default_length_fits_the_tensors(cluster: Cluster, open_client: Callable[..., AsyncClient]) -> None:
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    wanted = {"logits": SamplingParams(return_generation_logits=True), "plain": SamplingParams()}
    for request_id, sampling in wanted.items():
        running = asyncio.create_task(client.generate("Hi", request_id=request_id, sampling=sampling).result())
        await cluster.scheduler.until(lambda name=request_id: name in cluster.scheduler.requests)
        cluster.scheduler.end(request_id)
        await running
    lengths = {name: script.request.max_tokens for name, script in cluster.scheduler.requests.items()}
    assert lengths["logits"] == LIMIT // (VOCAB * 4)
    assert lengths["plain"] > 4 * lengths["logits"]
