"""Hands requests over from prefill groups to decode groups.

A request starts on a prefill group. As steps there complete blocks of its prompt, a decode group is asked to fetch them
(FetchBlocks), chunk by chunk. Once it has reported all of them (BlocksFetched) and there is room, the request is
released on the first group and started on the second, exactly as after a pause: fetched blocks are adopted, and the
rest is computed.

While the prefill group has more contexts than fit in a step, it leaves the tokens after a prompt's last full block to
the decode group, which then generates the first token too: otherwise every request would wait for a transfer after its
first token. The transfer has the duration of one step to complete; then the prefill group computes the rest and
generates until the transfer is complete, so a slow or failed transfer delays a request by at most one step. A prefill
group without contexts to compute keeps its generating requests unless the decode group has fewer requests; new blocks
are still fetched, so that a request can move as soon as another prompt arrives.

All state of this module can be lost at any moment. A request is handed over at most once per start on a prefill group,
and stays there if its blocks cannot be fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.core.effects import FetchBlocks
from scheduler.core.events import BlocksFetched
from scheduler.core.membership import Membership
from scheduler.core.placement import Placement
from scheduler.core.prefix_cache import extend_hashes
from scheduler.core.request import Request, Sequence
from scheduler.core.role import Role
from scheduler.core.shared import Shared
from scheduler.core.worker_group import WorkerGroup


@dataclass(slots=True)
class Transfer:
    """The transfer of a request's blocks from one group to another.

    Attributes:
        sequence: The sequence whose leading blocks are fetched; the request's other sequences share them.
        num_known: Number of its known tokens when it started on the source.
        last_step: The step that computes the last block of these tokens; None if it is not planned.
        planned: (step, leading blocks that are computed once it is done), in the order of steps.
        num_asked: Number of leading blocks that the target was asked to fetch or already has.
        missing: Hashes not yet reported by the target.
    """

    source: WorkerGroup
    target: WorkerGroup
    sequence: Sequence
    num_known: int
    last_step: int | None = None
    planned: deque[tuple[int, int]] = field(default_factory=deque)
    num_asked: int = 0
    missing: set[int] = field(default_factory=set)

    @property
    def num_blocks(self) -> int:
        """Number of the sequence's leading blocks to fetch."""
        is_shared = self.sequence.request.num_rows > 1
        return ((self.num_known if is_shared else self.sequence.num_tokens) - 1) // self.source.tokens_per_block

    @property
    def is_held(self) -> bool:
        """Whether the target still has all blocks that it was asked for, except those that it has yet to report. The
        target drops fetched blocks beyond its limit, and may evict blocks from its pool.
        """
        hashes = self.sequence.block_hashes(self.source.tokens_per_block)[: self.num_asked]
        return all(value in self.missing or self.target.has_block(value) for value in hashes)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens in full blocks, among those that were known when the request started on the source."""
        size = self.source.tokens_per_block
        return (self.num_known - 1) // size * size


class Handovers:
    """KV-block transfers of this scheduler's requests from prefill to decode groups."""

    def __init__(self, shared: Shared, membership: Membership, placement: Placement) -> None:
        self._membership, self._placement = membership, placement
        self._queue, self._totals, self._effects = shared.queue, shared.totals, shared.effects
        self._transfers: dict[Request, Transfer] = {}

    def prepare_plan(self, group: WorkerGroup) -> None:
        """Begin transfers from a prefill group, and decide which contexts its next step leaves incomplete."""
        if group.role is not Role.PREFILL:
            return
        left = dict[Sequence, int]()
        for request in group.active:
            transfer = self._transfers.get(request) or self._begin(group, request)
            if transfer is not None and self._may_leave_rest(transfer):
                left[transfer.sequence] = transfer.num_context_tokens
        group.limit_contexts(left)
        if left and sum(map(group.num_to_compute, group.context)) <= group.max_num_tokens:
            group.lift_context_limits()

    def _may_leave_rest(self, transfer: Transfer) -> bool:
        """Return whether the target may compute the tokens after the last full block of a context."""
        source, sequence = transfer.source, transfer.sequence
        if sequence not in source.context or sequence.request.num_rows > 1 or not source.splits_contexts:
            return False
        if transfer.last_step is not None and source.first_open_step > transfer.last_step + 1:
            return False
        return self._placement.has_room(sequence.request, transfer.target)

    def note_plan(self, group: WorkerGroup) -> None:
        """Record which blocks the last planned step of a prefill group computes."""
        if group.role is not Role.PREFILL:
            return
        step_id = group.next_step_id - 1
        for request in group.active:
            transfer = self._transfers.get(request)
            if transfer is None:
                continue
            # The worker knows a generated block's hash from the first step after the result that completed the block.
            num_blocks = min(transfer.sequence.num_computed // group.tokens_per_block, transfer.num_blocks)
            if num_blocks > (transfer.planned[-1][1] if transfer.planned else transfer.num_asked):
                transfer.planned.append((step_id, num_blocks))
            if transfer.last_step is None and transfer.sequence.num_computed >= transfer.num_context_tokens:
                transfer.last_step = step_id

    def take_fetched(self, event: BlocksFetched) -> None:
        """Record which blocks a group has fetched."""
        group = self._membership.group_of(event)
        if group is None:
            return
        group.fetched.update(event.fetched_hashes)
        group.fetched.difference_update(event.missing_hashes)
        for request, transfer in list(self._transfers.items()):
            if transfer.target is not group:
                continue
            is_failed = not transfer.missing.isdisjoint(event.missing_hashes)
            transfer.missing.difference_update(event.fetched_hashes)
            if is_failed or (event.missing_hashes and not transfer.is_held):
                self._give_up(request)

    def advance(self) -> None:
        """Request the blocks that have been computed, and hand over requests whose blocks have all been fetched."""
        for request, transfer in list(self._transfers.items()):
            if not self._is_current(request, transfer):
                del self._transfers[request]
                continue
            self._fetch(transfer)
            if not self._is_complete(request, transfer) or not self._is_useful(transfer):
                continue
            if not self._placement.has_room(request, transfer.target):
                continue
            if transfer.is_held:
                del self._transfers[request]
                self._hand_over(request, transfer)
            else:
                self._give_up(request)

    def _give_up(self, request: Request) -> None:
        """Leave a request on its group for good, since the target lacks some of its blocks."""
        request.keep_here()
        self._totals.num_failed_handovers += 1
        del self._transfers[request]

    def _begin(self, source: WorkerGroup, request: Request) -> Transfer | None:
        if not request.may_hand_over or request.waiting_sequences or not source.tables.reuses(request):
            return None
        target = self._target(source, request)
        if target is None:
            return None
        sequence = request.running_sequences[0]
        num_known = sequence.num_tokens if request.num_rows == 1 else len(request.spec.prompt)
        transfer = Transfer(source, target, sequence, num_known)
        self._transfers[request] = transfer
        return transfer

    def _target(self, source: WorkerGroup, request: Request) -> WorkerGroup | None:
        """Return the decode group with the least work among those that can fetch from the source."""
        groups = [
            group
            for group in self._membership.groups.values()
            if group.role is Role.DECODE and group.can_fetch_from(source) and self._placement.could_run(request, group)
        ]
        num_coming = dict.fromkeys(groups, 0)
        for transfer in self._transfers.values():
            if transfer.target in num_coming:
                num_coming[transfer.target] += 1
        return min(groups, key=lambda group: len(group.active) + num_coming[group], default=None)

    def _is_current(self, request: Request, transfer: Transfer) -> bool:
        groups = self._membership.groups
        return (
            request.group is transfer.source
            and transfer.sequence.row is not None
            and groups.get(transfer.source.epoch) is transfer.source
            and groups.get(transfer.target.epoch) is transfer.target
        )

    def _fetch(self, transfer: Transfer) -> None:
        """Ask the target to fetch the blocks that completed steps have computed, except those it already has."""
        source, target, end = transfer.source, transfer.target, transfer.num_asked
        while transfer.planned and transfer.planned[0][0] < source.first_open_step:
            end = transfer.planned.popleft()[1]
        if end == transfer.num_asked:
            return
        hashes = extend_hashes(transfer.sequence, end, source.tokens_per_block)[transfer.num_asked : end]
        transfer.num_asked = end
        asked = [value for value in hashes if not target.has_block(value)]
        if asked:
            transfer.missing.update(asked)
            self._effects.append(_fetch_blocks(source, target, asked))

    def _is_complete(self, request: Request, transfer: Transfer) -> bool:
        """Return whether the target has all blocks, except perhaps the last generated one, and no step in flight
        computes the rest of the context.
        """
        num_first = transfer.num_context_tokens // transfer.source.tokens_per_block
        if transfer.missing or transfer.num_asked < max(num_first, transfer.num_blocks - 1):
            return False
        context = transfer.source.context
        if request.num_rows == 1 and transfer.sequence in context:
            return transfer.sequence.num_computed == transfer.num_context_tokens
        return transfer.sequence.num_tokens > transfer.num_known and not any(
            item.request is request for item in context
        )

    def _is_useful(self, transfer: Transfer) -> bool:
        """Return whether the source has contexts to compute, or more requests than the target."""
        source, target = transfer.source, transfer.target
        return bool(source.context) or len(self._queue) > 0 or len(source.active) > len(target.active)

    def _hand_over(self, request: Request, transfer: Transfer) -> None:
        transfer.source.release(request)
        request.count_handover()
        self._totals.num_handovers += 1
        self._membership.requeue(request)
        if not self._placement.start_on(request, transfer.target):
            request.keep_here()  # the policy decides against the target; the request is placed like any other


def _fetch_blocks(source: WorkerGroup, target: WorkerGroup, hashes: Iterable[int]) -> FetchBlocks:
    registration = source.registration
    return FetchBlocks(target.connection, target.epoch, tuple(hashes), registration.kv_store, registration.kv_source)
