"""A router's submissions over a connection that carries frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from midstream.errors import ExecutionError, MidstreamError, OverloadedError
from midstream.rpc.connection import Connection
from protos import generation_pb2
from protos import scheduler_pb2 as pb
from scheduler.core.effects import Accepted

logger = logging.getLogger(__name__)

OnCommitted = Callable[[Accepted], None]


class Service(Protocol):
    """Accepts requests; see SchedulerServicer."""

    def submit_now(self, request: generation_pb2.GenerateRequest, on_committed: OnCommitted) -> bool:
        """Accept a request unless something has to be awaited first; return whether it was accepted.

        `on_committed` is called once it is committed.
        """

    async def submit(self, request: generation_pb2.GenerateRequest, on_committed: OnCommitted) -> None:
        """Accept any request."""

    def answer(self, accepted: Accepted) -> pb.SubmitResponse:
        """Return the answer to a committed submission; its client is now expected to read the request."""


class Submissions:
    """Submits the requests of one router, and answers each submission once it has been committed or rejected."""

    message_class = pb.Submission

    def __init__(self, service: Service, connection: Connection) -> None:
        self._service = service
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_lost = False

    def take(self, submission: pb.Submission) -> None:
        """Submit a request; create a task only if the request has to wait for something."""
        on_committed = partial(self._on_committed, submission.number)
        try:
            if self._service.submit_now(submission.request, on_committed):
                return
        except Exception as error:  # noqa: BLE001 (told to the router)
            self._reject(submission.number, error)
            return
        task = asyncio.create_task(self._submit(submission, on_committed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def resume(self) -> None:
        """Do nothing: answers are small, so they are sent without waiting until the connection is writable."""

    def lose(self, error: Exception | None) -> None:
        """Forget the submissions in progress; the router submits them again."""
        self._is_lost = True
        for task in tuple(self._tasks):
            task.cancel()

    async def _submit(self, submission: pb.Submission, on_committed: OnCommitted) -> None:
        try:
            await self._service.submit(submission.request, on_committed)
        except Exception as error:  # noqa: BLE001 (told to the router)
            self._reject(submission.number, error)

    def _on_committed(self, number: int, accepted: Accepted) -> None:
        if not self._is_lost:
            self._connection.post(pb.SubmissionResult(number=number, response=self._service.answer(accepted)))

    def _reject(self, number: int, error: Exception) -> None:
        if not isinstance(error, MidstreamError):
            logger.error("unexpected error in a submission", exc_info=error)
            error = ExecutionError("internal error; see the log for details")
        result = pb.SubmissionResult(number=number, error=error.to_proto())
        if isinstance(error, OverloadedError):
            result.retry_after_ms = error.retry_after_ms
        self._connection.post(result)
