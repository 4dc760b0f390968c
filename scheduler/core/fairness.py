"""What clients leave for each other on a worker group.

Fairness costs throughput: room that is kept free, and steps that are planned later. So it is paid only while several
clients are here: one that sends twenty times as much as another must not make that one wait for its own work to end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from scheduler.core.cost_model import CostFit

if TYPE_CHECKING:
    from scheduler.core.in_flight import InFlightStep
    from scheduler.core.request import Request
    from scheduler.core.timers import Clock
    from scheduler.core.worker_group import StartCost, WorkerGroup

# A client counts as here for so long after its last request.
_PRESENT_NS = 60_000_000_000
# One part in so many of a group's rows and blocks is kept for who holds less than an equal share.
_RESERVED_PART = 16
# Recorded steps weigh half as much after 34 newer ones.
_KEPT_WEIGHT = 0.98
_MIN_STEPS_TO_PREDICT = 8
_MIN_LEAD_NS = 2_000_000


class Clients:
    """Whether requests come from several clients."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: str | None = None
        self._last_ns = 0
        self._other_ns: int | None = None  # last request of any client but the last one

    def note(self, client_id: str) -> None:
        """A request of the client comes in."""
        if client_id != self._last:
            self._other_ns = None if self._last is None else self._last_ns
            self._last = client_id
        self._last_ns = self._clock.now_ns

    @property
    def are_several(self) -> bool:
        """At least two clients sent requests lately."""
        return self._other_ns is not None and self._clock.now_ns - self._other_ns < _PRESENT_NS


class Holdings:
    """Rows and blocks of a group that the running requests of each client may take, by client id."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._blocks: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def of(self, client_id: str) -> tuple[int, int]:
        """Rows and blocks."""
        return self._rows.get(client_id, 0), self._blocks.get(client_id, 0)

    def add(self, client_id: str, num_blocks: int) -> None:
        """Count a row that takes so many blocks at most."""
        self._rows[client_id] = self._rows.get(client_id, 0) + 1
        self._blocks[client_id] = self._blocks.get(client_id, 0) + num_blocks

    def remove(self, client_id: str, num_blocks: int) -> None:
        """Count a row no longer, with as many blocks as it was added with."""
        self._rows[client_id] -= 1
        self._blocks[client_id] -= num_blocks
        if not self._rows[client_id]:
            del self._rows[client_id], self._blocks[client_id]


def holds_its_share(client_id: str, groups: Collection[WorkerGroup]) -> bool:
    """Whether a client that waits for room has an equal part of all rows or blocks already, or more."""
    clients = {client_id, *(name for group in groups for name in group.holdings)}
    num_clients = max(2, len(clients))  # one waits behind it
    held = [group.holdings.of(client_id) for group in groups]
    num_rows, num_blocks = sum(rows for rows, _ in held), sum(blocks for _, blocks in held)
    all_rows, all_blocks = (sum(group.max_batch_size for group in groups), sum(g.blocks.num_blocks for g in groups))
    return num_rows * num_clients >= all_rows or num_blocks * num_clients >= all_blocks


class Pace:
    """When the step behind one in flight is planned.

    At once while one client is here. Among several just before the step in flight is expected to end, so that a request
    that comes meanwhile waits for one step and not for two. A wrong guess costs a worker the time of the wire.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._fit = CostFit(_KEPT_WEIGHT)
        self._last_result_ns = 0

    def note_result(self, step: InFlightStep, time_ns: int) -> None:
        """The oldest step in flight came back."""
        began_ns = max(step.planned_ns, self._last_result_ns)
        if not step.adoption.entries:  # copying is no part of what a step usually takes
            self._fit.add(step.num_context_tokens, len(step.generation), (time_ns - began_ns) / 1_000)
        self._last_result_ns = time_ns

    def next_plan_ns(self, oldest: InFlightStep) -> int:
        """When to plan behind the oldest step in flight; 0 is at once."""
        if not self._clients.are_several or self._fit.num_steps < _MIN_STEPS_TO_PREDICT:
            return 0
        takes_ns = self._fit.model(0.0).step_ns(oldest.num_context_tokens, len(oldest.generation))
        return max(oldest.planned_ns, self._last_result_ns) + takes_ns - max(_MIN_LEAD_NS, takes_ns // 16)


def leaves_room(request: Request, group: WorkerGroup, cost: StartCost, num_blocks: int, num_blocks_left: int) -> bool:
    """Whether the request leaves a part of the group's rows and blocks to others, or may use that part itself.

    What can start in parts always has to, because one such request may take all there is for a long time. Others only
    while several clients are here.

    Args:
        request: A queued request.
        group: That has room for it.
        cost: Of starting it.
        num_blocks: Blocks that the policy counts for it.
        num_blocks_left: That the policy would have left.
    """
    are_several, has_parts = group.clients.are_several, len(request.sequences) > 1 and request.beams is None
    is_smallest = cost.num_rows == 1 or not has_parts
    if is_smallest and not group.active:
        return True
    if not (are_several or has_parts):
        return True
    rows, blocks = group.max_batch_size // _RESERVED_PART, group.blocks.num_blocks // _RESERVED_PART
    if are_several:
        rows = max(1, rows)
    is_too_large = cost.num_rows > group.max_batch_size - rows or num_blocks > group.blocks.num_blocks - blocks
    if is_smallest and is_too_large:
        return True  # it could never leave anything
    if group.num_free_rows - cost.num_rows >= rows and num_blocks_left >= blocks:
        return True
    return _is_within_equal_share(request.spec.client_id, group, cost.num_rows, num_blocks)


def _is_within_equal_share(client_id: str, group: WorkerGroup, num_rows: int, num_blocks: int) -> bool:
    """Whether a client would hold no more than an equal part with so many rows and blocks more."""
    num_clients = max(2, len({client_id, *group.holdings}))  # one may have nothing here yet
    held_rows, held_blocks = group.holdings.of(client_id)
    if (held_rows + num_rows) * num_clients > group.max_batch_size:
        return False
    return (held_blocks + num_blocks) * num_clients <= group.blocks.num_blocks
