"""The ledger lists each request once, with the number of delivered tokens, whichever component dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import UnavailableError
from protos import generation_pb2 as pb
from protos import ledger_pb2, scheduler_pb2
from scheduler.core.events import StopWordFound
from scheduler.journal.documents import Documents
from tests.scheduler.running_scheduler import FeedReader, RunningScheduler, run_scheduler, until
from tests.scheduler.test_kept_requests import forgotten, read, settings


async def entries(scheduler: RunningScheduler, count: int) -> list[ledger_pb2.LedgerEntry]:
    """Return all entries, once there are `count` of them."""
    async with asyncio.timeout(240):
        while True:
            found: list[ledger_pb2.LedgerEntry] = []
            answer = await scheduler.stub.GetLedger(ledger_pb2.GetLedgerRequest())
            while answer.next_after:
                found += answer.entries
                answer = await scheduler.stub.GetLedger(ledger_pb2.GetLedgerRequest(after=answer.next_after))
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


def summary(found: list[ledger_pb2.LedgerEntry]) -> dict[str, tuple[str, int, int]]:
    assert len({entry.request_id for entry in found}) == len(found)
    return {entry.request_id: (entry.client_id, entry.prompt_tokens, entry.completion_tokens) for entry in found}


async def test_an_entry_contains_the_delivered_usage(tmp_path: Path) -> None:
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=60.0)) as scheduler:
        await scheduler.worker()
        for number in range(3):
            fields: dict[str, Any] = {"client_id": f"c{number}", "arrival_time_unix_ns": 5, "detached": True}
            await scheduler.submit(f"r{number}", [1, 2, 3], max_tokens=4 + number, **fields)
            tokens, _ = await read(scheduler, f"r{number}")
            assert len(tokens) == 4 + number
        found = await entries(scheduler, 3)
        assert summary(found) == {f"r{number}": (f"c{number}", 3, 4 + number) for number in range(3)}
        (first,) = (entry for entry in found if entry.request_id == "r0")
        assert (first.model, first.arrival_unix_ns, first.finish_reason) == ("fake", 5, pb.FINISH_REASON_LENGTH)
        assert first.finished_unix_ns > 5


async def test_a_request_is_counted_once_when_the_scheduler_died_before_or_after_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings(tmp_path, finished_ttl_s=60.0)
    async with run_scheduler(**values) as scheduler:
        await scheduler.worker()
        await scheduler.submit("written", [1, 2, 3], detached=True)
        await read(scheduler, "written")
        await entries(scheduler, 1)
        put = Documents.put

        async def fail(*_: object, **__: object) -> None:
            raise UnavailableError("dead")

        monkeypatch.setattr(Documents, "put", fail)
        await scheduler.submit("lost", [1, 2, 3], max_tokens=6, detached=True)
        await read(scheduler, "lost")
    monkeypatch.setattr(Documents, "put", put)
    for _ in range(2):
        async with run_scheduler(**values) as scheduler:
            assert summary(await entries(scheduler, 2)) == {"written": ("", 3, 4), "lost": ("", 3, 6)}


async def test_a_request_that_ends_while_the_ledger_opens_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the ledger opens, the core has ended the request, but the end has not been committed."""
    commits: list[tuple[Any, Any]] = []
    list_documents, is_held = Documents.list, asyncio.Event()

    async def hold(*arguments: Any, **options: Any) -> Any:
        await is_held.wait()
        return await list_documents(*arguments, **options)

    monkeypatch.setattr(Documents, "list", hold)
    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        journal = scheduler.service.journal
        await scheduler.submit("a", [1, 2, 3], detached=True)
        commit = journal.commit
        monkeypatch.setattr(journal, "commit", lambda *arguments: commits.append(arguments))
        requests = scheduler.service.engine.core.lifecycle.requests
        await until(lambda: "a" not in requests or not requests["a"].live_sequences)
        is_held.set()
        await scheduler.stub.GetLedger(ledger_pb2.GetLedgerRequest())
        for arguments in commits:
            commit(*arguments)
        monkeypatch.setattr(journal, "commit", commit)
        assert summary(await entries(scheduler, 1)) == {"a": ("", 3, 4)}
        await scheduler.submit("b", [1, 2, 3], detached=True)
        assert set(summary(await entries(scheduler, 2))) == {"a", "b"}


async def test_a_page_whose_write_was_not_confirmed_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, num_failures = Documents.put, 0

    async def put_and_fail(*arguments: Any, **options: Any) -> Any:
        nonlocal num_failures
        document = await put(*arguments, **options)
        if num_failures < 2:
            num_failures += 1
            raise UnavailableError("the response was lost")
        return document

    async with run_scheduler(**settings(tmp_path)) as scheduler:
        await scheduler.worker()
        monkeypatch.setattr(Documents, "put", put_and_fail)
        for name in ("a", "b"):
            await scheduler.submit(name, [1, 2, 3], detached=True)
            await read(scheduler, name)
        await until(lambda: num_failures == 2)
        assert summary(await entries(scheduler, 2)) == {"a": ("", 3, 4), "b": ("", 3, 4)}


async def test_an_amended_end_changes_the_ledger_entry(tmp_path: Path) -> None:
    """This also applies to a request that is read back long after it was recorded."""
    # The request must not be forgotten again between the read and the stop word.
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=1.0)) as scheduler:
        await scheduler.worker()
        await scheduler.submit("a", [1, 2, 3], max_tokens=6, keep_s=600, detached=True)
        assert summary(await entries(scheduler, 1)) == {"a": ("", 3, 6)}
        await until(lambda: forgotten(scheduler, "a"))
        await read(scheduler, "a")
        engine = scheduler.service.engine
        engine.handle(StopWordFound(engine.now_ns(), "a", 0, 2, "x"))
        async with asyncio.timeout(240):
            while summary(await entries(scheduler, 1)) != {"a": ("", 3, 2)}:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.05)


async def test_a_stop_word_in_the_last_tokens_changes_the_ledger_entry(tmp_path: Path) -> None:
    """The detokenizer reports such a stop word after the scheduler has sent the end of the request."""
    stopping = pb.StoppingConfig(stop_words=["x"])
    async with run_scheduler(**settings(tmp_path, finished_ttl_s=60.0)) as scheduler:
        await scheduler.worker()
        for name in ("a", "b"):
            await scheduler.submit(name, [1, 2, 3], max_tokens=6, detached=True, stopping=stopping)
            await entries(scheduler, 1)
        feed = await FeedReader.open(scheduler.stub)
        for stream, name in enumerate(("a", "b"), 1):
            feed.attach(stream, name)
        num_ended = 0
        while num_ended < 2:
            num_ended += len((await feed.read()).ended)
        stop = scheduler_pb2.FeedStop(stream=1, sequence_index=0, num_tokens=5, stop_word="x")
        feed.send(stop=stop)
        async with asyncio.timeout(240):
            while summary(await entries(scheduler, 2)) != {"a": ("", 3, 5), "b": ("", 3, 6)}:  # noqa: ASYNC110 (a thread writes it)
                await asyncio.sleep(0.05)
        reasons = {entry.request_id: entry.finish_reason for entry in await entries(scheduler, 2)}
        assert reasons == {"a": pb.FINISH_REASON_STOP, "b": pb.FINISH_REASON_LENGTH}
        feed.close()


async def test_it_can_be_off(tmp_path: Path) -> None:
    async with run_scheduler(ledger_ttl_s=0) as scheduler:
        with pytest.raises(Exception, match="no ledger"):
            await scheduler.stub.GetLedger(ledger_pb2.GetLedgerRequest())
