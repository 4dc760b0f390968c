"""Routers send the metrics that OpenTelemetry defines for generative AI servers to a collector."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.client import AsyncClient, Result
from midstream.config import RouterConfig
from midstream.errors import ExecutionError
from protos import generation_pb2 as pb
from router.pipeline.gen_ai_metrics import GenAiMetrics
from tests.integration.collector import Collector
from tests.router.client_streams import PROMPT
from tests.router.conftest import Cluster

ERROR = pb.ErrorInfo(code=13, message="the worker is broken")
NAMES = ("request.duration", "time_to_first_token", "time_per_output_token")


async def ask(cluster: Cluster, client: AsyncClient, num_tokens: int, **fields: Any) -> Result:
    """Run a request whose tokens arrive one at a time; if `num_tokens` is 0, it fails."""
    stream = client.generate(**fields)
    collecting = asyncio.create_task(stream.result())
    await cluster.scheduler.until(lambda: stream.request_id in cluster.scheduler.requests)
    if not num_tokens:
        cluster.scheduler.end(stream.request_id, pb.FINISH_REASON_ERROR, error=ERROR)
        return await collecting
    for number in range(num_tokens):
        cluster.scheduler.emit(stream.request_id, [20 + number])
        await asyncio.sleep(0.01)
    cluster.scheduler.end(stream.request_id)
    return await collecting


async def test_requests_are_measured_by_operation_and_error(cluster: Cluster) -> None:
    collector = Collector()
    gen_ai = GenAiMetrics.from_config(RouterConfig(otlp_endpoint=collector.endpoint), "smollm2")
    router = await cluster.add_router(await cluster.add_detokenizer(), gen_ai=gen_ai)
    async with AsyncClient(router.address) as client:
        await ask(cluster, client, 3, token_ids=PROMPT)
        await ask(cluster, client, 1, messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(ExecutionError):
            await ask(cluster, client, 0, token_ids=PROMPT)
        # Reading the output again is not another request.
        await client.resume(next(iter(cluster.scheduler.requests))).result()
        embedding = asyncio.create_task(client.embed("hello"))
        await cluster.scheduler.until(lambda: len(cluster.scheduler.requests) == 4)
        cluster.scheduler.end([*cluster.scheduler.requests][-1], pb.FINISH_REASON_ERROR, error=ERROR)
        with pytest.raises(ExecutionError):
            await embedding
    await asyncio.to_thread(gen_ai.close)  # type: ignore[union-attr]
    collector.stop()
    found = {
        name: {
            (item.attributes["gen_ai.operation.name"], item.attributes.get("error.type")): item
            for item in collector.metrics.histograms[f"gen_ai.server.{name}"]
        }
        for name in NAMES
    }
    text, chat = ("text_completion", None), ("chat", None)
    failed = {("text_completion", "error"), ("embeddings", "error")}
    assert {name: set(items) for name, items in found.items()} == {
        "request.duration": {text, chat} | failed,
        "time_to_first_token": {text, chat},
        "time_per_output_token": {text},
    }
    assert all(item.count == 1 for items in found.values() for item in items.values())
    duration, first, per_token = (found[name][text].sum for name in NAMES)
    assert duration == pytest.approx(first + 2 * per_token, abs=0.05)
    attributes = {"gen_ai.provider.name": "midstream", "gen_ai.request.model": "smollm2"}
    assert all(attributes.items() <= item.attributes.items() for items in found.values() for item in items.values())


def test_without_a_collector_or_its_consent_there_are_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GenAiMetrics.from_config(RouterConfig(), "m") is None
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert GenAiMetrics.from_config(RouterConfig(otlp_endpoint="http://localhost:4317"), "m") is None
