"""Placement: starts a queued request on the worker group with the longest cached prefix and the least work.

A prefix counts as cached if it is in the group's pool or can be fetched from its tiers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scheduler.core.admission import too_large
from scheduler.core.capacity_scheduler import has_room_for
from scheduler.core.kind_waits import KindWaits
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.membership import Membership
from scheduler.core.request import FinishReason, Request
from scheduler.core.request_scheduler import RequestScheduler
from scheduler.core.role import Role
from scheduler.core.shared import Shared
from scheduler.core.worker_group import WorkerGroup

# Weight of a generating sequence in the comparison of groups, in context tokens.
_TOKENS_PER_ACTIVE_SEQUENCE = 16
# Maximum number of queue heads to consider while the first of them has to wait.
_MAX_LOOKED_AT = 8


class Placement:
    """Starts queued requests as the capacity policy allows."""

    def __init__(
        self,
        shared: Shared,
        scheduler: RequestScheduler,
        membership: Membership,
        lifecycle: Lifecycle,
        kind_waits: KindWaits,
    ) -> None:
        self._scheduler, self._membership, self._lifecycle = scheduler, membership, lifecycle
        self._kind_waits = kind_waits
        self._queue, self._clock = shared.queue, shared.clock

    def start_queued(self) -> None:
        """Start queued requests as the policy selects them, or otherwise in queue order.

        In queue order, a request may start before one that has to wait if that is fair.
        """
        if len(self._queue) and self._start_selected():
            return
        while (head := self._queue.head()) is not None:
            if not self._try_start(head) and not self._start_behind(head):
                self._read_ahead(head)
                return

    def _read_ahead(self, head: Request) -> None:
        """Have workers read the stored blocks of the next requests while these wait."""
        groups = [group for group in self._membership.groups.values() if group.stored]
        for request in [head, *self._queue.behind(head, _MAX_LOOKED_AT)] if groups else ():
            if request.is_read_ahead or request.group is not None:
                continue
            able = [
                group for group in groups if self.could_run(request, group) and not self._is_for_others(request, group)
            ]
            if able:
                max(able, key=lambda group: group.num_fetchable_tokens(request)).read_ahead(request)
                request.note_read_ahead()

    def _start_selected(self) -> bool:
        """Start the requests that the policy selects for each group; return False if the policy leaves the order to the
        queue.
        """
        for group in self._membership.groups.values():
            chosen = self._scheduler.select(self._suiting(group), group)
            if chosen is None:
                return False
            for request in chosen:
                if request in self._queue and (num_sequences := self._num_to_start(request, group)):
                    self._start(request, group, num_sequences)
        for request in list(self._queue):
            self.refuse_impossible(request)
        return True

    def _suiting(self, group: WorkerGroup) -> Sequence[Request]:
        """Return the waiting requests that the group's kind suits, most urgent first."""
        waiting = self._queue.ordered
        if not self._membership.has_several_kinds:
            return waiting
        return [request for request in waiting if self._membership.suits(request, group)]

    def _try_start(self, request: Request) -> bool:
        """Start at least a part of a request, or end it if no group could run it; return False if the request has to
        wait.
        """
        group, num_sequences = self._choose_group(request)
        if group is None:
            return self.refuse_impossible(request)
        self._start(request, group, num_sequences)
        return True

    def _start(self, request: Request, group: WorkerGroup, num_sequences: int) -> None:
        is_first = request.group is None
        self._queue.take(request, num_sequences)
        if is_first:
            num_before = request.counters.num_kind_changes
            if request.start_on_kind(group.kind, group.registration.incarnation):
                has_changed = request.counters.num_kind_changes > num_before
                self._membership.note_kind(request, has_changed=has_changed)
        group.start(request, num_sequences)
        if is_first and request.times.first_scheduled_ns == 0:
            self._lifecycle.last_queue_time_ns = self._clock.now_ns - request.times.queued_ns

    def _start_behind(self, head: Request) -> bool:
        """Start one of the requests queued after a head that has to wait; return False if none may start."""
        groups = self._membership.groups.values()
        if not any(group.num_free_rows for group in groups):
            return False
        waiting: list[Request] = []  # heads that wait for capacity
        heads = [head, *self._queue.behind(head, _MAX_LOOKED_AT)]
        smaller = (self._queue.smallest_after(first) for first in heads)
        for request in [*heads, *(item for item in smaller if item is not None)]:
            if request is not head:
                if not all(self._may_overtake(request, other) for other in waiting):
                    continue
                if self._try_start(request):
                    return True
            if request.group is not None or any(self._may_try(request, group) for group in groups):
                waiting.append(request)
        return False

    def _may_overtake(self, request: Request, other: Request) -> bool:
        """Return whether a request may start before one that waits for capacity.

        It may if the other request's client already uses its share of the capacity with other requests. Otherwise, or
        if both have the same client, capacity is being freed for the waiting request, and the requests that overtake it
        may take at most as much capacity as it needs itself.
        """
        if request.spec.client_id == other.spec.client_id:
            return self._queue.may_overtake_own(request, other)
        if _holds_its_share(other.spec.client_id, self._membership.groups.values()):
            return True
        are_newcomers = self._queue.is_newcomer(request) and self._queue.is_newcomer(other)
        return are_newcomers and self._queue.allowance(other, request) > 0

    def _choose_group(self, request: Request) -> tuple[WorkerGroup | None, int]:
        """Return the group to start the request on, and how many of its sequences can start there.

        Among the groups that can start the most sequences, prefer a prefill or decode group on trial; otherwise choose
        the group that has the least work to do before it has computed their contexts. A request that already runs stays
        on its group.
        """
        groups = self._membership.groups.values()
        nums = {group: num for group in groups if (num := self._num_to_start(request, group))}
        if len(nums) < 2:
            return next(iter(nums.items()), (None, 0))
        most = max(nums.values())
        best = [group for group, num in nums.items() if num == most]
        if len(best) == 1:
            return best[0], most

        def work(group: WorkerGroup) -> int:
            cost = group.start_cost(request)
            others = group.num_context_tokens + _TOKENS_PER_ACTIVE_SEQUENCE * len(group.active)
            return cost.num_tokens - cost.num_cached_tokens - group.num_fetchable_tokens(request) + others

        # Blocks are not transferred from or to a group on trial. Such a group is preferred, so that its trial ends even
        # if the other groups always have less work, for example because they have the blocks of all prompts.
        def prevents_transfers(group: WorkerGroup) -> bool:
            return group.role is not Role.BOTH and group.standing.is_on_trial

        return min(best, key=lambda group: (not prevents_transfers(group), work(group))), most

    def _num_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return how many of a queued request's waiting sequences can start on the group now."""
        if not group.num_free_rows:
            return 0
        if request.group is None:
            if not self._may_try(request, group) or not group.adapters.fits(request.spec):
                return 0
            if not group.is_large_enough(request) or self._is_for_others(request, group):
                return 0
        elif request.group is not group:
            return 0
        return self._scheduler.num_sequences_to_start(request, group)

    def _is_for_others(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether a group takes only requests that are handed over to it, because another group can compute this
        context and hand the request over. No request is handed over to a group on trial.
        """
        if group.role is not Role.DECODE or group.standing.is_on_trial:
            return False
        return any(
            other.role is Role.PREFILL and group.can_fetch_from(other) and self.could_run(request, other)
            for other in self._membership.groups.values()
        )

    def could_run(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the request could run on the group if it were empty."""
        standing = group.standing
        return (
            not group.is_held_off
            and not standing.is_on_trial
            and not self._membership.should_avoid(request, group)
            and not self._membership.is_suspect(request)
            and self._membership.suits(request, group)
            and group.is_large_enough(request)
        )

    def has_room(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether a request that runs on another group could start on this one now and run to completion."""
        return self.could_run(request, group) and group.adapters.fits(request.spec) and has_room_for(request, group)

    def start_on(self, request: Request, group: WorkerGroup) -> bool:
        """Start a queued request on a given group, regardless of the group's role; return False if it has to wait."""
        num_sequences = self._scheduler.num_sequences_to_start(request, group)
        if num_sequences < len(request.waiting_sequences):
            return False
        self._start(request, group, num_sequences)
        return True

    def _may_try(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the request may run on the group so that the cause of a further death would be certain."""
        standing, membership = group.standing, self._membership
        if group.is_held_off or (standing.is_on_trial and group.active):
            return False
        if not membership.suits(request, group) or membership.should_avoid(request, group):
            return False
        if not membership.is_suspect(request):
            return True
        if any(membership.is_suspect(other) for other in group.active):
            return False
        # After a death, requests that are not suspect run first: one successful step clears the group's record.
        return not standing.num_deaths or all(membership.is_suspect(other) for other in self._queue)

    def refuse_impossible(self, request: Request) -> bool:
        """End the request if no group could run it even when empty, or set it aside if only groups of other kinds
        could; return whether it was ended or set aside.
        """
        groups = self._membership.groups.values()
        if not groups:
            return False
        if any(group.is_large_enough(request) for group in groups):
            return request.kind is not None and self._kind_waits.set_aside(request)
        failure = too_large(request, list(groups))
        self._lifecycle.end(request, FinishReason.ERROR, failure)
        return True


def _holds_its_share(client_id: str, groups: Collection[WorkerGroup]) -> bool:
    """Return whether a client that waits for capacity already holds at least its equal share of the rows or of the
    blocks.
    """
    clients = {client_id, *(name for group in groups for name in group.holdings)}
    num_clients = max(2, len(clients))  # at least one other client is waiting
    held = [(group.holdings.of(client_id), group.tokens_per_block) for group in groups]
    num_rows, num_tokens = sum(rows for (rows, _), _ in held), sum(blocks * size for (_, blocks), size in held)
    all_rows, all_tokens = sum(group.max_batch_size for group in groups), sum(group.num_kv_tokens for group in groups)
    return num_rows * num_clients >= all_rows or num_tokens * num_clients >= all_tokens
