"""Interface for capacity policies in TensorRT-LLM's form: one method that gets all active requests, queued and running.

A policy is a class derived from RequestListScheduler. Each decision about a worker group constructs a new instance with
the arguments below; it returns the requests that fit, in the order in which to start them, and those to pause. A
running request that is in neither list keeps running, since it holds its blocks.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from scheduler.core.capacity_scheduler import CapacityScheduler, has_room_now
from scheduler.core.guarded_scheduler import RequestError, culprits
from scheduler.core.request import Request
from scheduler.core.worker_group import WorkerGroup


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


class RequestListScheduler(ABC):
    """A policy that decides about all active requests in one call."""

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


class RequestListCapacity(CapacityScheduler):
    """A capacity policy that delegates every decision to a RequestListScheduler."""

    def __init__(self, policy: type[RequestListScheduler]) -> None:
        self._policy = policy

    def select(self, queued: Sequence[Request], group: WorkerGroup) -> Sequence[Request]:
        """Return the queued requests that the policy reports as fitting."""
        possible = [request for request in queued if group.is_large_enough(request)]
        fitting, _ = self._schedule(group, possible)
        return [request for request in fitting if request.group is None]

    def can_start(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether enough rows and blocks are free for the request's known tokens and one more token."""
        return has_room_now(request, group)

    def requests_to_pause(self, group: WorkerGroup) -> list[Request]:
        """Return the running requests that the policy pauses."""
        _, paused = self._schedule(group, [])
        return [request for request in paused if request.group is group]

    def _schedule(self, group: WorkerGroup, queued: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        views = [LlmRequest(request) for request in (*group.active, *queued)]
        if not views:
            return [], []

        def ask(some: Sequence[LlmRequest]) -> tuple[RequestList, RequestList]:
            policy = self._policy(max_num_requests=group.max_batch_size, kv_cache_manager=KvCacheManager(group))
            fitting, paused = policy.schedule_request(list(some))
            return fitting, paused

        try:
            fitting, paused = ask(views)
        except Exception as error:
            requests = LlmRequest.unwrap(views)
            found = culprits(lambda some: ask(list(map(LlmRequest, some))), requests)
            raise RequestError(found) from error
        return LlmRequest.unwrap(fitting), LlmRequest.unwrap(paused)


def _state(request: Request) -> LlmRequestState:
    group = request.group
    if group is None or any(sequence.request is request for sequence in group.context):
        return LlmRequestState.CONTEXT_INIT
    limit = request.spec.max_num_tokens
    if all(sequence.num_computed >= limit for sequence in request.running_sequences):
        return LlmRequestState.GENERATION_TO_COMPLETE
    return LlmRequestState.GENERATION_IN_PROGRESS
