"""Ended requests stay readable for a long time, even after the core has forgotten them and after the scheduler
restarts.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2
from scheduler.core.effects import RequestForgotten
from scheduler.core.events import StopWordFound
from scheduler.core.request import FinishReason
from scheduler.journal.documents import DocumentKey
from tests.scheduler.running_scheduler import FeedReader, RunningScheduler, run_scheduler, until


async def read(scheduler: RunningScheduler, request_id: str) -> tuple[list[int], int]:
    """Return what a detokenizer receives for a request: its tokens, and the status code if there was an error."""
    feed = await FeedReader.open(scheduler.stub)
    feed.attach(1, request_id)
    tokens: list[int] = []
    while True:
        batch = await feed.read()
        tokens += batch.token_ids
        code = next((opened.error.code for opened in batch.opened), 0)
        if code or batch.ended:
            feed.close()
            return tokens, code


async def get(scheduler: RunningScheduler, request_id: str) -> scheduler_pb2.GetRequestResponse:
    found: scheduler_pb2.GetRequestResponse = await scheduler.stub.GetRequest(
        scheduler_pb2.GetRequestRequest(request_id=request_id)
    )
    return found


async def delete(scheduler: RunningScheduler, request_id: str) -> None:
    await scheduler.stub.DeleteRequest(scheduler_pb2.DeleteRequestRequest(request_id=request_id))


def forgotten(scheduler: RunningScheduler, request_id: str) -> bool:
    engine = scheduler.service.engine
    return request_id not in engine.core.lifecycle.requests and request_id not in engine.hub.logs


def settings(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    return {"journal": "log", "journal_path": str(tmp_path / "journal"), "finished_ttl_s": 0.05, **fields}


async def test_a_kept_request_is_read_again_after_it_was_forgotten_and_after_a_restart(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"keep_s": 600, "attachment": b"beside", "detached": True}
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], **fields)
        await scheduler.submit("b", [1, 2, 3], detached=True)
        tokens, _ = await read(scheduler, "a")
        await until(lambda: forgotten(scheduler, "a") and forgotten(scheduler, "b"))
        assert await read(scheduler, "a") == (tokens, 0)
        assert await read(scheduler, "b") == ([], grpc.StatusCode.NOT_FOUND.value[0])
        await until(lambda: forgotten(scheduler, "a"))
    async with run_scheduler(**settings(tmp_path)) as scheduler:  # no worker is needed, since nothing is recomputed
        found = await get(scheduler, "a")
        assert (found.request.attachment, found.request.keep_s) == (b"beside", 600)
        assert (found.has_started, found.has_finished) == (True, True)
        assert await read(scheduler, "a") == (tokens, 0)
        await until(lambda: forgotten(scheduler, "a"))
        answer = await scheduler.submit("a", [1, 2, 3], **fields)
        assert answer.attached
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await scheduler.submit("a", [1, 2, 4], **fields)
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_requests_that_end_just_before_a_restart_are_kept(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=60.0)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], keep_s=600, detached=True)
        tokens, _ = await read(scheduler, "a")
    for suffix in ("", "-wal", "-shm"):  # as if the scheduler had died before it wrote the entry
        (tmp_path / f"journal.documents{suffix}").unlink(missing_ok=True)
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await until(lambda: forgotten(scheduler, "a"))
        assert await read(scheduler, "a") == (tokens, 0)


async def test_a_deleted_request_is_gone_in_memory_and_after_a_restart(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=60.0)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], keep_s=600, detached=True)
        await scheduler.submit("long", [1, 2, 3], max_tokens=2000, keep_s=600, detached=True)
        await scheduler.submit("b", [1, 2, 3], detached=True)
        await read(scheduler, "a")
        for request_id in ("a", "long"):
            await delete(scheduler, request_id)
            with pytest.raises(grpc.aio.AioRpcError, match="known"):
                await get(scheduler, request_id)
        requests = scheduler.service.engine.core.lifecycle.requests
        await until(lambda: not requests["long"].live_sequences)
        with pytest.raises(grpc.aio.AioRpcError, match="kept"):
            await delete(scheduler, "b")
        assert (await get(scheduler, "b")).request.request_id == "b"
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await until(lambda: forgotten(scheduler, "a"))
        for request_id in ("a", "long"):
            assert await read(scheduler, request_id) == ([], grpc.StatusCode.NOT_FOUND.value[0])


async def test_a_kept_request_expires(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], keep_s=1, detached=True)
        await read(scheduler, "a")
        ended_ns = scheduler.service.clock.now_ns()
        await until(lambda: forgotten(scheduler, "a") and scheduler.service.clock.now_ns() > ended_ns + 1_000_000_000)
        assert await read(scheduler, "a") == ([], grpc.StatusCode.NOT_FOUND.value[0])


async def test_a_request_that_is_too_large_for_a_document_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler.journal.documents.MAX_DOCUMENT_BYTES", 1000)
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("large", [1, 2, 3], keep_s=600, attachment=bytes(1000), detached=True)
        await scheduler.submit("small", [1, 2, 3], keep_s=600, detached=True)
        await until(lambda: "cannot keep a finished request" in caplog.text)
        await until(lambda: forgotten(scheduler, "large") and forgotten(scheduler, "small"))
        assert (await read(scheduler, "large"))[1] == grpc.StatusCode.NOT_FOUND.value[0]
        assert (await read(scheduler, "small"))[1] == 0


async def test_a_stop_word_in_a_restored_request_is_accepted(tmp_path: Path) -> None:
    """No detokenizer had read the request before, so it continued to its maximum length."""
    # The request must not be forgotten again between the read and the stop word.
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=1.0)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], max_tokens=6, keep_s=600, detached=True)
        await until(lambda: forgotten(scheduler, "a"))
        assert len((await read(scheduler, "a"))[0]) == 6
        engine = scheduler.service.engine
        engine.handle(StopWordFound(engine.now_ns(), "a", 0, 2, "x"))
        await until(lambda: forgotten(scheduler, "a"))
        assert await get(scheduler, "a")
        end = engine.core.lifecycle.requests["a"].sequences[0].end
        assert end is not None
        assert (end.reason, end.num_tokens, end.stop_word) == (FinishReason.STOP, 2, "x")


async def test_a_request_restored_before_its_removal_is_committed_stays(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=60.0)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], keep_s=600, detached=True)
        tokens, _ = await read(scheduler, "a")
        engine, key = scheduler.service.engine, DocumentKey("", "request", "a")
        async with asyncio.timeout(240):
            while await scheduler.service.journal.documents.get(key) is None:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.01)
        old = engine.core.lifecycle.requests["a"]
        engine.core.lifecycle.requests.forget(old)
        engine.hub.logs.pop("a")
        assert await get(scheduler, "a")
        assert engine.core.lifecycle.requests["a"] is not old
        engine.hub.publish([RequestForgotten(old)])
        assert await read(scheduler, "a") == (tokens, 0)
