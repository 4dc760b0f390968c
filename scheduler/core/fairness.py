"""Fairness between clients on a worker group.

The goal: a client that sends twenty times as much as another must not make the other wait until all its work is done.
Fairness costs throughput, because capacity is kept free and steps are planned later, so it applies only while several
clients are active.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.cost_model import CostFit
from scheduler.core.in_flight import InFlightStep
from scheduler.core.timers import Clock

# A client counts as active for this long after its last request.
_PRESENT_NS = 60_000_000_000
# The weight of a recorded step halves with every 34 newer ones.
_KEPT_WEIGHT = 0.98
_MIN_STEPS_TO_PREDICT = 8
_MIN_LEAD_NS = 2_000_000


class Clients:
    """Tracks whether more than one client is sending requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: str | None = None
        self._last_ns = 0
        self._other_ns: int | None = None  # time of the last request of any client other than the most recent one

    def note(self, client_id: str) -> None:
        """Record a request of the client."""
        if client_id != self._last:
            self._other_ns = None if self._last is None else self._last_ns
            self._last = client_id
        self._last_ns = self._clock.now_ns

    @property
    def are_several(self) -> bool:
        """Return whether at least two clients have recently sent requests."""
        return self._other_ns is not None and self._clock.now_ns - self._other_ns < _PRESENT_NS


class Holdings:
    """Maximum numbers of rows and blocks of a group that each client's running requests may take, by client id."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._blocks: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def of(self, client_id: str) -> tuple[int, int]:
        """Return the client's numbers of rows and blocks."""
        return self._rows.get(client_id, 0), self._blocks.get(client_id, 0)

    def add(self, client_id: str, num_blocks: int) -> None:
        """Add a row, and the maximum number of blocks that it may take."""
        self._rows[client_id] = self._rows.get(client_id, 0) + 1
        self._blocks[client_id] = self._blocks.get(client_id, 0) + num_blocks

    def remove(self, client_id: str, num_blocks: int) -> None:
        """Remove a row, with the same number of blocks as in the call of `add`."""
        self._rows[client_id] -= 1
        self._blocks[client_id] -= num_blocks
        if not self._rows[client_id]:
            del self._rows[client_id], self._blocks[client_id]


class Pace:
    """Decides when to plan the step after the one in flight.

    With one active client, the step is planned immediately. With several, it is planned just before the step in flight
    is expected to end, so that a new request waits for one step instead of two. A wrong estimate leaves the worker idle
    for one round trip.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._fit = CostFit(_KEPT_WEIGHT)
        self._last_result_ns = 0

    def note_result(self, step: InFlightStep, time_ns: int) -> None:
        """Record the result of the oldest step in flight."""
        began_ns = max(step.planned_ns, self._last_result_ns)
        if not step.adoption.entries:  # copying blocks is not part of a normal step's time
            self._fit.add(step.num_context_tokens, len(step.generation), (time_ns - began_ns) / 1_000)
        self._last_result_ns = time_ns

    def next_plan_ns(self, oldest: InFlightStep) -> int:
        """Return when to plan the step after the oldest one in flight; 0 means immediately."""
        if not self._clients.are_several or self._fit.num_steps < _MIN_STEPS_TO_PREDICT:
            return 0
        takes_ns = self._fit.model(0.0).step_ns(oldest.num_context_tokens, len(oldest.generation))
        return max(oldest.planned_ns, self._last_result_ns) + takes_ns - max(_MIN_LEAD_NS, takes_ns // 16)
