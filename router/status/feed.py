"""Polls the schedulers' status once a second, and distributes it to any number of watchers.

A watcher holds only a cursor into the samples, so a slow one skips intermediate states but no samples. Schedulers build
block maps only while there are watchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable

import grpc.aio

from midstream import __version__
from midstream.errors import UnavailableError
from midstream.model.folder import ModelFolder
from protos import status_pb2
from router.authentication import current_caller
from router.pipeline.cells import Cell, CellSet
from router.pipeline.stream_limits import StreamLimits, watcher_limits
from router.status.parts import Parts, cell_parts, natural, router_part
from router.status.samples import LATENCY_WINDOW_S, Samples

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_TIMEOUT_S = 1.0
_MAX_MAP_CELLS = 512
_ANY_ADDRESS = ("0.0.0.0:", "[::]:")


class StatusFeed:
    """The system's status as seen by this router."""

    def __init__(
        self,
        cells: CellSet,
        model: str,
        router: Callable[[], status_pb2.RouterStatus],
        draining: asyncio.Event,
        interval_s: float = _INTERVAL_S,
        watchers: StreamLimits | None = None,
        on_routers: Callable[[list[status_pb2.RouterStatus]], None] = lambda _: None,
        on_detached: Callable[[Iterable[status_pb2.DetachedRequests], float], None] = lambda *_: None,
        model_of: Callable[[Cell], ModelFolder | None] = lambda _: None,
    ) -> None:
        """`router` returns the router's own status; `watchers` limits the streams, which end when `draining` is set;
        `on_routers` is called with the status of the other routers after each poll, and `on_detached` with the detached
        requests that nobody reads, and the time of the poll (`time.monotonic`). If there are several models,
        `model_of` returns that of a cell.
        """
        self._model_of = model_of
        self._cells = cells
        self._model = model
        self._router = router
        self._draining = draining
        self._on_routers = on_routers
        self._on_detached = on_detached
        self._interval_s = interval_s
        self._samples = Samples()
        self._parts = Parts()
        self._names: dict[str, str] = {}
        self._latest: status_pb2.SystemStatus | None = None
        self._limits = watchers or watcher_limits()
        self._num_watchers = 0
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Poll until cancelled."""
        sending_away = asyncio.create_task(self._send_away())
        try:
            while True:
                self._wanted.clear()
                try:
                    await self._ask()
                except Exception:
                    # The feed must survive a bug in this router or in a scheduler.
                    logger.exception("cannot collect the status")
                # Python 3.11's wait_for loses a cancellation that arrives at its timeout.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._wanted.wait()
        finally:
            sending_away.cancel()

    async def watch(self) -> AsyncGenerator[status_pb2.SystemStatus, None]:
        """Yield the current status, including block maps, once it is known, and then every new status; the caller may
        modify the messages. Raises OverloadedError if there are too many watchers, or UnavailableError if this router
        is draining.
        """
        seen = 0
        release = self._limits.take(current_caller.get().name)
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._wanted.set()
        try:
            while True:
                status = await self._next(seen)
                status.samples.extend(self._samples.since(seen))
                seen = self._samples.last_number
                yield status
        finally:
            self._num_watchers -= 1
            release()

    async def _next(self, seen: int) -> status_pb2.SystemStatus:
        async with self._changed:
            while not self._draining.is_set():
                latest = self._latest
                is_whole = latest is not None and all(group.HasField("block_map") for group in latest.groups)
                if latest is not None and is_whole and self._samples.last_number > seen:
                    copy = status_pb2.SystemStatus()
                    copy.CopyFrom(latest)
                    return copy
                await self._changed.wait()
        raise UnavailableError("this router is draining")

    async def _send_away(self) -> None:
        await self._draining.wait()
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self) -> None:
        router = self._router()
        request = status_pb2.GetCellStatusRequest(router=router)
        request.max_map_cells = _MAX_MAP_CELLS if self._num_watchers else 0
        cells, asked_at = list(self._cells.cells.values()), time.monotonic()
        models = {cell.name: self._model_of(cell) for cell in cells}
        answers = await asyncio.gather(*(_ask_cell(cell, _for_model(request, models[cell.name])) for cell in cells))
        answered = {cell.name: answer for cell, answer in zip(cells, answers, strict=True) if answer is not None}
        for address, answer in answered.items():
            if not answer.cell or answer.cell.startswith(_ANY_ADDRESS):
                answer.cell = address
            self._names[address] = answer.cell
            if len(cells) > 1:
                for group in answer.groups:
                    group.group_id = f"{answer.cell}/{group.group_id}"
        others = {it.router_id: it for answer in answered.values() for it in answer.routers}
        others.pop(router.router_id, None)
        self._on_routers(list(others.values()))
        self._on_detached((item for answer in answered.values() for item in answer.detached), asked_at)
        silent = [self._names.get(cell.name, cell.name) for cell in cells if cell.name not in answered]
        self._samples.add(time.time(), answered)
        parts = [part for name, answer in answered.items() for part in cell_parts(answer, models[name])]
        # This router's own status is newer than the copy in a scheduler.
        parts.append(router_part(router))
        now_s, unix_s = time.monotonic(), time.time()
        shown = self._parts.update(now_s, parts, silent)
        status = status_pb2.SystemStatus(
            time_unix_ms=round(unix_s * 1e3),
            version=__version__,
            model=self._model,
            router_id=router.router_id,
            parts=shown,
            outages=self._parts.outages(now_s, unix_s),
            latency_window_s=LATENCY_WINDOW_S,
        )
        for answer in answered.values():
            _add(status, answer)
        status.groups.sort(key=lambda group: natural(group.group_id))
        async with self._changed:
            self._latest = status
            self._changed.notify_all()


def _for_model(request: status_pb2.GetCellStatusRequest, model: ModelFolder | None) -> status_pb2.GetCellStatusRequest:
    """Return the request for a cell of a model, which knows the router as one of this model."""
    if model is None:
        return request
    own = status_pb2.GetCellStatusRequest()
    own.CopyFrom(request)
    own.router.tokenizer_fingerprint = model.tokenizer_fingerprint
    own.router.template_fingerprint = model.template_fingerprint
    return own


async def _ask_cell(cell: Cell, request: status_pb2.GetCellStatusRequest) -> status_pb2.CellStatus | None:
    try:
        return await cell.watch_stub.GetStatus(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None


def _add(status: status_pb2.SystemStatus, cell: status_pb2.CellStatus) -> None:
    """Add a cell's status to the system's status."""
    status.groups.extend(cell.groups)
    for total, part in ((status.requests, cell.requests), (status.counts, cell.counts)):
        for field, value in part.ListFields():
            if field.name == "num_finished_by_reason":
                for reason, count in value.items():
                    status.counts.num_finished_by_reason[reason] += count
            else:
                setattr(total, field.name, getattr(total, field.name) + value)
