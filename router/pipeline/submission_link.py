"""Submissions over frames: one connection per scheduler, on which many requests share a write and a wake-up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable

import grpc.aio

from midstream.errors import DeadlineError, OverloadedError, UnavailableError, from_proto
from midstream.rpc.frame_link import FrameLink, LinkSettings
from protos import generation_pb2, scheduler_pb2_grpc
from protos import scheduler_pb2 as pb
from protos.frames_pb2 import FramesOffer, OpenFramesRequest

_OPEN_TIMEOUT_S = 2.0
# Maximum time without a message; a scheduler responds within milliseconds.
_SILENCE_S = 3.0
# A longer message would delay others, and might exceed the limit on a frame, which closes the connection.
_MAX_REQUEST_BYTES = 1 << 20


class SubmissionLink(FrameLink[pb.Submission, pb.SubmissionResult]):
    """The connection to one scheduler."""

    message_class = pb.SubmissionResult

    def __init__(self, target: str, settings: LinkSettings, server_name: str) -> None:
        super().__init__("scheduler", target, settings, server_name, _SILENCE_S)
        self._numbers = itertools.count(1)
        self._results: dict[int, asyncio.Future[pb.SubmissionResult]] = {}
        self._turn = asyncio.Lock()
        self._has_room = asyncio.Event()

    def can_take(self, num_bytes: int) -> bool:
        """Return whether the connection is open and a request of this size is small enough for it."""
        return self.is_open and num_bytes <= _MAX_REQUEST_BYTES

    async def submit(self, request: generation_pb2.GenerateRequest, timeout_s: float) -> pb.SubmitResponse:
        """Submit a request once.

        Raises:
            MidstreamError: The scheduler rejected the request; UnavailableError if the connection was lost,
                DeadlineError if there was no answer within `timeout_s`.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer: asyncio.Future[pb.SubmissionResult] = loop.create_future()
        self._results[number] = answer
        give_up_at = loop.time() + timeout_s
        timer: asyncio.TimerHandle | None = None
        try:
            if self._turn.locked() or not self._has_room_now:
                async with asyncio.timeout_at(give_up_at):
                    await self._wait_for_room(answer)
            self._send(pb.Submission(number=number, request=request))
            # This takes a fraction of the time of asyncio.timeout.
            timer = loop.call_at(give_up_at, _expire, answer)
            result = await answer
        except TimeoutError:
            raise DeadlineError("the scheduler did not answer in time") from None
        finally:
            if timer is not None:
                timer.cancel()
            self._results.pop(number, None)
        if result.HasField("error"):
            error = from_proto(result.error)
            if isinstance(error, OverloadedError):
                error.retry_after_ms = result.retry_after_ms
            raise error
        return result.response

    @property
    def _has_room_now(self) -> bool:
        return self._connection is None or self._connection.is_writable

    async def _wait_for_room(self, answer: asyncio.Future[pb.SubmissionResult]) -> None:
        """Wait until the connection is writable or lost, so that many large submissions do not overflow its buffer."""
        async with self._turn:
            while not answer.done() and not self._has_room_now:
                self._has_room.clear()
                await self._has_room.wait()

    def resume(self) -> None:
        """Continue with the submissions that wait for room."""
        self._has_room.set()

    def _ask_for_frames(self, channel: grpc.aio.Channel) -> Awaitable[FramesOffer]:
        stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[assignment]
        return stub.OpenSubmissions(OpenFramesRequest(), timeout=_OPEN_TIMEOUT_S)

    def _take(self, batch: pb.SubmissionResult) -> None:
        answer = self._results.get(batch.number)
        if answer is not None and not answer.done():
            answer.set_result(batch)

    def _lose(self) -> None:
        for answer in self._results.values():
            if not answer.done():
                answer.set_exception(UnavailableError(f"the connection to the scheduler at {self.target} was lost"))
        self._has_room.set()


def _expire(answer: asyncio.Future[pb.SubmissionResult]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
