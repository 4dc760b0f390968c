"""Versions of the weights: their update on all workers, and pauses of generation.

An update has two phases. All workers load the new weights beside their own and report the root of the tree over them;
if all agree, the version is stored, which is the moment of the change. Then the core lets all requests continue under
the new weights, and the workers switch. Workers that register later with other weights, for example after a restart,
are told to switch as well and get nothing to run until they have. A scheduler that dies before the version is stored
leaves the old weights, and one that dies afterwards leaves the new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from pathlib import PurePath
from typing import Protocol

from midstream.errors import (
    ConflictError,
    DeadlineError,
    ExecutionError,
    InvalidArgumentError,
    UnavailableError,
    from_proto,
)
from midstream.kind_names import DEFAULT_VERSION
from protos import weights_pb2, worker_pb2
from scheduler.core.events import GenerationPaused, GenerationResumed, WeightsChanged
from scheduler.core.pause_mode import PauseMode
from scheduler.core.worker_group import WorkerGroup
from scheduler.edge.engine import Engine
from scheduler.journal.documents import DocumentKey, Documents

logger = logging.getLogger(__name__)

MAX_VERSION = 128
_KIND = "weights"
_LOOK_INTERVAL_S = 0.25
# Loading a large model from a slow disk takes many minutes.
_PREPARE_TIMEOUT_S = 3600.0
# How long an update waits for the workers to register again. It has succeeded even if they take longer.
_SWITCH_TIMEOUT_S = 60.0
_MAX_PROBLEMS = 8
# How long after a failure a worker is told again to change its weights.
_REPEAT_S = 10.0
_PAUSES = {
    weights_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    weights_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
    weights_pb2.PAUSE_MODE_RECOMPUTE: PauseMode.RECOMPUTE,
    weights_pb2.PAUSE_MODE_FINISH: PauseMode.FINISH,
    weights_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
_PAUSES_ON_UPDATE = {
    weights_pb2.ON_UPDATE_UNSPECIFIED: None,
    weights_pb2.ON_UPDATE_RECOMPUTE: None,
    weights_pb2.ON_UPDATE_FINISH: PauseMode.FINISH,
    weights_pb2.ON_UPDATE_ABORT: PauseMode.ABORT,
}


class WeightsSender(Protocol):
    """Sends commands about weights to workers."""

    def send_weights(self, connection: bytes, message: worker_pb2.SchedulerMessage) -> None:
        """Send one of the messages prepare_weights, switch_weights and drop_weights."""


class Weights:
    """The version of the weights of one scheduler's workers.

    Attributes:
        is_updating: Whether an update is running.
    """

    def __init__(
        self, engine: Engine, sender: WeightsSender, documents: Documents, model_fingerprint: str, cell: str
    ) -> None:
        """Create the object; call `restore` before workers join."""
        self._engine, self._sender, self._documents, self._cell = engine, sender, documents, cell
        self._key = DocumentKey("", _KIND, model_fingerprint)
        self._stored: weights_pb2.WeightsVersion | None = None
        self._update = 0  # identifies the last update
        self._stored_update = 0  # identifies the change to the stored version
        self.is_updating = False
        self._task: asyncio.Task[weights_pb2.UpdateWeightsResponse] | None = None
        self._answers: dict[int, asyncio.Future[worker_pb2.WeightsPrepared]] = {}  # by epoch
        self._problems: deque[str] = deque(maxlen=_MAX_PROBLEMS)

    async def restore(self) -> None:
        """Read the version under an earlier scheduler. Call it after the requests were recovered."""
        document = await self._documents.get(self._key)
        if document is not None:
            self._stored = weights_pb2.WeightsVersion.FromString(document.data)
            self._stored_update = _new_id()
            self._tell_core(self._stored)

    @property
    def version(self) -> weights_pb2.WeightsVersion:
        """The version that all workers have, or are changing to."""
        if self._stored is not None:
            return self._stored
        version = weights_pb2.WeightsVersion(version=DEFAULT_VERSION)
        for group in self._engine.core.groups:
            version.weights_root, version.model_fingerprint = group.kind.weights_root, group.kind.model_fingerprint
            break
        return version

    def state(self) -> weights_pb2.CellWeights:
        """Return the version and how many workers have it."""
        core = self._engine.core
        num_outdated = sum(group.is_outdated for group in core.groups)
        return weights_pb2.CellWeights(
            cell=self._cell,
            version=self.version,
            num_groups=len(core.groups) - num_outdated,
            num_outdated_groups=num_outdated,
            problems=self._problems,
            is_paused=core.pauses.is_paused,
            sleep_level=core.sleep.level,
            num_sleeping_groups=sum(group.is_asleep for group in core.groups),
            is_sleeping=core.sleep.is_held,
        )

    async def update(self, request: weights_pb2.UpdateWeightsRequest) -> weights_pb2.UpdateWeightsResponse:
        """Change the weights of all workers.

        Raises:
            MidstreamError: The weights are the old ones: the request is wrong, another update is running, a worker was
                lost or cannot load these weights, or the change cannot be stored.
        """
        _check(request)
        if self.is_updating:
            raise ConflictError("another update of the weights is running; try again after it")
        self.is_updating = True
        # A caller that hangs up does not interrupt it.
        self._task = asyncio.create_task(self._change(request))
        self._task.add_done_callback(self._note_end)
        return await asyncio.shield(self._task)

    async def pause(self, mode: weights_pb2.PauseMode.ValueType) -> int:
        """Pause generation; return the number of unfinished requests once no step runs."""
        if mode not in _PAUSES:
            raise InvalidArgumentError(f"is {mode}; must be a known mode", field="mode")
        num_requests = self._engine.core.lifecycle.num_unfinished
        await self._pause(_PAUSES[mode])
        return num_requests

    def resume(self) -> None:
        """End a pause."""
        self._engine.handle(GenerationResumed(self._engine.now_ns()))

    def on_joined(self, connection: bytes, epoch: int) -> None:
        """Tell a worker that has joined with other weights to switch."""
        group = self._engine.core.membership.groups[epoch]
        if group.is_outdated and self._stored is not None:
            self._send_switch(group, self._stored)

    def on_prepared(self, result: worker_pb2.WeightsPrepared) -> None:
        """Process a worker's answer. Without a waiting update, it says why the worker cannot switch."""
        waiting = self._answers.pop(result.epoch, None) if result.update == self._update else None
        if waiting is not None:
            waiting.set_result(result)
        elif result.HasField("error"):
            group = self._engine.core.membership.groups.get(result.epoch)
            name = group.group_id if group is not None else "a worker"
            logger.error("%s cannot change its weights: %s", name, result.error.message)
            self._problems.append(f"{name}: {result.error.message}")
            # The cause may go away: a folder that is not mounted yet, for example.
            asyncio.get_running_loop().call_later(_REPEAT_S, self._repeat, result.epoch)

    def _repeat(self, epoch: int) -> None:
        group = self._engine.core.membership.groups.get(epoch)
        if group is not None and group.is_outdated and self._stored is not None and not self.is_updating:
            self._send_switch(group, self._stored)

    def _note_end(self, task: asyncio.Task[weights_pb2.UpdateWeightsResponse]) -> None:
        self.is_updating = False
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the weights were not changed: %s", error)

    async def _change(self, request: weights_pb2.UpdateWeightsRequest) -> weights_pb2.UpdateWeightsResponse:
        core = self._engine.core
        groups = core.groups
        if not groups:
            raise UnavailableError("no worker has joined")
        if core.sleep.level or any(group.is_asleep for group in groups):
            raise ConflictError("workers sleep; wake them up first, for which the tag `weights` is enough")
        self._update = _new_id()
        try:
            root, fingerprint = _agreed(await asyncio.gather(*(self._ask(group, request.path) for group in groups)))
            version = weights_pb2.WeightsVersion(
                version=request.version or root, weights_root=root, model_fingerprint=fingerprint, path=request.path
            )
            async with self.paused(_PAUSES_ON_UPDATE[request.on_update], "on_update"):
                await self._documents.put_surely(self._key, version.SerializeToString())
                self._stored, self._stored_update = version, self._update
                self._problems.clear()
                num_requests = core.lifecycle.num_unfinished
                for group in core.groups:
                    self._send_switch(group, version)
                self._tell_core(version)
        except BaseException:
            drop = worker_pb2.DropWeights(update=self._update)
            for group in core.groups:
                self._sender.send_weights(group.connection, worker_pb2.SchedulerMessage(drop_weights=drop))
            if self._stored is not None:
                # Preparing other weights has interrupted workers that were changing to the stored ones.
                self._stored_update = _new_id()
                for group in core.groups:
                    if group.is_outdated:
                        self._send_switch(group, self._stored)
            raise
        logger.info("changed the weights", extra={"version": version.version, "weights_root": root})
        names = {group.group_id for group in groups}

        def have_switched() -> bool:
            return names <= {group.group_id for group in core.groups if not group.is_outdated}

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SWITCH_TIMEOUT_S):
                await self._engine.wait_until(have_switched)
        return weights_pb2.UpdateWeightsResponse(version=version, num_requests=num_requests)

    def _tell_core(self, version: weights_pb2.WeightsVersion) -> None:
        now_ns = self._engine.now_ns()
        fingerprint, root = version.model_fingerprint, version.weights_root
        self._engine.handle(WeightsChanged(now_ns, fingerprint, root, version.version))

    def _send_switch(self, group: WorkerGroup, version: weights_pb2.WeightsVersion) -> None:
        switch = worker_pb2.SwitchWeights(
            epoch=group.epoch,
            update=self._stored_update,
            path=version.path,
            weights_root=version.weights_root,
            weights_version=version.version,
        )
        self._sender.send_weights(group.connection, worker_pb2.SchedulerMessage(switch_weights=switch))

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode | None, field: str) -> AsyncIterator[None]:
        """Pause generation while the body runs; a pause that has begun before it goes on after it. Raises
        InvalidArgumentError, which names `field`, if running requests cannot finish.
        """
        was_paused = self._engine.core.pauses.is_paused
        if mode is PauseMode.FINISH and (was_paused or self._engine.core.sleep.is_held):
            reason = "running requests cannot finish while generation is paused; resume it, or choose another value"
            raise InvalidArgumentError(reason, field=field)
        if mode is None:
            yield
            return
        try:
            await self._pause(mode)
            yield
        finally:
            if not was_paused:
                self.resume()

    async def _pause(self, mode: PauseMode) -> None:
        """Pause generation. Raises ConflictError if it is resumed before the pause has taken effect."""
        pauses = self._engine.core.pauses
        self._engine.handle(GenerationPaused(self._engine.now_ns(), mode))
        await self._engine.wait_until(lambda: pauses.is_settled or not pauses.is_paused)
        if not pauses.is_paused:
            raise ConflictError("generation was resumed before the pause had taken effect")

    async def _ask(self, group: WorkerGroup, path: str) -> worker_pb2.WeightsPrepared:
        """Return a worker's answer. Raises UnavailableError if it is lost first, or DeadlineError."""
        answer: asyncio.Future[worker_pb2.WeightsPrepared] = asyncio.get_running_loop().create_future()
        self._answers[group.epoch] = answer
        prepare = worker_pb2.PrepareWeights(epoch=group.epoch, update=self._update, path=path)
        self._sender.send_weights(group.connection, worker_pb2.SchedulerMessage(prepare_weights=prepare))
        try:
            async with asyncio.timeout(_PREPARE_TIMEOUT_S):
                while not answer.done():
                    await asyncio.wait((answer,), timeout=_LOOK_INTERVAL_S)
                    if group.epoch not in self._engine.core.membership.groups and not answer.done():
                        raise UnavailableError(f"{group.group_id} was lost while it loaded the weights; try again")
        except TimeoutError:
            raise DeadlineError(f"{group.group_id} did not load the weights in time") from None
        finally:
            if self._answers.get(group.epoch) is answer:
                del self._answers[group.epoch]
        return answer.result()


def _check(request: weights_pb2.UpdateWeightsRequest) -> None:
    if not PurePath(request.path).is_absolute() or "\0" in request.path:
        raise InvalidArgumentError("must be an absolute path", field="path")
    if len(request.version) > MAX_VERSION or not request.version.isprintable():
        raise InvalidArgumentError(f"must be at most {MAX_VERSION} printable characters", field="version")
    if request.on_update not in _PAUSES_ON_UPDATE:
        raise InvalidArgumentError(f"is {request.on_update}; must be a known value", field="on_update")


def _agreed(results: list[worker_pb2.WeightsPrepared]) -> tuple[str, str]:
    """Return the root and the fingerprint that all workers found."""
    for result in results:
        if result.HasField("error"):
            raise from_proto(result.error)
    found = {(result.weights_root, result.model_fingerprint) for result in results}
    if len(found) > 1:
        raise InvalidArgumentError("the files differ between workers", field="path")
    root, fingerprint = found.pop()
    if not root:
        raise ExecutionError("a worker did not name the root of the weights")
    return root, fingerprint


def _new_id() -> int:
    return secrets.randbits(63) + 1
