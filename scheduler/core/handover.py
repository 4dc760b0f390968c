"""Hands requests over from prefill groups to decode groups.

A request starts on a prefill group. As steps there complete blocks of its prompt, a decode group is asked to fetch them
(FetchBlocks), chunk by chunk. Once it has reported all of them (BlocksFetched), the context is computed and there is
room, the request is released on the first group and started on the second, exactly as after a pause: fetched blocks are
adopted, and the rest is recomputed. Until then it generates on the prefill group, so a slow or failed transfer delays
nothing.

All state of this module can be lost at any moment. A request is handed over at most as often as it starts on a prefill
group, and stays there once its blocks could not be fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.core.effects import Effect, FetchBlocks
from scheduler.core.events import BlocksFetched
from scheduler.core.membership import Membership
from scheduler.core.placement import Placement
from scheduler.core.prefix_cache import extend_hashes
from scheduler.core.request import Request, Sequence
from scheduler.core.role import Role
from scheduler.core.stats import Totals
from scheduler.core.worker_group import WorkerGroup


@dataclass(slots=True)
class Transfer:
    """The transfer of a request's blocks from one group to another.

    Attributes:
        sequence: The sequence whose leading blocks are fetched; the request's other sequences share them.
        num_known: Number of its known tokens when it started on the source.
        num_blocks: Number of its leading blocks to fetch.
        planned: (step, leading blocks that are computed once it is done), in the order of steps.
        num_asked: Number of leading blocks that the target was asked to fetch or already has.
        missing: Hashes not yet reported by the target.
    """

    source: WorkerGroup
    target: WorkerGroup
    sequence: Sequence
    num_known: int
    num_blocks: int
    planned: deque[tuple[int, int]] = field(default_factory=deque)
    num_asked: int = 0
    missing: set[int] = field(default_factory=set)


class Handovers:
    """KV-block transfers of this scheduler's requests from prefill to decode groups."""

    def __init__(self, *, membership: Membership, placement: Placement, totals: Totals, effects: list[Effect]) -> None:
        self._membership = membership
        self._placement = placement
        self._totals = totals
        self._effects = effects
        self._transfers: dict[Request, Transfer] = {}

    def note_plan(self, group: WorkerGroup) -> None:
        """Record which blocks the last planned step of a prefill group computes."""
        if group.role is not Role.PREFILL:
            return
        for request in group.active:
            transfer = self._transfers.get(request) or self._begin(group, request)
            if transfer is None:
                continue
            num_blocks = min(transfer.sequence.num_computed // group.tokens_per_block, transfer.num_blocks)
            if num_blocks > (transfer.planned[-1][1] if transfer.planned else transfer.num_asked):
                transfer.planned.append((group.next_step_id - 1, num_blocks))

    def take_fetched(self, event: BlocksFetched) -> None:
        """Record which blocks a group has fetched."""
        group = self._membership.group_of(event)
        if group is None:
            return
        group.fetched.update(event.fetched_hashes)
        group.fetched.difference_update(event.missing_hashes)
        for request, transfer in list(self._transfers.items()):
            if transfer.target is not group or not transfer.missing:
                continue
            if not transfer.missing.isdisjoint(event.missing_hashes):
                request.keep_here()
                self._totals.num_failed_handovers += 1
                del self._transfers[request]
            transfer.missing.difference_update(event.fetched_hashes)

    def advance(self) -> None:
        """Request the blocks that have been computed, and hand over requests whose blocks have all been fetched."""
        for request, transfer in list(self._transfers.items()):
            if not self._is_current(request, transfer):
                del self._transfers[request]
                continue
            self._fetch(transfer)
            if self._is_complete(request, transfer) and self._placement.has_room(request, transfer.target):
                del self._transfers[request]
                self._hand_over(request, transfer)

    def _begin(self, source: WorkerGroup, request: Request) -> Transfer | None:
        if not request.may_hand_over or request.waiting_sequences or not source.tables.reuses(request):
            return None
        target = self._target(source, request)
        if target is None:
            return None
        sequence = request.running_sequences[0]
        num_known = sequence.num_tokens if request.num_rows == 1 else len(request.spec.prompt)
        transfer = Transfer(source, target, sequence, num_known, (num_known - 1) // source.tokens_per_block)
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
        asked = [value for value in hashes if not (target.prefix_cache.find([value]) or target.has_below_pool(value))]
        if asked:
            transfer.missing.update(asked)
            self._effects.append(_fetch_blocks(source, target, asked))

    def _is_complete(self, request: Request, transfer: Transfer) -> bool:
        return (
            not transfer.missing
            and transfer.num_asked == transfer.num_blocks
            and transfer.sequence.num_tokens > transfer.num_known
            and not any(sequence.request is request for sequence in transfer.source.context)
        )

    def _hand_over(self, request: Request, transfer: Transfer) -> None:
        transfer.source.release(request)
        request.count_handover()
        self._totals.num_handovers += 1
        self._membership.requeue(request)
        if not self._placement.start_on(request, transfer.target):
            request.keep_here()  # the policy chooses another group; the request is placed like any other


def _fetch_blocks(source: WorkerGroup, target: WorkerGroup, hashes: Iterable[int]) -> FetchBlocks:
    registration = source.registration
    return FetchBlocks(target.connection, target.epoch, tuple(hashes), registration.kv_store, registration.kv_source)
