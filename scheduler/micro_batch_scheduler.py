"""Micro-batch policies: which of the requests that hold blocks run in the next step, and how many tokens each."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scheduler.groups import WorkerGroup
from scheduler.request import Sequence
from scheduler.step_builder import StepBuilder


class MicroBatchScheduler(ABC):
    """Fills a step. A policy keeps no state of its own."""

    @abstractmethod
    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Adds context chunks and generating sequences of the group to the step.

        Args:
            group: What holds blocks: `group.context` and `group.generating`. Requests whose last step has not returned
                are in `group.inflight_request_ids`; they may run again, because a worker knows a step's tokens before
                it runs the next.
            step: Takes `add_context` in order, and `add_generation` at most once.
        """


class InflightFused(MicroBatchScheduler):
    """Context chunks and generation in one step: generation first, then as much context as the budget leaves."""

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fills the step with both."""
        step.add_generation()
        add_contexts(group, step)


class Inflight(MicroBatchScheduler):
    """Context and generation in separate steps, by turns while there is both."""

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fills the step with the kind that did not run last, else with the other."""
        was_context = not group.last_generation.rows
        if was_context and step.add_generation():
            return
        add_contexts(group, step)
        if not was_context and step.is_empty:
            step.add_generation()


class StaticLockstep(MicroBatchScheduler):
    """First all context, then generation in lockstep."""

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fills the step with context while there is any."""
        if group.context:
            add_contexts(group, step)
        else:
            step.add_generation()


def add_contexts(group: WorkerGroup, step: StepBuilder) -> None:
    """Adds context chunks until the budget is used up; of each client in the order in which its sequences started.

    Clients share the budget: who asks for least is served first, and what it leaves goes to the others.
    """
    limit = group.config.max_context_chunk or group.max_num_tokens
    clients: dict[str, list[Sequence]] = {}
    for sequence in group.context:
        clients.setdefault(sequence.request.spec.client_id, []).append(sequence)
    by_demand = sorted(clients.values(), key=lambda waiting: sum(item.num_context_tokens for item in waiting))
    for num_served, waiting in enumerate(by_demand):
        left = step.num_tokens_left
        # A context that must be computed in one piece may not fit into a share.
        share = -(-left // (len(by_demand) - num_served)) if group.config.enable_chunked_context else left
        for sequence in waiting:
            if share <= 0:
                break
            share -= step.add_context(sequence, min(limit, share))


MICRO_BATCH_SCHEDULERS: dict[str, type[MicroBatchScheduler]] = {
    "inflight_fused": InflightFused,
    "inflight": Inflight,
    "static": StaticLockstep,
}
