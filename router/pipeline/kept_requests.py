"""Looks up and deletes requests in the schedulers, including finished requests that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from midstream.errors import MidstreamError, NotFoundError, UnavailableError
from midstream.rpc.errors import error_from_rpc
from protos import scheduler_pb2
from router.authentication import current_caller
from router.pipeline.cells import Cell, CellSet

_TRY_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_T = TypeVar("_T")


class KeptRequests:
    """Kept requests of all cells; an authenticated caller finds only its own."""

    def __init__(self, cells: CellSet) -> None:
        self._cells = cells

    async def get(self, request_id: str) -> scheduler_pb2.GetRequestResponse:
        """Return a request, given the id under which the caller knows it. Raises NotFoundError if no cell has the
        request, or UnavailableError if no responding cell has the request, and some cells do not respond.
        """
        query = scheduler_pb2.GetRequestRequest(request_id=current_caller.get().scope(request_id))
        found = await ask_cells(self._cells, lambda cell: cell.stub.GetRequest(query, timeout=_TRY_TIMEOUT_S))
        return next(iter(found.values()))

    async def arrival_time(self, request_id: str) -> int:
        """Return the Unix time, in seconds, at which a request first arrived; raises the errors of `get`."""
        return (await self.get(request_id)).request.arrival_time_unix_ns // 1_000_000_000

    async def delete(self, request_id: str) -> None:
        """Abort a request if it is running, and delete it; raises the errors of `get`."""
        query = scheduler_pb2.DeleteRequestRequest(request_id=current_caller.get().scope(request_id))
        await ask_cells(self._cells, lambda cell: cell.stub.DeleteRequest(query, timeout=_TRY_TIMEOUT_S))


async def ask_cells(cells: CellSet, call: Callable[[Cell], Awaitable[_T]]) -> dict[Cell, _T]:
    """Return the responses of all cells that do not raise NotFoundError; there is at least one. `call` may be repeated.

    Raises:
        NotFoundError: All cells raise it.
        UnavailableError: All responding cells raise NotFoundError, and some cells do not respond.
    """
    loop = asyncio.get_running_loop()
    give_up_at, delay = loop.time() + cells.unavailable_timeout_s, _FIRST_RETRY_S
    while True:
        asked = list(cells.cells.values())
        results = dict(zip(asked, await asyncio.gather(*(_answer(call(cell)) for cell in asked)), strict=True))
        answers = {cell: result for cell, result in results.items() if not isinstance(result, MidstreamError)}
        failures = [result for result in results.values() if isinstance(result, MidstreamError)]
        if answers:
            return answers
        others = [failure for failure in failures if not isinstance(failure, NotFoundError)]
        if failures and not others:
            raise failures[0]
        is_late = loop.time() + delay > give_up_at
        if others and (is_late or not isinstance(others[0], UnavailableError)):
            raise others[0]
        if is_late:
            raise UnavailableError("no scheduler found")
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_RETRY_S)


async def ask_cell(cells: CellSet, cell: Cell, call: Callable[[Cell], Awaitable[_T]]) -> _T:
    """Return the response of one cell, or of its successor; retry while the cell is unreachable. Raises the errors of
    `ask_cells`.
    """
    loop = asyncio.get_running_loop()
    give_up_at, delay = loop.time() + cells.unavailable_timeout_s, _FIRST_RETRY_S
    while True:
        current = cells.successor_of(cell) if cell.is_gone else cell
        if current is not None:
            result = await _answer(call(current))
        else:
            result = UnavailableError(f"the scheduler at {cell.name} was removed")
        if not isinstance(result, MidstreamError):
            return result
        if not isinstance(result, UnavailableError) or loop.time() + delay > give_up_at:
            raise result
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_RETRY_S)


async def _answer(call: Awaitable[_T]) -> _T | MidstreamError:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        found = error_from_rpc(error)
        is_away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return UnavailableError(found.message) if is_away else found
