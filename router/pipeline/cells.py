"""The schedulers to which this router submits requests. A cell is one scheduler with its workers; usually there is one.

With several cells, the router follows each one's KV events to choose between them (cell_choice).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import MutableMapping, Sequence
from functools import partial

import grpc
import grpc.aio
from google.protobuf.message import Message

from midstream.errors import DeadlineError, InvalidArgumentError, MidstreamError, UnavailableError
from midstream.rpc.discovery import Discovery
from midstream.rpc.errors import error_from_rpc
from midstream.rpc.frame_link import LinkSettings
from midstream.rpc.scheduler_epoch import scheduler_epoch
from protos import generation_pb2, loads_pb2, scheduler_pb2, scheduler_pb2_grpc, stats_pb2
from router.pipeline.cell_choice import choose_cell, choose_home
from router.pipeline.kv_index import KvIndex
from router.pipeline.submission_link import SubmissionLink

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_TRY_TIMEOUT_S = 5.0
# A worker encodes one image at a time, and a large one takes seconds on a CPU.
_ENCODE_TIMEOUT_S = 120.0
# Bytes reserved for what a message to or from the scheduler contains in addition to the request.
_ENVELOPE_BYTES = 4096


class Cell:
    """One scheduler.

    Attributes:
        name: Address of the scheduler, or its `one-of:` target, which remains the same when a standby takes over.
        address: Address of the scheduler.
        stub: For calls that run requests, and for polls, which show whether requests would be answered.
        watch_stub: For all other calls; it has its own connection, so that watchers cannot saturate the one for
            requests.
        load: Number of its requests, both those in its last report and those submitted since.
        index: The prefixes that its workers have cached, according to its KV events.
        features: Features of its workers; None if unknown.
        is_up: Whether its last poll succeeded; None before the first one.
        has_workers: Whether it had workers at its last successful poll.
        is_gone: Whether it is no longer discovered, and therefore gets no more requests.
    """

    def __init__(self, name: str, address: str, settings: LinkSettings, server_name: str = "") -> None:
        self.name, self.address = name, address
        self._channel, self._watch_channel = (settings.open_channel(address, server_name) for _ in range(2))
        self.stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(self._channel)  # type: ignore[assignment]
        self.watch_stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(self._watch_channel)  # type: ignore[assignment]
        self._max_request_bytes = settings.max_message_bytes - _ENVELOPE_BYTES
        self._submissions = SubmissionLink(address, settings, server_name)
        self._submitting = asyncio.create_task(self._submissions.run(), name=f"submissions-{address}")
        self.load = 0
        self.reports: Sequence[loads_pb2.CellLoad] = ()
        self.index = KvIndex()
        self._following: asyncio.Task[None] | None = None
        self.features: frozenset[str] | None = None
        self.is_up: bool | None = None
        self.has_workers = False
        self.is_gone = False

    async def poll(self) -> None:
        """Poll the scheduler's load and features."""
        try:
            loads = await self.stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=_POLL_S)
            info = await self.stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=_POLL_S)
        except grpc.aio.AioRpcError:
            self.is_up = False
            return
        self.is_up = True
        self.reports = loads.cells
        self.has_workers = any(cell.num_blocks for cell in loads.cells)
        self.load = sum(cell.num_running_requests + cell.num_queued_requests for cell in loads.cells)
        # The value is None until a worker joins. Until then requests are accepted; a worker fails those that it cannot
        # run, and the scheduler plans no drafts for a model whose state cannot be reset after rejected drafts.
        self.features = frozenset(info.features) or None

    async def submit(
        self, request: generation_pb2.GenerateRequest, give_up_at: float, deadline: float | None
    ) -> scheduler_pb2.SubmitResponse:
        """Submit a request, with retries while the scheduler is unreachable, since Submit is idempotent.

        Args:
            request: The request, already checked and normalized.
            give_up_at: Loop time after which there are no more retries.
            deadline: Loop time of the request's deadline, from which each attempt computes the request's `timeout_ms`.

        Raises:
            MidstreamError: The scheduler rejected the request; UnavailableError if it is unreachable, DeadlineError if
                the deadline has passed, InvalidArgumentError if the request does not fit into a message.
        """
        num_bytes = request.ByteSize()
        if num_bytes > self._max_request_bytes:
            raise _too_large(request, f"at most {self._max_request_bytes} fit into a message to the scheduler")
        loop = asyncio.get_running_loop()
        attempt, delay = 0, _FIRST_RETRY_S
        self.load += 1
        while True:
            attempt += 1
            if deadline is not None:
                request.timeout_ms = max(int((deadline - loop.time()) * 1000), 0)
            try:
                timeout_s = min(max(give_up_at - loop.time(), 0.01), _TRY_TIMEOUT_S)
                answer = await self._submit(request, num_bytes, timeout_s)
            except (DeadlineError, UnavailableError) as error:
                if isinstance(error, DeadlineError) and deadline is not None and loop.time() >= deadline:
                    raise DeadlineError("the request's deadline passed before a scheduler accepted it") from None
                if loop.time() + delay > give_up_at:
                    raise UnavailableError(f"the scheduler is not accepting requests: {error.message}") from None
                if self.is_gone:
                    raise UnavailableError(f"the scheduler at {self.name} was removed") from None
                logger.info("submit to %s failed: %s; retrying", self.name, error.message, extra={"attempt": attempt})
            else:
                if answer.attached:
                    extra = {"request_id": request.request_id, "attempt": attempt}
                    logger.debug("%s already has the request", self.name, extra=extra)
                return answer
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)

    async def _submit(
        self, request: generation_pb2.GenerateRequest, num_bytes: int, timeout_s: float
    ) -> scheduler_pb2.SubmitResponse:
        """Submit a request of `num_bytes` once.

        Raises:
            MidstreamError: The scheduler rejected the request; UnavailableError or DeadlineError if a retry may
                succeed.
        """
        if self._submissions.can_take(num_bytes):
            return await self._submissions.submit(request, timeout_s)
        try:
            return await self.stub.Submit(scheduler_pb2.SubmitRequest(request=request), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                # A busy scheduler may return this when the deadline has passed on its side but not yet here.
                raise UnavailableError(error.details() or "cancelled") from None
            if _is_too_large(error):
                raise _too_large(request, f"the scheduler's limit is lower: {error.details()}") from None
            raise error_from_rpc(error) from None

    def follow(self) -> None:
        """Keep the KV index up to date from now on."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        subscribe = stats_pb2.SubscribeKvEventsRequest(include_snapshot=True)
        while True:
            stream = self.watch_stub.SubscribeKvEvents(subscribe)
            try:
                async for batch in stream:
                    if not self.index.apply(batch):
                        break
            except grpc.aio.AioRpcError as error:
                logger.debug("cannot follow the KV events of %s: %s", self.name, error.details())
            finally:
                stream.cancel()
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        tasks = [task for task in (self._following, self._submitting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._channel.close()
        await self._watch_channel.close()


class CellSet:
    """Some of this router's cells.

    Attributes:
        cells: By address; the mapping changes as cells are discovered.
        unavailable_timeout_s: How long calls that are repeated wait for an unreachable scheduler.
    """

    def __init__(self, cells: MutableMapping[str, Cell], unavailable_timeout_s: float = 10.0) -> None:
        self.cells = cells
        self.unavailable_timeout_s = unavailable_timeout_s

    def choose(self, token_ids: Sequence[int], cache_salt: str) -> Cell:
        """Return the cell for a prompt. Raises UnavailableError if there is no cell."""
        return choose_cell(self._candidates(), token_ids, cache_salt)

    def home(self, request_id: str) -> Cell:
        """Return the cell to which a request is always submitted, even while that cell is down. Raises UnavailableError
        if there is no cell.
        """
        return choose_home(self._known(), request_id)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one cell."""
        return len(self.cells) > 1

    async def holder_of(self, request_id: str) -> Cell | None:
        """Return the cell that already has a request; None if no cell that is up has it, or there is only one cell.

        If two cells have it, a cell in which it was not aborted is preferred: a cell that was down when the client
        retried may have aborted the request since, because no client read it.
        """
        if not self.are_several:
            return None
        cells = [cell for cell in self._known() if cell.is_up is not False]
        request = stats_pb2.GetRequestStatsRequest(request_ids=[request_id])
        answers = await asyncio.gather(
            *(cell.stub.GetRequestStats(request, timeout=_POLL_S) for cell in cells), return_exceptions=True
        )
        found = [
            (answer.requests[0].is_aborted, cell)
            for cell, answer in zip(cells, answers, strict=True)
            if isinstance(answer, stats_pb2.GetRequestStatsResponse) and answer.requests
        ]
        return min(found, key=lambda item: item[0])[1] if found else None

    def successor_of(self, cell: Cell) -> Cell | None:
        """Return the cell that has taken the place of one that is gone; None if there is none."""
        return next((other for other in self.cells.values() if other.name == cell.name), None)

    def any(self) -> Cell:
        """Return a cell that is up, for calls that any cell can answer. Raises UnavailableError if there is no cell."""
        return self._candidates()[0]

    def _candidates(self) -> list[Cell]:
        """Return the cells that are up; all cells if none is."""
        cells = self._known()
        return [cell for cell in cells if cell.is_up] or cells

    def _known(self) -> list[Cell]:
        if not self.cells:
            raise UnavailableError("no scheduler found")
        return list(self.cells.values())

    async def encode_image(self, data: bytes) -> scheduler_pb2.EncodeImageResponse:
        """Have a worker encode an image, with retries while the scheduler is unreachable.

        The cell depends on the image, so that another request with the same image finds it in that cell's cache. Raises
        MidstreamError if the image is refused, or no cell or no worker is available.
        """
        loop, name = asyncio.get_running_loop(), hashlib.blake2b(data, digest_size=16).hexdigest()
        request = scheduler_pb2.EncodeImageRequest(data=data)
        give_up_at, delay = loop.time() + self.unavailable_timeout_s, _FIRST_RETRY_S
        while True:
            cell = choose_home(self._candidates(), name)
            try:
                return await cell.stub.EncodeImage(request, timeout=_ENCODE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if _is_too_large(error):
                    raise InvalidArgumentError(
                        f"does not fit into a message: {error.details()}", field="data"
                    ) from None
                if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() + delay > give_up_at:
                    raise error_from_rpc(error) from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)

    def reports(self) -> list[loads_pb2.CellLoad]:
        """Return the most recent load reports of the cells that are up."""
        return [load for cell in self.cells.values() if cell.is_up for load in cell.reports]

    @property
    def features(self) -> frozenset[str]:
        """Features of the workers of a cell that is up; empty if unknown."""
        return next((cell.features for cell in self.cells.values() if cell.is_up and cell.features), frozenset())

    async def abort(self, request_id: str, *, only_if_unread: bool = False) -> bool:
        """Abort a request in any cell; with `only_if_unread`, only if no client is reading it. Return whether it was
        running. Raises MidstreamError if it was running in none of the cells that responded, and some cells did not
        respond.
        """
        request = loads_pb2.AbortRequest(request_id=request_id, only_if_unread=only_if_unread)
        results = await asyncio.gather(
            *(cell.stub.Abort(request, timeout=_TRY_TIMEOUT_S) for cell in self.cells.values()), return_exceptions=True
        )
        answers = [result for result in results if isinstance(result, loads_pb2.AbortResponse)]
        failures: list[MidstreamError] = [error_from_rpc(item) for item in results if isinstance(item, grpc.RpcError)]
        was_running = any(answer.was_running for answer in answers)
        if failures and not was_running:
            raise failures[0]
        return was_running


class Cells(CellSet):
    """All discovered cells of one model."""

    def __init__(self, targets: str, settings: LinkSettings, unavailable_timeout_s: float = 10.0) -> None:
        super().__init__({}, unavailable_timeout_s)
        self._settings = settings
        self._discovery = Discovery(
            targets, field="schedulers", on_change=self._set_targets, get_epoch=partial(scheduler_epoch, settings)
        )
        self._closing: set[asyncio.Task[None]] = set()
        self._found = asyncio.Event()

    async def wait_found(self, timeout_s: float) -> None:
        """Wait until schedulers have been discovered and polled once, but at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._found.wait()

    async def run(self) -> None:
        """Poll the cells until cancelled."""
        discovering = asyncio.create_task(self._discovery.run())
        try:
            while True:
                await asyncio.gather(*(cell.poll() for cell in self.cells.values()))
                if self.cells:
                    self._found.set()
                if len(self.cells) > 1:
                    for cell in self.cells.values():
                        cell.follow()
                await asyncio.sleep(_POLL_S if self.cells else 0.01)
                if discovering.done():
                    discovering.result()  # raises the error of the task, if it failed
        finally:
            discovering.cancel()
            await asyncio.gather(*(cell.close() for cell in self.cells.values()))

    def _set_targets(self, targets: list[str]) -> None:
        for target in [target for target in self.cells if target not in targets]:
            task = asyncio.create_task(_leave(self.cells.pop(target)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for target in targets:
            if target not in self.cells:
                name, host = self._discovery.target_of(target), self._discovery.name_of(target)
                self.cells[target] = Cell(name, target, self._settings, host)


def _is_too_large(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a message exceeded gRPC's limit, for which gRPC uses the status code of an overloaded service."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")


def _too_large(request: generation_pb2.GenerateRequest, limit: str) -> InvalidArgumentError:
    """Return the error of a request that exceeds a limit; it names the largest field."""
    size, name = max((_num_bytes(value), field.name) for field, value in request.ListFields())
    if name == "prompt_tuning" and request.prompt_tuning.table.data:
        name = "prompt_tuning.table"
    return InvalidArgumentError(f"has {size} of the request's {request.ByteSize()} bytes; {limit}", field=name)


def _num_bytes(value: object) -> int:
    if isinstance(value, Message):
        return value.ByteSize()
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_num_bytes, value)) if isinstance(value, Sequence) else 0


async def _leave(cell: Cell) -> None:
    """Close a cell once no call to it can be in progress, because closing it earlier would cancel the call."""
    cell.is_gone = True
    await asyncio.sleep(_ENCODE_TIMEOUT_S)  # the longest timeout of any call
    await cell.close()
