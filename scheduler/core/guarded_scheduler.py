"""Runs a policy that is not ours. Where it raises an exception or gives an impossible answer, the built-in policy takes
its turn, and the requests on which it fails are named, so that the core ends them: it would fail on them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.core.request import Request
from scheduler.core.request_scheduler import PolicyFault, RequestScheduler
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup


class GuardedScheduler(RequestScheduler):
    """A policy whose faults are survived.

    Attributes:
        policy: The policy.
    """

    def __init__(self, policy: RequestScheduler, built_in: RequestScheduler) -> None:
        """`built_in` takes the turns that `policy` loses."""
        self.policy = policy
        self._built_in = built_in
        self._faults: list[PolicyFault] = []

    def take_faults(self) -> list[PolicyFault]:
        """Return the faults since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        return self.num_sequences_to_start(request, group) > 0

    def num_sequences_to_start(self, request: Request, group: WorkerGroup) -> int:
        """Return the policy's answer, but not more sequences than fit; 0 for a request on which the policy fails."""
        try:
            num_sequences = self.policy.num_sequences_to_start(request, group)
            num_waiting = len(request.waiting_sequences)
            if not 0 <= num_sequences <= num_waiting:
                raise ValueError(f"{num_sequences} sequences to start, but {num_waiting} are waiting")
        except Exception as error:  # noqa: BLE001 (a policy may raise anything)
            self._note("num_sequences_to_start", error, [request])
            return 0
        while num_sequences:
            cost = group.start_cost(request, num_sequences)
            if cost.num_rows <= group.num_free_rows and cost.num_blocks_at_once <= group.blocks.num_available:
                break
            num_sequences = num_sequences - 1 if request.beams is None else 0
        return num_sequences

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request] | None:
        """Return the policy's choice. If it raises an exception, it fails on the queued requests for which it also does
        so alone.
        """

        def choose(some: Sequence[Request]) -> Sequence[Request] | None:
            chosen = self.policy.select(some, group)
            return None if chosen is None else _checked(chosen, "select")

        try:
            return choose(queued)
        except Exception as error:  # noqa: BLE001 (a policy may raise anything)
            found = error.requests if isinstance(error, RequestError) else culprits(choose, queued)
            self._note("select", error, found)
        return self._built_in.select(queued, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        try:
            paused = _checked(self.policy.requests_to_pause(group), "requests_to_pause")
            if len(group.active.keys() & set(paused)) != len(paused):
                raise ValueError("requests_to_pause must return active requests, each once")
            return paused
        except Exception as error:  # noqa: BLE001 (a policy may raise anything)
            self._note("requests_to_pause", error, error.requests if isinstance(error, RequestError) else [])
        return self._built_in.requests_to_pause(group)

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Let the policy fill the step; if it raises an exception, the built-in policy adds to what is there."""
        try:
            self.policy.schedule(group, step)
        except Exception as error:  # noqa: BLE001 (a policy may raise anything)
            self._note("schedule", error, error.requests if isinstance(error, RequestError) else [])
            if not step.generation_requests:
                self._built_in.schedule(group, step)

    def _note(self, method: str, error: Exception, requests: Sequence[Request]) -> None:
        cause = error.__cause__ if isinstance(error, RequestError) and isinstance(error.__cause__, Exception) else error
        self._faults.append(PolicyFault(method, cause, tuple(requests)))


class RequestError(Exception):
    """A policy has failed on these requests, for the reason given as the cause. A policy may raise it itself."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(", ".join(request.request_id for request in requests))
        self.requests = requests


def culprits(call: Callable[[Sequence[Request]], object], requests: Sequence[Request]) -> list[Request]:
    """Return the requests for which a call raises an exception although it gets no other request.

    Precondition: the call with all requests raises an exception.
    """
    if len(requests) <= 1:
        return list(requests)
    middle = len(requests) // 2
    found: list[Request] = []
    for half in (requests[:middle], requests[middle:]):
        try:
            call(half)
        except Exception:  # noqa: BLE001 (a policy may raise anything)
            found += culprits(call, half)
    return found


def _checked(requests: Sequence[Request], method: str) -> list[Request]:
    checked = list(requests)
    if not all(isinstance(request, Request) for request in checked):
        raise TypeError(f"{method} must return requests")
    return checked
