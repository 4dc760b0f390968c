"""TensorRT-LLM's schedulers, which get all active requests of a worker group, queued and running, as a list.

A user's policy is a class derived from CapacityScheduler, from MicroBatchScheduler, or from RequestScheduler, which
decides both. Each decision about a worker group constructs a new instance of the class. The core's own interfaces have
the same names; the classes at the end of this file connect the two.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from scheduler.core import capacity_scheduler, micro_batch_scheduler, request_scheduler
from scheduler.core.capacity_scheduler import has_room_now, has_room_to_the_end
from scheduler.core.guarded_scheduler import RequestError, culprits
from scheduler.core.request import Request
from scheduler.core.steps import StepBuilder
from scheduler.core.worker_group import WorkerGroup

_T = TypeVar("_T")


class LlmRequestState(enum.Enum):
    """Stages of a request, in the order in which it passes through them."""

    CONTEXT_INIT = 1  # queued, or its prompt is not yet computed
    GENERATION_IN_PROGRESS = 2
    GENERATION_TO_COMPLETE = 3  # its last token has been planned
    GENERATION_COMPLETE = 4


class LlmRequest:
    """A request as capacity policies see it.

    Attributes:
        request_id, client_id, priority: As set by the client.
        prompt_len: Number of tokens in the prompt. max_new_tokens: Maximum output tokens over all sequences.
        num_generated_tokens: Output tokens so far, over all sequences.
        state: Stage of the request.
        is_queued: Whether it holds no blocks.
        arrival_ns: Arrival time in nanoseconds since the Unix epoch.
    """

    __slots__ = ("_request", "is_queued", "state")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.is_queued = request.group is None
        self.state = _state(request)

    @property
    def request_id(self) -> str:
        """The id that the client set."""
        return self._request.request_id

    @property
    def client_id(self) -> str:
        """The client that sent the request."""
        return self._request.spec.client_id

    @property
    def priority(self) -> int:
        """Priority of the request; higher is more urgent."""
        return self._request.spec.priority

    @property
    def prompt_len(self) -> int:
        """Number of tokens in the prompt."""
        return len(self._request.spec.prompt)

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of output tokens, over all sequences."""
        return self._request.spec.max_tokens * self._request.spec.num_sequences

    @property
    def num_generated_tokens(self) -> int:
        """Number of output tokens so far, over all sequences."""
        return self._request.num_output_tokens

    @property
    def arrival_ns(self) -> int:
        """Arrival time in nanoseconds since the Unix epoch."""
        return self._request.times.arrival_ns

    @staticmethod
    def unwrap(requests: Iterable[LlmRequest]) -> list[Request]:
        """Return the core requests wrapped by `requests`."""
        return [request._request for request in requests]


RequestList = list[LlmRequest]


class KvCacheManager:
    """The KV blocks of one worker group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @property
    def impl(self) -> KvCacheManager:
        """The same object, which TensorRT-LLM's bound schedulers take."""
        return self

    @property
    def group(self) -> WorkerGroup:
        """The worker group."""
        return self._group

    def get_max_resource_count(self) -> int:
        """Return the total number of blocks."""
        return self._group.blocks.num_blocks

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that can be allocated now."""
        return self._group.blocks.num_available

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Return the maximum number of blocks that the request may hold before it ends, including those it holds
        now.
        """
        return self._group.blocks_alone(*LlmRequest.unwrap([request]))


@dataclass(slots=True)
class SchedulerOutput:
    """A decision: the requests that run in the next step, those that hold or get blocks, and those to pause."""

    context_requests: RequestList = field(default_factory=list)
    generation_requests: RequestList = field(default_factory=list)
    paused_requests: RequestList = field(default_factory=list)
    fitting_requests: RequestList = field(default_factory=list)


class CapacityScheduler(ABC):
    """Decides which requests hold blocks. A running request that it neither lists as fitting nor pauses keeps running,
    since it holds its blocks.
    """

    # Only requests with no_schedule_until_state <= state < no_schedule_after_state are to be scheduled.
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int = 0, kv_cache_manager: KvCacheManager | None = None) -> None:
        """Store the limits that a policy may need.

        Args:
            max_num_requests: Maximum number of sequences that the group runs at the same time.
            kv_cache_manager: The group's KV blocks.
        """
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return the requests that fit, in the order in which to start them, and those to pause.

        Args:
            active_requests: Running requests in the order in which they started; then waiting ones in the queue's usual
                order.
        """


class MicroBatchScheduler(ABC):
    """Decides which of the requests that hold blocks run in the next step."""

    def __init__(self, max_batch_size: int = 0, max_num_tokens: int = 0) -> None:
        """Store the limits of a step."""
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens

    @abstractmethod
    def schedule(
        self, active_requests: RequestList, inflight_request_ids: Collection[str]
    ) -> tuple[RequestList, RequestList]:
        """Return the requests whose prompt is computed in the next step, in order, and those that generate. A step has
        all generating requests, or none if the second list is empty.

        Args:
            active_requests: The requests that hold blocks.
            inflight_request_ids: Those in a step in flight, which may run again.
        """


class RequestScheduler(ABC):
    """Decides everything in one call."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Collection[str]) -> SchedulerOutput:
        """Return the decision; a queued request among the context requests is started."""


class SimpleScheduler(RequestScheduler):
    """A capacity policy, and then a micro-batch policy for the requests that fit."""

    def __init__(self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(self, active_requests: RequestList, inflight_request_ids: Collection[str]) -> SchedulerOutput:
        """Return the decision of both policies."""
        fitting, paused = self.capacity_scheduler.schedule_request(active_requests)
        context, generation = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return SchedulerOutput(context, generation, paused, fitting)


class BindCapacityScheduler(CapacityScheduler):
    """The built-in policy that starts requests only if they can run to their end."""

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return the running requests, and the queued ones that fit, in order, up to the first that does not."""
        assert self.kv_cache_manager is not None
        group, fitting = self.kv_cache_manager.group, [item for item in active_requests if not item.is_queued]
        num_left = self.kv_cache_manager.get_max_resource_count()
        num_left -= sum(map(self.kv_cache_manager.get_needed_resource_to_completion, fitting))
        for item in active_requests:
            (request,) = LlmRequest.unwrap([item])
            if item.is_queued:
                num_left -= self.kv_cache_manager.get_needed_resource_to_completion(item)
                if num_left < 0 or not has_room_to_the_end(request, group):
                    break
                fitting.append(item)
        return fitting, []


class BindMicroBatchScheduler(MicroBatchScheduler):
    """The built-in policy: generation, and as much context as the step's tokens allow."""

    def schedule(
        self, active_requests: RequestList, inflight_request_ids: Collection[str]
    ) -> tuple[RequestList, RequestList]:
        """Return all requests by their state."""
        context = [item for item in active_requests if item.state is LlmRequestState.CONTEXT_INIT]
        return context, [item for item in active_requests if item not in context]


class ListCapacity(capacity_scheduler.CapacityScheduler):
    """A capacity policy of the core that delegates every decision to a list policy."""

    def __init__(self, policy: type[CapacityScheduler]) -> None:
        self._policy = policy

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request]:
        """Return the queued requests that the policy reports as fitting."""
        fitting, _ = self._schedule(group, _possible(queued, group))
        return _to_start(fitting, queued)

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the request has room on the group."""
        return _has_room(request, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return the running requests that the policy pauses."""
        _, paused = self._schedule(group, [])
        return [request for request in paused if request.group is group]

    def _schedule(self, group: WorkerGroup, queued: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        def ask(requests: RequestList) -> tuple[RequestList, RequestList]:
            policy = self._policy(max_num_requests=group.max_batch_size, kv_cache_manager=KvCacheManager(group))
            fitting, paused = policy.schedule_request(requests)
            return fitting, paused

        if not group.active and not queued:
            return [], []
        fitting, paused = _asked(ask, (*group.active, *queued))
        return LlmRequest.unwrap(fitting), LlmRequest.unwrap(paused)


class ListMicroBatch(micro_batch_scheduler.MicroBatchScheduler):
    """A micro-batch policy of the core that delegates every decision to a list policy."""

    def __init__(self, policy: type[MicroBatchScheduler]) -> None:
        self._policy = policy

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Add the requests that the policy chooses."""

        def ask(requests: RequestList) -> tuple[RequestList, RequestList]:
            policy = self._policy(max_batch_size=group.max_batch_size, max_num_tokens=group.max_num_tokens)
            context, generation = policy.schedule(requests, group.inflight_request_ids)
            return context, generation

        context, generation = _asked(ask, tuple(group.active))
        _fill(group, step, LlmRequest.unwrap(context), has_generation=bool(generation))


class ListScheduler(request_scheduler.RequestScheduler):
    """A scheduler of the core that delegates every decision to a list scheduler."""

    def __init__(self, policy: type[RequestScheduler]) -> None:
        self._policy = policy

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request]:
        """Return the queued requests that the policy starts."""
        output = self._decide(group, _possible(queued, group))
        return _to_start(LlmRequest.unwrap([*output.context_requests, *output.fitting_requests]), queued)

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the request has room on the group."""
        return _has_room(request, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return the running requests that the policy pauses."""
        paused = LlmRequest.unwrap(self._decide(group, []).paused_requests)
        return [request for request in paused if request.group is group]

    def schedule(self, group: WorkerGroup, step: StepBuilder) -> None:
        """Add the requests that the policy chooses."""
        output = self._decide(group, [])
        context = LlmRequest.unwrap(output.context_requests)
        _fill(group, step, context, has_generation=bool(output.generation_requests))

    def _decide(self, group: WorkerGroup, queued: Sequence[Request]) -> SchedulerOutput:
        if not group.active and not queued:
            return SchedulerOutput()
        running = group.inflight_request_ids
        return _asked(lambda asked: self._policy().schedule_request(asked, running), (*group.active, *queued))


def _possible(queued: Sequence[Request], group: WorkerGroup) -> list[Request]:
    """Return the queued requests among which a policy chooses. Those of which a part runs are active already."""
    return [request for request in queued if request.group is None and group.is_large_enough(request)]


def _to_start(chosen: Iterable[Request], queued: Sequence[Request]) -> list[Request]:
    """Return the chosen requests that wait, or of which a part waits."""
    waiting = set(queued)
    return [request for request in dict.fromkeys(chosen) if request in waiting]


def _has_room(request: Request, group: WorkerGroup) -> bool:
    """Return whether enough rows and blocks are free. Later parts of a request must have room to their end, since no
    policy is asked about their blocks.
    """
    return has_room_now(request, group) if request.group is None else has_room_to_the_end(request, group)


def connect(policy: type) -> ListCapacity | ListMicroBatch | ListScheduler | None:
    """Return the core's policy for a list policy; None if the class is not one."""
    if issubclass(policy, RequestScheduler):
        return ListScheduler(policy)
    if issubclass(policy, CapacityScheduler):
        return ListCapacity(policy)
    return ListMicroBatch(policy) if issubclass(policy, MicroBatchScheduler) else None


def _asked(ask: Callable[[RequestList], _T], requests: Sequence[Request]) -> _T:
    """Return a policy's answer about requests. Raises RequestError, with the requests on which it fails alone."""
    try:
        return ask(list(map(LlmRequest, requests)))
    except Exception as error:
        found = culprits(lambda some: ask(list(map(LlmRequest, some))), requests)
        raise RequestError(found) from error


def _fill(group: WorkerGroup, step: StepBuilder, context: Sequence[Request], *, has_generation: bool) -> None:
    if has_generation:
        step.add_generation()
    order = {request: place for place, request in enumerate(context)}
    waiting = [sequence for sequence in group.context if sequence.request in order]
    for sequence in sorted(waiting, key=lambda sequence: order[sequence.request]):
        step.add_context(sequence, group.max_num_tokens)


def _state(request: Request) -> LlmRequestState:
    group = request.group
    if group is None or any(sequence.request is request for sequence in group.context):
        return LlmRequestState.CONTEXT_INIT
    limit = request.spec.max_num_tokens
    if all(sequence.num_computed >= limit for sequence in request.running_sequences):
        return LlmRequestState.GENERATION_TO_COMPLETE
    return LlmRequestState.GENERATION_IN_PROGRESS
