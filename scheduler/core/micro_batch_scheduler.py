"""Micro-batch policies: they choose which of the requests that hold blocks run in the next step, and with how many
tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler.core.request import Sequence
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup

# A step reserves 1/_PART_FOR_OTHERS of its context tokens for clients other than the one served first.
_PART_FOR_OTHERS = 16


class MicroBatchScheduler(ABC):
    """Fills a step. A policy is stateless."""

    @abstractmethod
    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Add context chunks and generating sequences of the group to the step.

        Args:
            group: Sequences with blocks are in `group.context` and `group.generating`. Requests whose last step has not
                returned are in `group.inflight_request_ids`; they may run again, because a worker has a step's tokens
                before it runs the next step.
            step: Call `add_context` in order, and `add_generation` at most once.
        """


class InflightFused(MicroBatchScheduler):
    """Context chunks and generation in the same step: generation first, then as much context as the token budget
    allows.
    """

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fill the step with generation, then context."""
        if _a_whole_context_waits(group):
            add_contexts(group, step)
            step.add_generation()
            return
        step.add_generation()
        add_contexts(group, step)


def _a_whole_context_waits(group: WorkerGroup) -> bool:
    """Return whether a context that must not be split does not fit in a step with generation; if so, generation skips
    this step.
    """
    if group.splits_contexts or not group.last_generation.rows:
        return False
    room = group.max_num_tokens - len(group.generating)
    return any(room < sequence.num_context_tokens <= group.max_num_tokens for sequence in group.context)


class Inflight(MicroBatchScheduler):
    """Context and generation in separate, alternating steps."""

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fill the step with the kind of work that did not run in the last step or, if there is none, with the other
        kind.
        """
        was_context = not group.last_generation.rows
        if was_context and step.add_generation():
            return
        add_contexts(group, step)
        if not was_context and not step.context_requests:
            step.add_generation()


class StaticLockstep(MicroBatchScheduler):
    """Computes all contexts first, then generates in lockstep."""

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fill the step with context as long as there is any, and otherwise with generation.

        If requests were paused so that others can generate, those others generate first: otherwise the paused requests
        would take the blocks again.
        """
        if (step.paused_requests or not group.context) and step.add_generation():
            return
        add_contexts(group, step)


def add_contexts(group: WorkerGroup, step: StepBuilder) -> None:
    """Add context chunks until the budget is used up.

    A client's sequences are served in the order in which they started, but beside a context that takes more than half
    of a step, up to half of what is left goes to shorter ones, the shortest first: many users may share one client id,
    or have none.

    The client with the fewest tokens is served first. A part of the budget is reserved for the other clients, so that
    none of them waits until the contexts of another are computed. Each of them gets at most as many tokens as the first
    client, or as this part has if that is more, so that the first client's step stays short.
    """
    if not group.context:
        return
    limit = group.max_num_tokens
    if group.splits_contexts:
        limit = group.config.max_context_chunk or limit
    clients: dict[str, list[Sequence]] = {}
    for sequence in group.context:
        clients.setdefault(sequence.request.spec.client_id, []).append(sequence)
    # A context that must not be split might not fit into its client's share.
    if len(clients) < 2 or not group.splits_contexts:
        budget = step.num_tokens_left
        if group.clients.are_several and group.splits_contexts:
            budget = min(budget, max(1, group.max_num_tokens // 2))  # another client may arrive during the step
        _add_own(group.context, step, limit, budget)
        return
    least, *others = sorted(clients.values(), key=lambda waiting: sum(item.num_context_tokens for item in waiting))
    for_others = max(1, step.num_tokens_left // _PART_FOR_OTHERS)
    num_first = _add_own(least, step, limit, max(1, step.num_tokens_left - for_others))
    for num_served, waiting in enumerate(others):
        equal_share = -(-step.num_tokens_left // (len(others) - num_served))
        _add_own(waiting, step, limit, min(equal_share, max(num_first, for_others)))


def _add_own(waiting: list[Sequence], step: StepBuilder, limit: int, budget: int) -> int:
    """Add chunks of the contexts of one client; return the number of tokens added."""
    if not step.group.splits_contexts:
        return _add_chunks(waiting, step, limit, budget)
    left = budget
    for place, sequence in enumerate(waiting):
        if left <= 0:
            break
        if sequence.num_context_tokens > budget // 2:
            return budget - left + _add_beside(sequence, waiting[place + 1 :], step, limit, left)
        left -= step.add_context(sequence, min(limit, left))
    return budget - left


def _add_beside(long: Sequence, others: list[Sequence], step: StepBuilder, limit: int, budget: int) -> int:
    """Add chunks of a long context, of shorter ones, and then of the rest; return the number of tokens added."""
    shorter = [item for item in others if item.num_context_tokens < long.num_context_tokens]
    shorter.sort(key=lambda item: item.num_context_tokens)
    rest = [item for item in others if item.num_context_tokens >= long.num_context_tokens]
    for_shorter = min(budget // 2, sum(item.num_context_tokens for item in shorter))
    num_long = _add_chunks([long], step, limit, budget - for_shorter)
    return num_long + _add_chunks([*shorter, *rest], step, limit, budget - num_long)


def _add_chunks(waiting: list[Sequence], step: StepBuilder, limit: int, budget: int) -> int:
    """Add chunks of at most `limit` tokens each and `budget` in total; return the number of tokens added."""
    left = budget
    for sequence in waiting:
        if left <= 0:
            break
        left -= step.add_context(sequence, min(limit, left))
    return budget - left


MICRO_BATCH_SCHEDULERS: dict[str, type[MicroBatchScheduler]] = {
    "inflight_fused": InflightFused,
    "inflight": Inflight,
    "static": StaticLockstep,
}
