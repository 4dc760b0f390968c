"""Pauses of generation, for an administrator who wants no step to run."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.events import GenerationPaused, GenerationResumed
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.membership import Membership
from scheduler.core.pause_mode import PauseMode
from scheduler.core.request import FinishReason, Request, RequestState
from scheduler.core.shared import Shared
from scheduler.core.worker_group import WorkerGroup

# A held request may start only when it is released.
_NEVER_NS = (1 << 63) - 1
# Number of ended requests that may be kept, in addition to as many as are held.
_MAX_ENDED = 64


class Pauses:
    """Whether one core is paused, and the requests that may not start meanwhile."""

    def __init__(
        self,
        shared: Shared,
        membership: Membership,
        lifecycle: Lifecycle,
        release: Callable[[WorkerGroup, list[Request]], None],
    ) -> None:
        """`release` takes requests off their group and queues them again."""
        self._queue = shared.queue
        self._membership, self._lifecycle, self._release = membership, lifecycle, release
        self._mode: PauseMode | None = None
        self._held: dict[Request, None] = {}
        self._max_held = _MAX_ENDED

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused, even if requests still finish."""
        return self._mode is not None

    @property
    def num_held(self) -> int:
        """Number of requests that are held back, with some that have ended."""
        return len(self._held)

    @property
    def may_plan(self) -> bool:
        """Whether steps may be planned."""
        return self._mode in (None, PauseMode.FINISH)

    @property
    def is_settled(self) -> bool:
        """Whether a pause has taken effect: no step runs, and none will until it ends."""
        if self._mode is None or any(group.in_flight for group in self._membership.groups.values()):
            return False
        if self._mode is not PauseMode.FINISH:
            return True
        return sum(request in self._queue for request in self._held) == self._lifecycle.num_unfinished

    def pause(self, event: GenerationPaused) -> None:
        """Begin a pause, or change its mode."""
        mode = event.mode
        if mode is not PauseMode.FINISH:
            self._release_held()
        if mode is PauseMode.ABORT:
            for request in list(self._lifecycle.requests.values()):
                if request.state is not RequestState.FINISHED:
                    self._lifecycle.end(request, FinishReason.ABORT)
        elif mode is PauseMode.RECOMPUTE:
            for group in self._membership.groups.values():
                self._release(group, list(group.active))
        elif mode is PauseMode.FINISH:
            for request in list(self._queue):
                self._hold(request)
        self._mode = mode

    def resume(self, _: GenerationResumed) -> None:
        """End the pause."""
        self._mode = None
        self._release_held()

    def note_submitted(self, request: Request) -> None:
        """Hold a new request back while the others finish."""
        if self._mode is PauseMode.FINISH:
            self._hold(request)

    def _hold(self, request: Request) -> None:
        """Keep a queued request that has not started from starting."""
        if request.kind is None and request not in self._held:
            if len(self._held) >= self._max_held:
                self._held = {other: None for other in self._held if other in self._queue}
                self._max_held = 2 * len(self._held) + _MAX_ENDED
            self._queue.hold(request, _NEVER_NS)
            self._held[request] = None

    def _release_held(self) -> None:
        held, self._held = self._held, {}
        for request in sorted(held, key=lambda request: request.ordinal, reverse=True):  # the oldest becomes the first
            if request in self._queue:
                self._queue.release(request)
