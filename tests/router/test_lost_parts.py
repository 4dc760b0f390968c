"""Detokenizers, routers and schedulers that disappear in the middle of a stream, over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from midstream import errors
from midstream.client import Result
from midstream.model.tokenizer import Tokenizer
from tests.router.client_streams import PROMPT, OpenClient, collect
from tests.router.conftest import Cluster


async def test_a_lost_detokenizer_changes_nothing(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    detokenizers = [await cluster.add_detokenizer(f"d{i}") for i in range(2)]
    router = await cluster.add_router(*detokenizers)
    text = "emoji 👩‍👩‍👧‍👦 and 日本語 in one line"
    ids = tokenizer.encode(text)
    for cut in range(0, len(ids), 3):
        request_id = f"r{cut}"
        collecting = asyncio.create_task(collect(open_client(router), request_id=request_id))
        await cluster.scheduler.until(lambda request_id=request_id: request_id in cluster.scheduler.requests)
        cluster.scheduler.emit(request_id, ids[:cut])
        await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
        serving = next(part for part in detokenizers if part.servicer.num_attached)  # type: ignore[attr-defined]
        await serving.kill()
        detokenizers.remove(serving)
        cluster.scheduler.emit(request_id, ids[cut:])
        cluster.scheduler.end(request_id)
        result, _ = await collecting
        assert (result.text, result.token_ids) == (text, ids)
        detokenizers.append(await cluster.add_detokenizer("again"))
        router = await cluster.add_router(*detokenizers)


async def test_a_lost_router_changes_nothing(cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer) -> None:
    detokenizer = await cluster.add_detokenizer()
    routers = [await cluster.add_router(detokenizer) for _ in range(2)]
    ids = tokenizer.encode("What was lost is found 🫠 again.")
    stream = open_client(*routers).generate(token_ids=PROMPT, request_id="r")
    reading = asyncio.create_task(anext(stream))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", ids[:8])
    result = Result("r")
    result.add(await reading)
    busy = next(r for r in routers if r.servicer.runner.pool.links[detokenizer.address].streams)  # type: ignore[attr-defined]
    await busy.kill()
    cluster.scheduler.emit("r", ids[8:10])
    cluster.scheduler.emit("r", ids[10:])
    cluster.scheduler.end("r")
    async for chunk in stream:
        result.add(chunk)
    assert stream.num_resumes >= 1
    assert (result.text, result.token_ids) == ("What was lost is found 🫠 again.", ids)
    assert cluster.scheduler.aborts == []


async def test_a_feed_that_breaks_is_opened_again(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("before and after")
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
    cluster.scheduler.emit("r", ids[:2])
    port = int(cluster.scheduler_address.rpartition(":")[2])
    await cluster.scheduler.stop()
    await cluster.scheduler.start(port)
    cluster.scheduler.emit("r", ids[2:])
    cluster.scheduler.end("r")
    result, _ = await collecting
    assert (result.text, result.token_ids) == ("before and after", ids)


async def test_a_forgotten_request_is_submitted_again(
    cluster: Cluster, open_client: OpenClient, tokenizer: Tokenizer
) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    ids = tokenizer.encode("the same again, to the letter")
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: any(feed.attached for feed in cluster.scheduler.feeds))
    cluster.scheduler.emit("r", ids[:3])
    port = int(cluster.scheduler_address.rpartition(":")[2])
    await cluster.scheduler.stop()
    cluster.scheduler.requests.clear()
    await cluster.scheduler.start(port)
    await cluster.scheduler.until(lambda: len(cluster.scheduler.submits) == 2)
    first, second = cluster.scheduler.submits
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    cluster.scheduler.emit("r", ids)
    cluster.scheduler.end("r")
    result, _ = await collecting
    assert (result.text, result.token_ids) == ("the same again, to the letter", ids)


async def test_submit_is_retried_while_the_scheduler_is_down(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    cluster.scheduler.submit_errors = [errors.UnavailableError("starting"), errors.AbortedError("cut off")]
    collecting = asyncio.create_task(collect(open_client(router), request_id="r"))
    await cluster.scheduler.until(lambda: "r" in cluster.scheduler.requests)
    cluster.scheduler.emit("r", [30])
    cluster.scheduler.end("r")
    assert (await collecting)[0].token_ids == [30]
    assert len(cluster.scheduler.submits) == 3


async def test_no_detokenizer_is_unavailable(cluster: Cluster, open_client: OpenClient) -> None:
    router = await cluster.add_router(unavailable_timeout_s=2.0)
    with pytest.raises(errors.UnavailableError, match="detokenizer"):
        await collect(open_client(router, wait_s=0.1))
