"""Capacity policies: which requests may hold KV blocks of a worker group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from scheduler.core.request import Request
from scheduler.core.worker_group import StartCost, WorkerGroup

# A group reserves 1/_RESERVED_PART of its rows and blocks for clients with less than an equal share.
_RESERVED_PART = 16


class CapacityScheduler(ABC):
    """Decides which requests hold blocks. A policy is stateless: all that it needs is in the group."""

    @abstractmethod
    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether a queued request may take rows and blocks of the group now. Must not change any state.

        Requests that are too large even for an empty group have already been rejected.
        """

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return how many of the request's waiting sequences may take rows and blocks now; with 0 the request has to
        wait.

        By default this is none of them or as many as an empty group could start together, according to `can_start`. The
        others stay in the queue and are tried again; all sequences of a request run on the same group. Must not change
        any state.
        """
        return group.num_startable(request) if self.can_start(request, group) else 0

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        """Return the queued requests to start on the group, in order; None means to follow the queue's order.

        Each is started if it `can_start` at that point, and skipped if not. `group.active` are the running requests.
        Must not change any state.

        Args:
            queued: All waiting requests, in the queue's order.
            group: The group to start them on.
        """
        return None

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return the active requests that must release their blocks so that the others can run their next step.

        They are queued again ahead of new requests, and resume by recomputing their tokens. Must not change any state.
        """
        return []


class GuaranteedNoEvict(CapacityScheduler):
    """Admits only requests that can run to completion: blocks for their longest possible output are reserved at the
    start.
    """

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether all blocks that the request may ever need are available, not counting those reserved for
        others.
        """
        return wants_context(request, group) and has_room_to_the_end(request, group, leave_room=True)

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return the maximum number of sequences that can all run to completion."""
        if not wants_context(request, group):
            return 0
        return _largest_part(request, lambda part: has_room_to_the_end(request, group, part, leave_room=True))


class MaxUtilization(CapacityScheduler):
    """Admits as many requests as fit now; when blocks run short, pauses some, in the order of `next_to_pause`."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the request's known tokens and one more token fit, with some headroom for the growth of
        running requests.
        """
        return wants_context(request, group) and _has_room_to_grow(request, group)

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return the maximum number of sequences that fit, with some headroom for the growth of running requests."""
        if not wants_context(request, group):
            return 0
        return _largest_part(request, lambda part: _has_room_to_grow(request, group, part))

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return as many requests as must be paused so that every other sequence gets the block for its next step.

        Requests whose last step is in flight are not paused: they are about to release their blocks, and sequences that
        lack a block wait until then.
        """
        num_missing = _num_blocks_for_generation(group) - group.blocks.num_available
        if num_missing <= 0:
            return []
        active = list(group.active)
        ending = {request for request in active if _has_last_step_in_flight(request)}
        paused: list[Request] = []
        while num_missing > 0 and (request := next_to_pause(active, group, ending)) is not None:
            active.remove(request)
            paused.append(request)
            num_missing -= _num_blocks_given_back(request, group)
        return paused


class StaticBatch(CapacityScheduler):
    """Starts a new batch only when the previous one has finished; all requests of a batch can run to completion."""

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether no request of the current batch has run yet and the request's longest possible output fits."""
        return group.num_on_worker == 0 and has_room_to_the_end(request, group)


def next_to_pause(active: Sequence[Request], group: WorkerGroup, kept: Collection[Request] = ()) -> Request | None:
    """Return the request to pause so that the other active ones can continue, or None if none may be paused.

    Requests of the lowest priority are paused first; among these, requests of clients that hold more than an equal
    share of the blocks; among these, the newest. The most urgent request is never paused, so some request always runs
    to its end.

    Args:
        active: Requests that hold blocks.
        group: Where they run.
        kept: Requests that must not be paused.
    """
    first = min(active, key=lambda request: request.order)
    choices = [request for request in active if request is not first and request not in kept]
    if not choices:
        return None
    greedy = _clients_above_their_share(active, group)
    return max(choices, key=lambda r: (-r.spec.priority, r.spec.client_id in greedy, r.ordinal))


def wants_context(request: Request, group: WorkerGroup) -> bool:
    """Return whether the group's next step has token budget left, or no context of the request's client runs in the
    group, or only longer ones, of which a step computes only a part.

    Thus urgent requests can still overtake waiting ones, and no request waits until the long contexts of others are
    computed.
    """
    if group.num_context_tokens < max(1, group.max_num_tokens - len(group.generating)):
        return True
    own = [sequence for sequence in group.context if sequence.request.spec.client_id == request.spec.client_id]
    if own and not group.splits_contexts:
        return False
    num_tokens = min((sequence.num_tokens for sequence in request.waiting_sequences), default=0)
    return all(num_tokens < sequence.num_context_tokens for sequence in own)


def has_room_for(request: Request, group: WorkerGroup) -> bool:
    """Return whether a request that runs on another group could run to completion on this one."""
    return (
        wants_context(request, group)
        and request.num_rows <= group.num_free_rows
        and group.blocks_alone(request) <= group.tables.num_blocks_to_reserve
    )


def has_room_now(request: Request, group: WorkerGroup) -> bool:
    """Return whether enough rows and blocks are free for the known tokens and one more token of as many sequences as an
    empty group could start together.
    """
    cost = group.start_cost(request)
    return cost.num_rows <= group.num_free_rows and cost.num_blocks_at_once <= group.blocks.num_available


def has_room_to_the_end(
    request: Request, group: WorkerGroup, num_sequences: int | None = None, *, leave_room: bool = False
) -> bool:
    """Return whether rows and blocks are free for the request's longest possible output, not counting those reserved
    for others.

    Args:
        request: A queued request.
        group: Where it would start.
        num_sequences: How many of its waiting sequences start; by default as many as an empty group could start.
        leave_room: Leave some capacity for requests of other clients.
    """
    cost = group.start_cost(request, num_sequences)
    num_left = group.tables.num_blocks_to_reserve - cost.num_blocks_to_end
    # With attention windows, running sequences may hold blocks in addition to those that are counted for them.
    if cost.num_rows > group.num_free_rows or num_left < 0 or cost.num_blocks_at_once > group.blocks.num_available:
        return False
    return not leave_room or _leaves_room(request, group, cost, cost.num_blocks_to_end, num_left)


def _has_room_to_grow(request: Request, group: WorkerGroup, num_sequences: int | None = None) -> bool:
    cost = group.start_cost(request, num_sequences)
    headroom = min(len(group.active), group.blocks.num_blocks // 32)
    num_left = group.blocks.num_available - cost.num_blocks_at_once - headroom
    if cost.num_rows > group.num_free_rows or num_left < 0:
        return False
    return _leaves_room(request, group, cost, cost.num_blocks_at_once, num_left)


def _largest_part(request: Request, fits: Callable[[int], bool]) -> int:
    """Return the maximum number of a request's waiting sequences that fit together; for a beam search, all or none."""
    num_waiting = len(request.waiting_sequences)
    if fits(num_waiting):
        return num_waiting
    if num_waiting < 2 or request.beams is not None or not fits(1):
        return 0
    fitting, too_many = 1, num_waiting
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def _clients_above_their_share(active: Sequence[Request], group: WorkerGroup) -> Collection[str]:
    """Return the clients whose active requests hold more than an equal share of the group's blocks."""
    held: dict[str, set[int]] = {request.spec.client_id: set() for request in active}
    if len(held) == 1:
        return ()
    for request in active:
        for sequence in request.placed_sequences:
            held[request.spec.client_id].update(sequence.held_blocks)
    return {client_id for client_id, blocks in held.items() if len(blocks) * len(held) > group.blocks.num_blocks}


def _has_last_step_in_flight(request: Request) -> bool:
    """Return whether all tokens of the request's sequences on the group are planned."""
    placed = [sequence for sequence in request.running_sequences if sequence.row is not None]
    return all(sequence.num_computed >= sequence.max_num_tokens for sequence in placed)


def _num_blocks_for_generation(group: WorkerGroup) -> int:
    return len([s for s in group.generating if s.num_computed == s.checkpoint and s.num_computed < s.max_num_tokens])


def _num_blocks_given_back(request: Request, group: WorkerGroup) -> int:
    """Return the number of blocks that pausing the request frees: blocks that no other request holds, and those that
    its next step would need.
    """
    num_blocks = 0
    for sequence in request.placed_sequences:
        num_blocks += sum(1 for block in sequence.held_blocks if group.blocks.num_owners(block) == 1)
        num_blocks += sequence.num_computed == sequence.checkpoint < sequence.max_num_tokens
    return num_blocks


def _leaves_room(request: Request, group: WorkerGroup, cost: StartCost, num_blocks: int, num_blocks_left: int) -> bool:
    """Return whether the request leaves a reserve of the group's rows and blocks to other clients, or may use the
    reserve itself.

    Requests that can start in parts must always leave the reserve, because one of them could take all capacity for a
    long time. Other requests must leave it only while several clients are active.

    Args:
        request: A queued request.
        group: A group that has room for it.
        cost: The cost of starting it.
        num_blocks: Number of blocks that the policy counts for it.
        num_blocks_left: Number of blocks that would then be left.
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
        return True  # the request could never leave that much free
    if group.num_free_rows - cost.num_rows >= rows and num_blocks_left >= blocks:
        return True
    return _is_within_equal_share(request.spec.client_id, group, cost.num_rows, num_blocks)


def _is_within_equal_share(client_id: str, group: WorkerGroup, num_rows: int, num_blocks: int) -> bool:
    """Return whether a client would hold at most its equal share after taking this many more rows and blocks."""
    num_clients = max(2, len({client_id, *group.holdings}))  # another client may not hold anything here yet
    held_rows, held_blocks = group.holdings.of(client_id)
    if (held_rows + num_rows) * num_clients > group.max_batch_size:
        return False
    return (held_blocks + num_blocks) * num_clients <= group.blocks.num_blocks


CAPACITY_SCHEDULERS: dict[str, type[CapacityScheduler]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}
