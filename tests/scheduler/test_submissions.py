"""The results that a router gets for its submissions, and their timing."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import cast
from unittest.mock import Mock

import pytest
from google.protobuf.message import Message

from midstream.errors import NotFoundError, OverloadedError
from midstream.rpc.connection import Connection
from protos import generation_pb2
from protos import scheduler_pb2 as pb
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import Accepted
from scheduler.core.events import AbortRequested, Attached
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec
from scheduler.edge.engine import Engine
from scheduler.edge.submissions import Submissions
from scheduler.journal import JournalEntry
from scheduler.plugins import load_scheduler

OnCommitted = Callable[[Accepted], None]


class Service:
    """Accepts requests, or rejects them if `error` is set; requests with `keep_s` first wait for `is_found`."""

    def __init__(self) -> None:
        self.uncommitted: list[tuple[Accepted, OnCommitted]] = []
        self.num_answers = 0
        self.error: Exception | None = None
        self.is_found = asyncio.Event()

    def submit_now(self, request: generation_pb2.GenerateRequest, on_committed: OnCommitted) -> bool:
        if request.keep_s:
            return False
        if self.error is not None:
            raise self.error
        accepted = Request(RequestSpec(request_id=request.request_id, prompt=array("I", [1]), max_tokens=1), 1)
        self.uncommitted.append((Accepted(accepted, is_attached=False), on_committed))
        return True

    async def submit(self, request: generation_pb2.GenerateRequest, on_committed: OnCommitted) -> None:
        await self.is_found.wait()
        request.keep_s = 0
        self.submit_now(request, on_committed)

    def answer(self, accepted: Accepted) -> pb.SubmitResponse:
        self.num_answers += 1
        return pb.SubmitResponse(num_sequences=len(accepted.request.sequences))

    def commit(self) -> None:
        for accepted, on_committed in self.uncommitted:
            on_committed(accepted)
        self.uncommitted.clear()


class Router:
    """A router's submissions, and the results that it got."""

    def __init__(self, service: Service) -> None:
        self.results: list[pb.SubmissionResult] = []
        self.submissions = Submissions(service, cast("Connection", self))

    def post(self, message: Message) -> None:
        self.results.append(cast("pb.SubmissionResult", message))

    def send(self, number: int, **fields: int) -> None:
        request = generation_pb2.GenerateRequest(request_id=f"r{number}", **fields)  # type: ignore[arg-type]
        self.submissions.take(pb.Submission(number=number, request=request))

    @property
    def numbers(self) -> list[int]:
        return [result.number for result in self.results]


async def test_a_submission_is_answered_once_it_is_committed_without_a_task() -> None:
    service = Service()
    router, tasks = Router(service), asyncio.all_tasks()
    router.send(1)
    router.send(2)
    assert not router.results
    assert asyncio.all_tasks() == tasks
    service.commit()
    assert router.results == [
        pb.SubmissionResult(number=number, response=pb.SubmitResponse(num_sequences=1)) for number in (1, 2)
    ]


async def test_a_submission_that_has_to_wait_delays_no_other() -> None:
    service = Service()
    router = Router(service)
    router.send(1, keep_s=60)
    router.send(2)
    service.commit()
    assert router.numbers == [2]
    service.is_found.set()
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    await task
    service.commit()
    assert router.numbers == [2, 1]


@pytest.mark.parametrize("keep_s", [0, 60])
async def test_a_rejected_submission_is_answered_with_its_error(keep_s: int, caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    router = Router(service)
    service.is_found.set()
    errors: tuple[Exception, ...] = (NotFoundError("none"), OverloadedError("full", retry_after_ms=7), KeyError("bug"))
    for number, service.error in enumerate(errors):
        router.send(number, keep_s=keep_s)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await task
    none, full, bug = router.results
    assert none.error.message == "none"
    assert (full.error.message, full.retry_after_ms) == ("full", 7)
    assert bug.error.message == "internal error; see the log for details"
    assert "bug" in caplog.text


async def test_nothing_is_answered_after_the_connection_was_lost() -> None:
    service = Service()
    router = Router(service)
    router.send(1)
    router.send(2, keep_s=60)
    (task,) = asyncio.all_tasks() - {asyncio.current_task()}
    router.submissions.lose(None)
    await asyncio.wait((task,))
    service.commit()
    assert task.cancelled()
    assert not router.results
    # No result is computed, since nobody would read it: the router submits the requests again.
    assert not service.num_answers


class HeldJournal:
    """A journal that commits when it is told to."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []

    def after_commits(self) -> None:
        """Do nothing; the engine replaces this method."""

    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        self.held.append(then)

    def release(self) -> None:
        while self.held:
            self.held.pop(0)()
        self.after_commits()


async def test_a_request_with_the_id_of_a_forgotten_one_is_answered_after_its_own_commit() -> None:
    journal = HeldJournal()
    config = CoreConfig(scheduler_epoch=1, vocab_size=100, max_sequence_length=100, max_num_finished=1)
    core = SchedulerCore(config, load_scheduler("", "guaranteed_no_evict", "inflight"))
    engine = Engine(core, journal=journal, dispatcher=Mock())  # type: ignore[arg-type]
    answers: list[str] = []

    def submit(request_id: str, tokens: list[int]) -> None:
        payload = generation_pb2.GenerateRequest(
            request_id=request_id, token_ids=generation_pb2.TokenIds(values=tokens)
        ).SerializeToString()
        spec = RequestSpec(request_id=request_id, prompt=array("I", tokens), max_tokens=5, payload=payload)
        engine.submit(spec, lambda answer: answers.append(answer.request.request_id))

    async def commit() -> None:
        await asyncio.sleep(0.01)  # entries are passed to the journal at the end of an iteration
        journal.release()

    for request_id in "ab":
        submit(request_id, [1, 2])
        await commit()
        engine.handle(AbortRequested(engine.now_ns(), request_id))
        if request_id == "a":
            await commit()
    # The core keeps one ended request, `b`.
    assert "a" not in core.lifecycle.requests
    assert "a" in engine.hub.logs
    answers.clear()
    submit("a", [7, 8, 9])
    assert answers == []
    await commit()
    assert answers == ["a"]
    assert list(engine.hub.logs["a"].request.spec.prompt) == [7, 8, 9]


async def test_a_reader_of_a_forgotten_request_does_not_detach_from_a_new_one_with_its_id() -> None:
    journal = HeldJournal()
    config = CoreConfig(scheduler_epoch=1, vocab_size=100, max_sequence_length=100)
    core = SchedulerCore(config, load_scheduler("", "guaranteed_no_evict", "inflight"))
    engine = Engine(core, journal=journal, dispatcher=Mock())  # type: ignore[arg-type]
    spec = RequestSpec(request_id="a", prompt=array("I", [1]), max_tokens=5)
    engine.submit(spec, lambda _: None)
    engine.handle(Attached(engine.now_ns(), "a"))
    engine._on_detach(Request(spec, 7))  # an earlier request with the same id
    assert core.lifecycle.requests["a"].num_attached == 1
    engine._on_detach(core.lifecycle.requests["a"])
    assert core.lifecycle.requests["a"].num_attached == 0
