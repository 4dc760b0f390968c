"""An executor's connection to the service, in a background thread.

1. `run` sends a request as a stream of the native client; if the router is lost, the stream resumes at another.
2. The stream's chunks, and then its end, are passed to the request's owner in that thread.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from midstream.chunk import Chunk
from midstream.client import AsyncClient
from midstream.client.background_loop import BackgroundLoop
from midstream.client.info import ModelInfo
from midstream.errors import AbortedError, InvalidArgumentError, MidstreamError
from midstream.executor.service import LocalService
from midstream.executor.stats import IterationStats, RequestStats, RequestStatsPerIteration, sum_up
from protos import generation_pb2 as pb
from protos import stats_pb2

_RETRY_S, _ABORT_RETRY_S = 0.2, 0.02
_MAX_REQUEST_STATS = 1024


@dataclass(frozen=True, slots=True)
class Owner:
    """What receives a request's output: `put` each chunk, `end` None or the error at which it ended."""

    put: Callable[[Chunk], None]
    end: Callable[[MidstreamError | None], None]


class Session:
    """Runs requests on the service, whose processes it stops at the end if it has started them."""

    def __init__(self, addresses: Sequence[str], service: LocalService | None = None) -> None:
        """Connect to the routers at `addresses`; `service` is stopped by `close`."""
        self._service = service
        self._process = os.getpid()
        self._loop = BackgroundLoop("executor")
        try:
            self._client = self._loop.run(_open(addresses))
        except BaseException:
            self._loop.close()
            raise
        # This makes request ids unique among executors of the same service.
        self._prefix = uuid.uuid4().hex[:16]
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._running: dict[int, Future[None]] = {}
        self._readers: list[Future[None]] = []
        self._model: ModelInfo | None = None
        self.is_closed = False
        atexit.register(self.close)

    def new_id(self) -> int:
        """Return the next request id."""
        return next(self._ids)

    def wire_id(self, request_id: int) -> str:
        """Return the service's id of a request."""
        return f"{self._prefix}-{request_id}"

    def request_id(self, wire_id: str) -> int:
        """Return the id of a request from the service's."""
        return int(wire_id.rpartition("-")[2])

    def check_open(self) -> None:
        """Raise InvalidArgumentError if the session is closed."""
        if self.is_closed:
            raise InvalidArgumentError("the executor is shut down", field="executor")

    @property
    def model(self) -> ModelInfo:
        """The served model."""
        if self._model is None:
            self._model = self._loop.run(self._client.model_info())
        return self._model

    @property
    def running(self) -> list[int]:
        """The ids of unfinished requests."""
        with self._lock:
            return list(self._running)

    def run(self, request_id: int, message: pb.GenerateRequest, owner: Owner, timeout_s: float | None = None) -> None:
        """Run a request.

        Raises:
            InvalidArgumentError: The session is closed.
        """
        self.check_open()
        message.request_id = self.wire_id(request_id)
        with self._lock:  # because the stream could otherwise end before the entry is added
            self._running[request_id] = self._loop.start(self._follow(request_id, message, owner, timeout_s))

    def abort(self, request_id: int) -> None:
        """End a request with finish reason `abort`; no effect if it has already ended."""
        self.check_open()
        if request_id in self._running:
            self._loop.run(self._abort(request_id))

    def latest_stats(self) -> IterationStats:
        """Return the statistics of the latest iteration, summed over all cells."""
        self.check_open()
        return sum_up(self._loop.run(self._latest_stats()))

    def newest_iteration(self) -> int:
        """Return the number of the last iteration, the highest of all cells; 0 if there is none."""
        return self.latest_stats().iter

    def follow_iterations(
        self,
        put: Callable[[IterationStats], None],
        put_requests: Callable[[RequestStatsPerIteration], None] | None = None,
    ) -> None:
        """Pass the statistics of each iteration from now on to `put`, and those of the unfinished requests to
        `put_requests`; return once the service sends them.
        """
        follows: Future[None] = Future()
        self._readers.append(self._loop.start(self._read_iterations(put, put_requests, follows)))
        follows.result()

    def num_blocks(self, host_bytes: int) -> tuple[int, int]:
        """Return the number of KV blocks of a worker group, and how many fit into `host_bytes`."""
        groups = self._loop.run(self._client.server_info()).worker_groups
        if not groups:
            return 0, 0
        return groups[0].num_blocks, host_bytes // groups[0].block_bytes if groups[0].block_bytes else 0

    def follow_kv_events(self, put: Callable[[list[stats_pb2.KvEvent]], None]) -> None:
        """Pass each event of the KV caches from now on to `put`; return once the service sends them."""
        follows: Future[None] = Future()
        self._readers.append(self._loop.start(self._read_kv_events(put, follows)))
        follows.result()

    def request_stats(self, request_ids: Sequence[int] | None = None) -> list[RequestStats]:
        """Return the states of requests and the resources that they hold; requests that the service has forgotten are
        omitted.

        Args:
            request_ids: Ids of the requests; by default, those of all unfinished requests.
        """
        self.check_open()
        return self._loop.run(self._request_stats(self.running if request_ids is None else request_ids))

    def close(self) -> None:
        """Abort running requests, whose owners get an AbortedError, and stop the services. No effect in a forked
        process.
        """
        if self.is_closed or os.getpid() != self._process:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        running = [*self._running.values(), *self._readers]
        for item in running:
            item.cancel()
        wait(running)
        self._loop.close(self._client.close())
        if self._service is not None:
            self._service.stop()

    async def _follow(
        self, request_id: int, message: pb.GenerateRequest, owner: Owner, timeout_s: float | None
    ) -> None:
        error: MidstreamError | None = None
        try:
            async for chunk in self._client.stream(message, timeout_s=timeout_s):
                owner.put(chunk)
        except MidstreamError as failure:
            error = failure
        except asyncio.CancelledError:
            error = AbortedError("the executor was shut down before the request ended")
            raise
        finally:
            with self._lock:
                self._running.pop(request_id, None)
            owner.end(error)

    async def _abort(self, request_id: int) -> None:
        # The abort may arrive before the request itself, which the service then does not know yet.
        while request_id in self._running:
            if await self._client.abort(self.wire_id(request_id)):
                return
            await asyncio.sleep(_ABORT_RETRY_S)

    async def _latest_stats(self) -> list[dict[str, object]]:
        return [stats async for stats in self._client.iteration_stats()]

    async def _request_stats(self, request_ids: Sequence[int]) -> list[RequestStats]:
        found: list[RequestStats] = []
        for start in range(0, len(request_ids), _MAX_REQUEST_STATS):
            by_wire_id = {self.wire_id(item): item for item in request_ids[start : start + _MAX_REQUEST_STATS]}
            states = await self._client.request_stats(list(by_wire_id))
            found += [RequestStats.from_proto(by_wire_id[item.id], item) for item in states]
        return found

    async def _read_iterations(
        self,
        put: Callable[[IterationStats], None],
        put_requests: Callable[[RequestStatsPerIteration], None] | None,
        follows: Future[None],
    ) -> None:
        """Pass iterations on as they arrive; if a router is lost, continue with the newest iteration."""
        while True:
            try:
                stream = self._client.iteration_stats(follow=True, on_open=lambda: _set(follows))
                async for stats in stream:
                    iteration = IterationStats.from_fields(stats)
                    if put_requests is not None:
                        states = await self._request_stats(self.running)
                        put_requests(RequestStatsPerIteration(iteration.iter, states))
                    put(iteration)
            except MidstreamError:
                _set(follows)  # requests can run without it
                await asyncio.sleep(_RETRY_S)

    async def _read_kv_events(self, put: Callable[[list[stats_pb2.KvEvent]], None], follows: Future[None]) -> None:
        """Pass events on as they arrive; if a router or scheduler is lost, continue with the next one."""
        following = 0
        while True:
            try:
                stream = self._client.kv_events(start_sequence_number=following, on_open=lambda: _set(follows))
                async for event in stream:
                    following = event.sequence_number + 1
                    put([event])
            except MidstreamError:
                _set(follows)  # requests can run without it
                await asyncio.sleep(_RETRY_S)


async def _open(addresses: Sequence[str]) -> AsyncClient:
    # Channels belong to the event loop on which they were created.
    return AsyncClient(addresses)


def _set(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)
