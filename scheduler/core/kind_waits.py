"""Requests that wait for a worker group of the kind on which they started.

Another kind would continue with other tokens, so such a request is set aside while it has no usable group of its own
kind, and returns to the queue when there is one. After `no_worker_timeout_ns`, `lost_kind` decides: the request moves
to another kind, which its stream reports, or ends, or waits on.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from scheduler.core.failure import UNAVAILABLE, Failure
from scheduler.core.kind import Kind, LostKind
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.membership import Membership
from scheduler.core.request import FinishReason, Request
from scheduler.core.shared import Shared

# A held request may start only when it is released.
_NEVER_NS = (1 << 63) - 1
_MAX_LOST = 256
# Number of ended requests that may be kept, in addition to as many as wait.
_MAX_ENDED = 64


class KindWaits:
    """The requests of one core that are set aside."""

    def __init__(self, shared: Shared, membership: Membership, lifecycle: Lifecycle) -> None:
        self._membership, self._lifecycle = membership, lifecycle
        self._config, self._clock = shared.config, shared.clock
        self._queue, self._timers = shared.queue, shared.timers
        self._waiting: dict[Request, int] = {}  # the time at which `lost_kind` applies
        self._max_waiting = _MAX_ENDED
        self._lost_ns: OrderedDict[Kind, int] = OrderedDict()  # when a group of each kind was last lost
        membership.on_change = self._look_again
        membership.on_loss = self._note_loss

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def num_waiting(self) -> int:
        """Number of requests that are set aside."""
        return sum(request in self._queue for request in list(self._waiting))

    def set_aside(self, request: Request) -> bool:
        """Set a queued request aside if only groups of other kinds could run it; return whether it was set aside."""
        if request in self._waiting or not request.is_bound or self._has_home(request):
            return False
        if len(self._waiting) > self._max_waiting:
            self._waiting = {other: due_ns for other, due_ns in self._waiting.items() if other in self._queue}
            self._max_waiting = 2 * len(self._waiting) + _MAX_ENDED
        lost = [time_ns for kind, time_ns in self._lost_ns.items() if kind.agrees_with(request.known_kind)]
        due_ns = max(request.waiting_since_ns, *lost, 0) + self._config.no_worker_timeout_ns
        self._waiting[request] = due_ns
        self._queue.hold(request, _NEVER_NS)
        if self._config.lost_kind != LostKind.WAIT:
            self._timers.at(due_ns, partial(self._give_up, request.request_id, request.ordinal))
        return True

    def _has_home(self, request: Request) -> bool:
        return any(
            not group.is_held_off and self._membership.suits(request, group) and group.is_large_enough(request)
            for group in self._membership.groups.values()
        )

    def _note_loss(self, kind: Kind) -> None:
        self._lost_ns.pop(kind, None)
        self._lost_ns[kind] = self._clock.now_ns
        if len(self._lost_ns) > _MAX_LOST:
            self._lost_ns.popitem(last=False)

    def _look_again(self) -> None:
        """Return requests to the queue for which there is a group now; forget those that have ended."""
        for request in list(self._waiting):
            if request not in self._queue:
                del self._waiting[request]
            elif self._has_home(request):
                self._release(request)

    def _release(self, request: Request) -> None:
        del self._waiting[request]
        self._queue.release(request)

    def _give_up(self, request_id: str, ordinal: int, now_ns: int) -> None:
        """Apply `lost_kind` to a request that has waited long enough."""
        request = self._lifecycle.requests.get(request_id)
        if request is None or request.ordinal != ordinal or now_ns < self._waiting.get(request, _NEVER_NS):
            return
        if request not in self._queue:
            del self._waiting[request]
        elif self._membership.is_changing:
            self._waiting[request] = now_ns + self._config.no_worker_timeout_ns
            self._timers.at(self._waiting[request], partial(self._give_up, request_id, ordinal))
        elif self._config.lost_kind == LostKind.MOVE:
            request.allow_change_of_kind()
            self._release(request)
        elif request.spec.deadline_ns is None:
            message = "no worker of the kind that computed its first tokens connected in time; see lost_kind"
            self._lifecycle.end(request, FinishReason.ERROR, Failure(UNAVAILABLE, message))
            self._waiting.pop(request, None)
