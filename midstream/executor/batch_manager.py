"""The batch manager's callbacks, for those who own the loop that requests come from.

Each iteration, in a thread of its own:

1. `get_inference_requests(max_num_requests)` gives new requests; one whose id is being processed is refused.
2. What has come is sent by `send_response(request_id, results, is_final, error)`.
3. `poll_stop_signals()` gives the ids to stop; a stopped request still gets its final response.
4. `return_batch_manager_stats(json)` gets the scheduler's statistics, while there are active requests.

An id may be used again after its final response.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from midstream.errors import AlreadyExistsError, MidstreamError
from midstream.executor.executor import GenerationExecutor
from midstream.executor.request import GenerationRequest
from midstream.executor.response import Response, ResponseResult

logger = logging.getLogger(__name__)

_ITERATION_S = 0.02
_STATS_EVERY = 10


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request under an id of the caller's own."""

    request_id: int
    request: GenerationRequest


GetInferenceRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Sequence[ResponseResult], bool, str], None]
PollStopSignals = Callable[[], Iterable[int]]
ReturnBatchManagerStats = Callable[[str], None]


class BatchManager:
    """Runs the loop from its making until `shutdown`, which lets active requests finish first.

    A callback that raises is logged and called again at the next iteration; it ends no request.
    """

    def __init__(
        self,
        executor: GenerationExecutor,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None = None,
        return_batch_manager_stats: ReturnBatchManagerStats | None = None,
        *,
        max_num_requests: int = -1,
    ) -> None:
        """Starts the loop.

        Args:
            executor: What runs the requests; nobody else takes responses from it.
            get_inference_requests: Gives at most as many new requests as its argument says; negative: any number.
            send_response: Gets what came of a request, whether that is the last, and an error's text or nothing.
            poll_stop_signals: Gives ids of requests to stop.
            return_batch_manager_stats: Gets the latest statistics as JSON.
            max_num_requests: Most active requests; negative: any number.
        """
        self._executor = executor
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._max_num_requests = max_num_requests
        self._stopping = threading.Event()
        self._by_caller: dict[int, int] = {}
        self._by_executor: dict[int, int] = {}
        self._thread = threading.Thread(target=self._loop, name="midstream-batch-manager", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Takes nothing new, and returns when everything active has had its final response."""
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _loop(self) -> None:
        iteration = 0
        while self._by_caller or not self._stopping.is_set():
            if not self._stopping.is_set():
                self._guarded(self._take_requests)
            if self._by_caller:
                self._guarded(self._send_responses)
                self._guarded(self._stop_requests)
                if iteration % _STATS_EVERY == 0:
                    self._guarded(self._report)
                iteration += 1
            else:
                self._stopping.wait(_ITERATION_S)

    def _take_requests(self) -> None:
        room = -1 if self._max_num_requests < 0 else self._max_num_requests - len(self._by_caller)
        if room == 0:
            return
        for item in self._get(room):
            try:
                if item.request_id in self._by_caller:
                    raise AlreadyExistsError("the id is being processed", field="request_id")
                result = self._executor.submit(item.request)
            except MidstreamError as error:
                self._send(item.request_id, [], True, str(error))
            else:
                self._by_caller[item.request_id] = result.request.id
                self._by_executor[result.request.id] = item.request_id

    def _send_responses(self) -> None:
        responses: dict[int, list[Response]] = {}
        for response in self._executor.await_responses(timeout=_ITERATION_S):
            responses.setdefault(response.request_id, []).append(response)
        for executor_id, group in responses.items():
            is_final, error = group[-1].is_final, group[-1].error_msg
            request_id = self._by_executor[executor_id]
            if is_final:
                del self._by_executor[executor_id], self._by_caller[request_id]
            results = [response.result for response in group if response.result is not None]
            self._guarded(lambda to=request_id, of=results, end=is_final, why=error: self._send(to, of, end, why))  # type: ignore[misc]

    def _stop_requests(self) -> None:
        for request_id in self._poll() if self._poll else ():
            if request_id in self._by_caller:
                self._executor.abort_request(self._by_caller[request_id])

    def _report(self) -> None:
        if self._return_stats:
            self._return_stats(self._executor.get_latest_stats().to_json())

    @staticmethod
    def _guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a caller's defect must not end the loop for the other requests
            logger.exception("a callback failed")
