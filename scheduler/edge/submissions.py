"""A router's submissions over a connection that carries frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from midstream.errors import ExecutionError, MidstreamError, OverloadedError
from midstream.rpc.frames import FrameConnection
from protos import generation_pb2
from protos import scheduler_pb2 as pb

logger = logging.getLogger(__name__)

Submit = Callable[[generation_pb2.GenerateRequest], Awaitable[pb.SubmitResponse]]


class Submissions:
    """Submits what one router sends, and answers each submission when it has been committed or rejected."""

    def __init__(self, submit: Submit, connection: FrameConnection) -> None:
        self._submit = submit
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, body: bytes) -> None:
        """Start to submit a request."""
        task = asyncio.create_task(self._answer(pb.Submission.FromString(body)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def resume(self) -> None:
        """Do nothing: answers are small, so they are sent without waiting until the connection is writable."""

    def lose(self, error: Exception | None) -> None:
        """Forget the submissions in progress; the router submits them again."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _answer(self, submission: pb.Submission) -> None:
        result = pb.SubmissionResult(number=submission.number)
        try:
            result.response.CopyFrom(await self._submit(submission.request))
        except MidstreamError as error:
            result.error.CopyFrom(error.to_proto())
            if isinstance(error, OverloadedError):
                result.retry_after_ms = error.retry_after_ms
        except Exception:
            logger.exception("unexpected error in a submission")
            result.error.CopyFrom(ExecutionError("internal error; see the log for details").to_proto())
        self._connection.post(result)
