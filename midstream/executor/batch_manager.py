"""TensorRT-LLM's batch manager: a loop that gets requests from a callback and passes responses to another.

Each iteration runs in a separate thread:

1. `get_inference_requests(max_num_requests)` returns new requests; one whose id is in use is rejected.
2. Available output is passed to `send_response(request_id, tensors, is_final, error)`.
3. `poll_stop_signals()` returns the ids to stop; a stopped request still gets its final response.
4. `return_batch_manager_stats(json)` receives the statistics of each scheduler iteration since the last call, in order.
   It is not called while there are no active requests.

An id may be reused after its final response.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from midstream.errors import AlreadyExistsError, MidstreamError
from midstream.executor.config import BatchingType, ExecutorConfig, KvCacheConfig, PeftCacheConfig, SchedulerConfig
from midstream.executor.executor import GenerationExecutor
from midstream.executor.request import GenerationRequest
from midstream.executor.response import Response
from midstream.executor.response_tensors import RequestLengths, response_tensors
from midstream.executor.stats import IterationStats
from midstream.extras import Tensor

logger = logging.getLogger(__name__)

_ITERATION_S = 0.02


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request with an id chosen by the caller, an unsigned 64-bit integer."""

    request_id: int
    request: GenerationRequest


GetInferenceRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Sequence[Tensor], bool, str], None]
PollStopSignals = Callable[[], Iterable[int]]
ReturnBatchManagerStats = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalParams:
    """Optional parameters of `BatchManager.create`.

    Attributes:
        enable_trt_overlap: Whether to keep two steps in flight, so that scheduling overlaps with compute; None means
            the service's default.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool | None = None
    enable_chunked_context: bool = True
    peft_cache_manager_config: PeftCacheConfig = field(default_factory=PeftCacheConfig)


class BatchManager:
    """Runs the loop from construction until `shutdown`, which waits for active requests.

    An exception in a callback is logged and does not end any request; the callback is called again in the next
    iteration.
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
        owns_executor: bool = False,
    ) -> None:
        """Start the loop.

        Args:
            executor: Runs the requests; no other code may take responses or iteration statistics from it.
            get_inference_requests: Returns at most as many new requests as its argument says; a negative one means no
                limit.
            send_response: Receives tensors (see `response_tensors`), whether they are the request's last, and an error
                message or "".
            poll_stop_signals: Returns ids of requests to stop.
            return_batch_manager_stats: Receives an iteration's statistics as JSON, with the labels of TensorRT-LLM's
                batch manager (`Active Request Count`) and the names of its executor (`numActiveRequests`).
            max_num_requests: Maximum number of active requests; negative means no limit.
            owns_executor: Whether `shutdown` also shuts down the executor.
        """
        self._executor = executor
        self._get = get_inference_requests
        self._send = send_response
        self._poll = poll_stop_signals
        self._return_stats = return_batch_manager_stats
        self._max_num_requests = max_num_requests
        self._owns_executor = owns_executor
        self._stopping = threading.Event()
        self._by_caller: dict[int, int] = {}
        self._by_executor: dict[int, int] = {}
        self._lengths: dict[int, RequestLengths] = {}
        if return_batch_manager_stats is not None:
            executor.follow_iterations()
        self._thread = threading.Thread(target=self._loop, name="midstream-batch-manager", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        engine_path: str,
        model_type: BatchingType,
        max_beam_width: int,
        scheduler_config: SchedulerConfig,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals | None = None,
        return_batch_manager_stats: ReturnBatchManagerStats | None = None,
        optional_params: OptionalParams | None = None,
    ) -> Self:
        """Start services on this machine, and the loop, with the arguments of TensorRT-LLM's `GptManager`.

        Args:
            engine_path: Model folder, GGUF file, or `smollm2`.
            model_type: Batching scheme.
            max_beam_width: Maximum beam width of a request.
            scheduler_config: Capacity policy.
            get_inference_requests, send_response, poll_stop_signals, return_batch_manager_stats: As in the constructor.
            optional_params: Further settings.

        Raises: As in `GenerationExecutor.create`.
        """
        optional = optional_params or OptionalParams()
        depth = {} if optional.enable_trt_overlap is None else {"pipeline_depth": 1 + optional.enable_trt_overlap}
        config = ExecutorConfig(
            max_beam_width=max_beam_width,
            scheduler_config=scheduler_config,
            batching_type=model_type,
            kv_cache_config=optional.kv_cache_config,
            peft_cache_config=optional.peft_cache_manager_config,
            enable_chunked_context=optional.enable_chunked_context,
            settings=depth,
        )
        executor = GenerationExecutor.create(engine_dir=engine_path, executor_config=config)
        return cls(
            executor,
            get_inference_requests,
            send_response,
            poll_stop_signals,
            return_batch_manager_stats,
            owns_executor=True,
        )

    def shutdown(self) -> None:
        """Accept no new requests, and return when all active requests have had their final response."""
        self._stopping.set()
        self._thread.join()
        if self._owns_executor:
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _loop(self) -> None:
        while self._by_caller or not self._stopping.is_set():
            if not self._stopping.is_set():
                self._guarded(self._take_requests)
            if self._by_caller:
                self._guarded(self._send_responses)
                self._guarded(self._stop_requests)
                self._guarded(self._report)
            else:
                self._stopping.wait(_ITERATION_S)

    def _take_requests(self) -> None:
        room = -1 if self._max_num_requests < 0 else self._max_num_requests - len(self._by_caller)
        if room == 0:
            return
        for item in self._get(room):
            try:
                if item.request_id in self._by_caller:
                    raise AlreadyExistsError("the id is in use", field="request_id")
                result = self._executor.submit(item.request)
            except MidstreamError as error:
                self._send(item.request_id, [], True, str(error))
            else:
                self._by_caller[item.request_id] = result.request.id
                self._by_executor[result.request.id] = item.request_id
                self._lengths[item.request_id] = RequestLengths(item.request)

    def _send_responses(self) -> None:
        responses: dict[int, list[Response]] = {}
        for response in self._executor.await_responses(timeout=_ITERATION_S):
            responses.setdefault(response.request_id, []).append(response)
        for executor_id, group in responses.items():
            request_id = self._by_executor[executor_id]
            lengths = self._lengths[request_id]
            if group[-1].is_final:
                del self._by_executor[executor_id], self._by_caller[request_id], self._lengths[request_id]
            for response in group:
                self._guarded(partial(self._send_one, request_id, response, lengths))

    def _send_one(self, request_id: int, response: Response, lengths: RequestLengths) -> None:
        tensors = [] if response.result is None else response_tensors(response.result, lengths)
        self._send(request_id, tensors, response.is_final, response.error_msg)

    def _stop_requests(self) -> None:
        for request_id in self._poll() if self._poll else ():
            if request_id in self._by_caller:
                self._executor.abort_request(self._by_caller[request_id])

    def _report(self) -> None:
        if self._return_stats is not None:
            for stats in self._executor.get_latest_iteration_stats():
                self._return_stats(_to_json(stats))

    @staticmethod
    def _guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a bug in a callback must not end the loop for all other requests
            logger.exception("a callback failed")


def _to_json(stats: IterationStats) -> str:
    return json.dumps({**stats.labelled(), **stats.fields})
