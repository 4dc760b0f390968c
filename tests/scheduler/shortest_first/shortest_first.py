"""Example capacity policy: the shortest waiting request starts first."""

from __future__ import annotations

from scheduler.list_schedulers import CapacityScheduler, KvCacheManager, LlmRequest, RequestList


class ShortestFirst(CapacityScheduler):
    """Starts the requests that fit until their end, shortest first; none overtakes the first request that does
    not fit.
    """

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheManager) -> None:
        super().__init__()
        self.max_num_requests = max_num_requests
        self.blocks = kv_cache_manager

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return the requests to run and to start; preempt none."""
        fitting = [request for request in active_requests if not request.is_queued]
        num_free = self.blocks.get_max_resource_count() - sum(map(self._num_blocks, fitting))
        for request in sorted((item for item in active_requests if item.is_queued), key=_length):
            num_free -= self._num_blocks(request)
            if num_free < 0 or len(fitting) >= self.max_num_requests:
                break
            fitting.append(request)
        return fitting, []

    def _num_blocks(self, request: LlmRequest) -> int:
        return self.blocks.get_needed_resource_to_completion(request)


def _length(request: LlmRequest) -> tuple[int, int]:
    return request.prompt_len + request.max_new_tokens, request.arrival_ns
