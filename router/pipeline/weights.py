"""Administration of the weights in all cells of a router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from midstream.errors import ConflictError, InvalidArgumentError, MidstreamError
from midstream.rpc.errors import error_from_rpc
from protos import weights_pb2
from router.pipeline.cells import Cells

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub

_TIMEOUT_S = 10.0
R = TypeVar("R")


class WeightsAdmin:
    """Calls every cell, and reports the outcome of all of them."""

    def __init__(self, cells: Cells, update_root: str, own_folder: str) -> None:
        """Create the object.

        Args:
            update_root: Folder below which weights may be loaded; empty if that is disabled.
            own_folder: Folder of the served model, which is always allowed.
        """
        self._cells, self._update_root, self._own_folder = cells, update_root, own_folder

    async def update(self, request: weights_pb2.UpdateWeightsRequest) -> weights_pb2.UpdateWeightsResponse:
        """Change the weights in every cell.

        Raises:
            ConflictError: Some cells have changed, and others have not.
            MidstreamError: No cell has changed, or, with UnavailableError and DeadlineError, perhaps one has.
        """
        self._check_path(request.path)
        found = await self._ask(lambda stub: stub.UpdateWeights(request))
        done = {name: item for name, item in found.items() if not isinstance(item, MidstreamError)}
        failed = {name: item for name, item in found.items() if isinstance(item, MidstreamError)}
        if done and failed:
            name, error = next(iter(failed.items()))
            raise ConflictError(
                f"the weights were changed in {', '.join(sorted(done))}, but not in {', '.join(sorted(failed))} "
                f"({name}: {error.message}); repeat the call until it succeeds"
            )
        for error in failed.values():
            raise error
        response = next(iter(done.values()))
        response.num_requests = sum(item.num_requests for item in done.values())
        return response

    async def state(self) -> list[weights_pb2.CellWeights]:
        """Return the version of each cell."""
        request = weights_pb2.GetWeightsVersionRequest()
        answers = await self._all(lambda stub: stub.GetWeightsVersion(request, timeout=_TIMEOUT_S))
        return [cell for answer in answers for cell in answer.cells]

    async def pause(self, mode: weights_pb2.PauseMode.ValueType) -> int:
        """Pause every cell; return the number of unfinished requests."""
        request = weights_pb2.PauseGenerationRequest(mode=mode)
        return sum(item.num_requests for item in await self._all(lambda stub: stub.PauseGeneration(request)))

    async def resume(self) -> None:
        """Resume every cell."""
        request = weights_pb2.ResumeGenerationRequest()
        await self._all(lambda stub: stub.ResumeGeneration(request, timeout=_TIMEOUT_S))

    async def sleep(self, request: weights_pb2.SleepRequest) -> int:
        """Let the workers of every cell sleep; return the number of unfinished requests."""
        return sum(item.num_requests for item in await self._all(lambda stub: stub.Sleep(request)))

    async def wake(self, tags: Iterable[str]) -> None:
        """Wake the workers of every cell."""
        request = weights_pb2.WakeUpRequest(tags=tags)
        await self._all(lambda stub: stub.WakeUp(request))

    def _check_path(self, path: str) -> None:
        if not PurePath(path).is_absolute() or "\0" in path:
            raise InvalidArgumentError("must be an absolute path", field="path")
        place = PurePath(os.path.normpath(path))
        if place == PurePath(os.path.normpath(self._own_folder)):
            return
        if not self._update_root:
            raise InvalidArgumentError(
                "only the served model's own folder may be loaded; to allow others, set MIDSTREAM_UPDATE_ROOT "
                "(--update-root) of routers and workers to a folder above them",
                field="path",
            )
        # Workers check symbolic links, because the files are on their side.
        if not place.is_relative_to(os.path.normpath(self._update_root)):
            raise InvalidArgumentError("is outside the folder for updates (--update-root)", field="path")

    async def _all(self, call: Callable[[SchedulerAsyncStub], Awaitable[R]]) -> list[R]:
        answers = []
        for answer in (await self._ask(call)).values():
            if isinstance(answer, MidstreamError):
                raise answer
            answers.append(answer)
        return answers

    async def _ask(self, call: Callable[[SchedulerAsyncStub], Awaitable[R]]) -> dict[str, R | MidstreamError]:
        self._cells.any()  # raises if there is none
        cells = dict(self._cells.cells)

        async def ask(stub: SchedulerAsyncStub) -> R | MidstreamError:
            try:
                return await call(stub)
            except grpc.aio.AioRpcError as error:
                return error_from_rpc(error)

        answers = await asyncio.gather(*(ask(cell.watch_stub) for cell in cells.values()))
        return dict(zip(cells, answers, strict=True))
