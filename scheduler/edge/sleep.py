"""Sleep of the workers, as administrators want it: stored, so that it outlives workers and schedulers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from midstream.errors import ConflictError, DeadlineError, InvalidArgumentError, UnsupportedError
from protos import journal_pb2, weights_pb2
from scheduler.core.events import SleepSet
from scheduler.core.pause_mode import PauseMode
from scheduler.core.sleep import FEATURE
from scheduler.edge.engine import Engine
from scheduler.edge.weights import Weights
from scheduler.journal.documents import DocumentKey, Documents

LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")
_KIND = "sleep"
# How long a call waits for the workers. The level is in effect even if they take longer.
_SLEEP_TIMEOUT_S, _WAKE_TIMEOUT_S = 60.0, 600.0
_PAUSES = {
    weights_pb2.PAUSE_MODE_UNSPECIFIED: None,
    weights_pb2.PAUSE_MODE_KEEP: None,
    weights_pb2.PAUSE_MODE_RECOMPUTE: None,
    weights_pb2.PAUSE_MODE_FINISH: PauseMode.FINISH,
    weights_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}


class WorkerSleep:
    """Lets the workers of one scheduler sleep, and wakes them."""

    def __init__(self, engine: Engine, documents: Documents, weights: Weights, model_fingerprint: str) -> None:
        """Create the object; call `restore` before workers join."""
        self._engine, self._documents, self._weights = engine, documents, weights
        self._key = DocumentKey("", _KIND, model_fingerprint)

    async def restore(self) -> None:
        """Read what administrators wanted under an earlier scheduler."""
        document = await self._documents.get(self._key)
        if document is not None:
            self._tell_core(journal_pb2.JournalSleep.FromString(document.data))

    async def sleep(self, request: weights_pb2.SleepRequest) -> int:
        """Let all workers sleep; return the number of unfinished requests.

        Raises:
            InvalidArgumentError: The level or the mode is wrong.
            UnsupportedError: A worker cannot sleep.
            ConflictError: The weights are being updated.
        """
        if request.level not in LEVELS:
            raise InvalidArgumentError(f"is {request.level}; must be 1 or 2", field="level")
        if request.mode not in _PAUSES:
            raise InvalidArgumentError(f"is {request.mode}; must be a known mode", field="mode")
        core = self._engine.core
        for group in core.groups:
            if FEATURE not in group.registration.features:
                reason = "has several ranks or encodes images, and cannot sleep; stop it, and start it again"
                raise UnsupportedError(f"{group.group_id} {reason}")
        if self._weights.is_updating:
            raise ConflictError("the weights are being updated; try again after it")
        async with self._weights.paused(_PAUSES[request.mode], "mode"):
            num_requests, names = core.lifecycle.num_unfinished, {group.group_id for group in core.groups}
            await self._set(journal_pb2.JournalSleep(level=request.level, is_held=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SLEEP_TIMEOUT_S):
                await self._engine.wait_until(
                    lambda: core.sleep.level != request.level or names <= self._names(request.level)
                )
        return num_requests

    async def wake(self, tags: Iterable[str]) -> None:
        """Wake all workers, and let steps run again if the tags are none or contain `kv_cache`.

        Raises:
            InvalidArgumentError: A tag is unknown.
            DeadlineError: Some workers are not ready in time; the others are awake.
        """
        wanted = set(tags) or set(TAGS)
        if unknown := sorted(wanted.difference(TAGS)):
            raise InvalidArgumentError(f"is {unknown[0]!r}; must be one of {', '.join(TAGS)}", field="tags")
        core = self._engine.core
        names = {group.group_id for group in core.groups}
        is_held = core.sleep.is_held and "kv_cache" not in wanted
        await self._set(journal_pb2.JournalSleep(level=0, is_held=is_held))
        try:
            async with asyncio.timeout(_WAKE_TIMEOUT_S):
                await self._engine.wait_until(lambda: core.sleep.level > 0 or names <= self._names(0))
        except TimeoutError:
            raise DeadlineError("some workers have not woken up in time; see GetStatus") from None

    def _names(self, level: int) -> set[str]:
        return {
            group.group_id
            for group in self._engine.core.groups
            if group.registration.sleep_level == level and (level or not group.is_asleep)
        }

    async def _set(self, stored: journal_pb2.JournalSleep) -> None:
        await self._documents.put_surely(self._key, stored.SerializeToString())
        self._tell_core(stored)

    def _tell_core(self, stored: journal_pb2.JournalSleep) -> None:
        self._engine.handle(SleepSet(self._engine.now_ns(), stored.level, stored.is_held))
