"""A whole scheduler: what the core asks, and the usual answer, a capacity policy and a micro-batch policy together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler.core.capacity_scheduler import CapacityScheduler
from scheduler.core.micro_batch_scheduler import MicroBatchScheduler
from scheduler.core.request import Request
from scheduler.core.step_builder import StepBuilder
from scheduler.core.worker_group import WorkerGroup


class RequestScheduler(ABC):
    """What the core asks: `select` for what to start and in which order, `can_start` for each of these, and before
    each step first `requests_to_pause`, then `schedule`.

    The outcome of a step is in its StepBuilder: `fitting_requests`, `paused_requests`, `context_requests` and
    `generation_requests`; `group.inflight_request_ids` are those that a step in flight runs.
    """

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        """Return queued requests to start; see CapacityScheduler.select."""
        return None

    @abstractmethod
    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Whether a queued request may take rows and blocks of the group now. Changes nothing."""

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return how many of a request's waiting sequences may start; see CapacityScheduler.num_sequences_to_start."""
        return len(request.waiting_sequences) if self.can_start(request, group) else 0

    @abstractmethod
    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Active requests that give their blocks back before the next step. Changes nothing."""

    @abstractmethod
    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Fills the step; see MicroBatchScheduler.schedule."""


class SimpleScheduler(RequestScheduler):
    """A capacity policy and a micro-batch policy."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        """As the capacity policy says."""
        return self.capacity_scheduler.select(queued, group)

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """As the capacity policy says."""
        return self.capacity_scheduler.can_start(request, group)

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """As the capacity policy says."""
        return self.capacity_scheduler.num_sequences_to_start(request, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """As the capacity policy says."""
        return self.capacity_scheduler.requests_to_pause(group)

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """As the micro-batch policy says."""
        self.micro_batch_scheduler.schedule(group, step)
