"""The tokens that a router counts, in its metric and in its log, while answers are computed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from detokenizer.servicer import DetokenizerServicer
from router.pipeline.generation import FrontDoor
from router.pipeline.metrics import RouterMetrics, log_throughput
from tests.router.client_streams import OpenClient, collect
from tests.router.conftest import Cluster, Part


def metrics_of(router: Part) -> RouterMetrics:
    assert isinstance(router.servicer, FrontDoor)
    return router.servicer._metrics


def report(detokenizer: Part) -> None:
    assert isinstance(detokenizer.servicer, DetokenizerServicer)
    detokenizer.servicer.report_progress()


async def test_answers_without_streaming_are_counted_as_they_are_computed(
    cluster: Cluster, open_client: OpenClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.pipeline.metrics")
    first = await cluster.add_detokenizer("first")
    second = await cluster.add_detokenizer("second")
    router = await cluster.add_router(first, second)
    metrics, scheduler = metrics_of(router), cluster.scheduler
    logging_task = asyncio.create_task(log_throughput([metrics], lambda: 1, 0.01))
    collecting = asyncio.create_task(collect(open_client(router), request_id="r", streaming=False))
    await scheduler.until(lambda: any(feed.attached for feed in scheduler.feeds))

    async def until_counted(num_tokens: int) -> None:
        """Report until the router has counted the tokens, since the detokenizer may not have received them yet."""

        def is_counted() -> bool:
            for part in (first, second):
                report(part)
            return metrics.num_tokens >= num_tokens

        await scheduler.until(is_counted)
        assert metrics.num_tokens == num_tokens

    scheduler.emit("r", [20, 21, 22])
    await until_counted(3)
    await scheduler.until(lambda: any(not text.startswith("0.0 tokens/s") for text in caplog.messages))
    used = first if first.servicer.num_attached else second  # type: ignore[attr-defined]
    await used.kill()
    await scheduler.until(lambda: any(feed.attached for feed in scheduler.feeds))
    scheduler.emit("r", [23, 24])
    # The other detokenizer gets all five tokens.
    await until_counted(5)
    scheduler.emit("r", [25])
    scheduler.end("r")
    result, _ = await collecting
    assert list(result.token_ids) == [20, 21, 22, 23, 24, 25]
    assert metrics.num_tokens == 6
    logging_task.cancel()
