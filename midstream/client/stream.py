"""One request's output, as an asynchronous iterator that survives the loss of routers.

1. `Generate` goes to a router. Each chunk carries its token offset, and the stream keeps the next offset of each
   sequence.
2. If the call breaks without a final chunk, the stream continues at the next router: with `Resume` at those offsets or,
   if nothing was received yet, with the same `Generate`, which attaches to the running request.
3. It retries until the deadline, unless nothing was received for `unavailable_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from midstream.chunk import Chunk, FinishReason, SequenceEnds
from midstream.client.result import Result
from midstream.client.retries import Retries, broken_error, is_broken
from midstream.errors import (
    AbortedError,
    DeadlineError,
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    UnavailableError,
)
from midstream.extras import TensorCursor
from midstream.rpc.errors import error_from_rpc
from protos import generation_pb2 as pb
from protos import loads_pb2, service_pb2

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

# Time without output after which the router is probed, and the time limit for its response. If it does not respond,
# another router is used.
_SILENCE_S, _ANSWER_S = 2.0, 3.0
# If less than this remains, the time counts as over, since the clock may not be precise enough.
_LEAST_DELAY_S = 0.01


class AsyncStream:
    """A request's output: iterate over its chunks, or await `result()`. Leaving the stream before its end aborts the
    request (unless detached).

    Attributes:
        request_id: Id of the request, with which any client can resume the stream.
        num_resumes: Number of times the stream was reopened.
    """

    def __init__(
        self,
        request_id: str,
        request: pb.GenerateRequest | None,
        next_stub: Callable[[], Stub],
        *,
        timeout_s: float | None,
        unavailable_timeout_s: float,
        from_token: int = 0,
        has_other_routers: bool = False,
    ) -> None:
        """Create a stream; it opens when iteration begins. Without a `request`, it resumes the request `request_id` at
        `from_token`. If there are other routers, the stream leaves a router that does not respond for some seconds.
        """
        self.request_id = request_id
        self.num_resumes = 0
        self._request = request
        self._next_stub = next_stub
        self._from_token = from_token
        self._offsets: dict[int, int] = {}
        self._ends = SequenceEnds()
        self._tensors: defaultdict[int, TensorCursor] = defaultdict(TensorCursor)
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._final: Chunk | None = None
        self._is_cancelled = self._is_read = False
        self._has_other_routers = has_other_routers
        self._last_read = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._is_silent = False
        self._retries = Retries(timeout_s, unavailable_timeout_s)

    def __aiter__(self) -> Self:
        return self

    def __del__(self) -> None:
        # Dropping a stream cancels its call. The garbage collector may run in any thread, but calls belong to the
        # thread of the loop.
        if self._loop is not None and self._call is not None and self._final is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._call.cancel)

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            StopAsyncIteration: After the final chunk of a request that finished or was aborted.
            InvalidArgumentError: Another task is reading the stream.
            AbortedError: The stream was left, or its client was closed, before the end.
            MidstreamError: The request was rejected, failed, or exceeded its deadline.
        """
        if self._is_read:
            raise InvalidArgumentError("is being read by another task or thread", field="stream")
        self._is_read = True
        try:
            return await self._next()
        finally:
            self._is_read = False

    async def _next(self) -> Chunk:
        while True:
            if self._is_cancelled:
                raise AbortedError("the stream was abandoned before its end")
            if self._call is None:
                self._call = await self._open()
            response = await self._read(self._call)
            if response is None:
                continue
            if not isinstance(response, pb.GenerateResponse):
                self._stop_watching()
                if self._final is None:
                    raise ExecutionError("the stream ended without a final chunk")
                _raise_for(self._final)
                raise StopAsyncIteration
            chunk = Chunk.from_proto(response)
            expected = self._offsets.get(chunk.sequence_index, self._from_token)
            if chunk.extras is not None:
                chunk.extras = self._tensors[chunk.sequence_index].new(chunk.extras)
            if not chunk.adds_to(expected) or self._ends.repeats(chunk):
                continue
            self._offsets[chunk.sequence_index] = max(chunk.next_offset, expected)
            self._retries.progress()
            if chunk.is_final:
                self._final = chunk
            return chunk

    async def _read(self, call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> object:
        """Return the next message with output; None if there is none yet, or the call broke and must be reopened."""
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            await self._recover(error)
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.cancel()
                raise
            if not self._is_silent:  # `cancel` was called, or the client was closed
                self.cancel()
                return None
            await self._leave(UnavailableError("the router does not answer"))
            return None
        self._last_read = asyncio.get_running_loop().time()
        if isinstance(response, pb.GenerateResponse) and response.is_keep_alive:
            self._retries.progress()
            return None
        return response

    async def result(self) -> Result:
        """Wait for the end of the request and return its output, except chunks that were already read.

        Raises:
            MidstreamError: The request was rejected, failed, or exceeded its deadline.
        """
        result = Result(self.request_id)
        async for chunk in self:
            result.add(chunk)
        return result

    async def text(self) -> str:
        """Wait for the end of the request and return the text of the first sequence."""
        return (await self.result()).text

    def cancel(self) -> None:
        """Leave the stream; the request is aborted unless it is detached."""
        self._is_cancelled = self._final is None
        self._stop_watching()
        if self._call is not None:
            self._call.cancel()

    async def _open(self) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        loop = asyncio.get_running_loop()
        timeout = self._retries.left_s()
        stub = self._next_stub()
        if self._request is not None and not self._offsets:
            call = stub.Generate(self._request, timeout=timeout)
        else:
            size = max(self._offsets, default=-1) + 1
            resume = service_pb2.ResumeRequest(
                request_id=self.request_id,
                from_token=self._from_token,
                from_token_by_sequence=[self._offsets.get(index, self._from_token) for index in range(size)],
            )
            call = stub.Resume(resume, timeout=timeout)  # type: ignore[assignment]  # only the request's type differs
        self._loop, self._is_silent, self._last_read = loop, False, loop.time()
        if self._has_other_routers:
            self._stop_watching()
            self._watching = asyncio.create_task(_watch(weakref.ref(self), stub, call))
        return call

    def silence_s(self) -> float:
        """Return the time since the last message; called by `_watch`."""
        return asyncio.get_running_loop().time() - self._last_read

    def leave_silent_router(self) -> None:
        """Continue at another router; called by `_watch`."""
        self._is_silent = True
        if self._call is not None:
            self._call.cancel()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _recover(self, error: grpc.aio.AioRpcError) -> None:
        """Wait until the stream should be reopened; raise the error if it cannot be resumed."""
        if self._final is not None:
            # The connection broke after the final chunk but before the RPC status; the chunk carries the same
            # information.
            self._stop_watching()
            _raise_for(self._final)
            raise StopAsyncIteration
        if not is_broken(error):
            self._stop_watching()
            raise error_from_rpc(error) from None
        await self._leave(broken_error(error))

    async def _leave(self, error: MidstreamError) -> None:
        """Wait until the stream should be reopened at the next router; raise `error` if that takes too long."""
        self._stop_watching()
        await self._retries.wait(error)
        self._call = None
        self.num_resumes += 1


async def _watch(watched: weakref.ref[AsyncStream], stub: Stub, call: grpc.aio.Call) -> None:
    """Cancel the call if its router stops responding, since the router may hang while the connection stays open.

    No strong reference to the stream is kept during waits, since dropping the stream must end its call.
    """
    delay_s = _SILENCE_S
    while True:
        await asyncio.sleep(delay_s)
        silence_s = _silence_s(watched)
        if call.done():
            return
        delay_s = _SILENCE_S - silence_s
        if delay_s > _LEAST_DELAY_S:
            continue
        delay_s = _SILENCE_S  # if the router responds, it is probed again after another such silence
        try:
            await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            stream = watched()
            if stream is None:
                return
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and stream.silence_s() >= _SILENCE_S:
                stream.leave_silent_router()
                return
            del stream


def _silence_s(watched: weakref.ref[AsyncStream]) -> float:
    stream = watched()
    return stream.silence_s() if stream is not None else 0.0


def _raise_for(chunk: Chunk) -> None:
    error: MidstreamError | None = None
    if chunk.finish_reason is FinishReason.DEADLINE:
        error = DeadlineError("the request's deadline passed")
    elif chunk.finish_reason is FinishReason.ERROR:
        error = chunk.error or ExecutionError("the request failed")
    if error is not None:
        raise error
