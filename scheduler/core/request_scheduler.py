"""The complete scheduling policy: its interface and the default implementation, which combines a capacity policy and a
micro-batch policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.core.capacity_scheduler import CapacityScheduler
from scheduler.core.micro_batch_scheduler import MicroBatchScheduler
from scheduler.core.request import Request
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class PolicyFault:
    """A method of a policy raised an exception; it fails on these requests."""

    method: str
    error: Exception
    requests: tuple[Request, ...]


class RequestScheduler(CapacityScheduler, MicroBatchScheduler):
    """Interface of a complete policy, which is both a capacity and a micro-batch policy.

    The core calls `select` for the requests to start and their order and `can_start` for each of these; before each
    step it calls `requests_to_pause` and then `schedule`. The outcome of a step is in its StepBuilder:
    `fitting_requests`, `paused_requests`, `context_requests` and `generation_requests`; `group.inflight_request_ids`
    are the requests that run in a step in flight.
    """

    def take_faults(self) -> Sequence[PolicyFault]:
        """Return the faults of the policy since the last call; the built-in policies have none."""
        return ()


class SimpleScheduler(RequestScheduler):
    """A policy that combines a capacity policy and a micro-batch policy."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        return self.capacity_scheduler.select(queued, group)

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        return self.capacity_scheduler.can_start(request, group)

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        return self.capacity_scheduler.num_sequences_to_start(request, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        return self.capacity_scheduler.requests_to_pause(group)

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        self.micro_batch_scheduler.schedule(group, step)
