"""TensorRT-LLM's batch manager: a loop that gets requests from a callback and passes responses to another.

Each iteration runs in a separate thread:

1. `get_inference_requests_cb(max_num_requests)` returns new requests; one whose id is in use is rejected. A negative
   number means no limit.
2. Available output is passed to `send_response_cb(request_id, tensors, is_final, error)`.
3. `poll_stop_signal_cb()` returns the ids to stop; a stopped request still gets its final response.
4. `return_batch_manager_stats_cb(json)` receives the statistics of each scheduler iteration since the last call, in
   order. It is not called while there are no active requests.

An id may be reused after its final response.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Self

from midstream.errors import AlreadyExistsError, MidstreamError
from midstream.executor.config import (
    DecodingConfig,
    ExecutorConfig,
    KvCacheConfig,
    ParallelConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from midstream.executor.enums import CapacitySchedulerPolicy, DecodingMode, ModelType, TrtGptModelType
from midstream.executor.executor import Executor
from midstream.executor.inference_request import InferenceRequest, NamedTensor
from midstream.executor.request import Request
from midstream.executor.response import Response
from midstream.executor.response_tensors import RequestLengths, response_tensors
from midstream.executor.stats import IterationStats

logger = logging.getLogger(__name__)

_ITERATION_S = 0.02

GetInferenceRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, Sequence[NamedTensor], bool, str], None]
PollStopSignal = Callable[[], Iterable[int]]
ReturnBatchManagerStats = Callable[[str], None]


@dataclass(slots=True)
class TrtGptModelOptionalParams:
    """Optional parameters of a GptManager.

    Attributes:
        enable_trt_overlap: Whether to keep two steps in flight, which is the service's default.
        device_ids: The devices of the ranks.
        normalize_log_probs, decoding_mode: As in ExecutorConfig.
        max_num_requests: Maximum number of active requests; negative means no limit.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=lambda: KvCacheConfig(enable_block_reuse=False))
    enable_trt_overlap: bool = False
    device_ids: Sequence[int] | None = None
    normalize_log_probs: bool = True
    enable_chunked_context: bool = False
    decoding_mode: DecodingMode | None = None
    peft_cache_manager_config: PeftCacheConfig = field(
        default_factory=lambda: PeftCacheConfig(max_pages_per_block_device=24, device_cache_percent=0.05)
    )
    max_num_requests: int = -1


class GptManager:
    """Runs the loop from construction until `shutdown`, which waits for active requests.

    An exception in a callback is logged and does not end any request; the callback is called again in the next
    iteration.
    """

    def __init__(
        self,
        trt_engine_path: str | PathLike[str] | Executor,
        model_type: TrtGptModelType,
        max_beam_width: int,
        scheduler_config: SchedulerConfig | CapacitySchedulerPolicy,
        get_inference_requests_cb: GetInferenceRequests,
        send_response_cb: SendResponse,
        poll_stop_signal_cb: PollStopSignal | None = None,
        return_batch_manager_stats_cb: ReturnBatchManagerStats | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
    ) -> None:
        """Start services on this machine, and the loop.

        Args:
            trt_engine_path: Model folder, GGUF file, or `smollm2`; or an executor, whose responses and statistics no
                other code may take, and which is configured already.
            model_type: Batching scheme.
            max_beam_width: Maximum beam width of a request.
            scheduler_config: Capacity policy.
            get_inference_requests_cb, send_response_cb: See above.
            poll_stop_signal_cb: Returns ids of requests to stop.
            return_batch_manager_stats_cb: Receives an iteration's statistics as JSON, with the labels of TensorRT-LLM's
                batch manager (`Active Request Count`) and the names of its executor (`numActiveRequests`).
            optional_params: Further settings.
            terminate_req_id: Id of a request after which no more are taken.

        Raises: As in Executor.
        """
        optional = optional_params or TrtGptModelOptionalParams()
        self._owns_executor = not isinstance(trt_engine_path, Executor)
        if isinstance(trt_engine_path, Executor):
            self._executor = trt_engine_path
        else:
            config = _config(model_type, max_beam_width, scheduler_config, optional)
            self._executor = Executor(trt_engine_path, ModelType.DECODER_ONLY, config)
        self._get = get_inference_requests_cb
        self._send = send_response_cb
        self._poll = poll_stop_signal_cb
        self._return_stats = return_batch_manager_stats_cb
        self._max_num_requests = optional.max_num_requests
        self._terminate_req_id = terminate_req_id
        self._stopping = threading.Event()
        self._by_caller: dict[int, int] = {}
        self._by_executor: dict[int, int] = {}
        self._lengths: dict[int, RequestLengths] = {}
        self._executor.get_latest_iteration_stats()  # those of earlier requests
        self._thread = threading.Thread(target=self._loop, name="midstream-batch-manager", daemon=True)
        self._thread.start()

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
            if item.request_id == self._terminate_req_id:
                self._stopping.set()
                return
            try:
                if item.request_id in self._by_caller:
                    raise AlreadyExistsError("the id is in use", field="request_id")
                request = item.to_request()
                executor_id = self._executor.enqueue_request(request)
            except MidstreamError as error:
                self._send(item.request_id, [], True, str(error))
            else:
                self._start(item.request_id, executor_id, request)

    def _start(self, request_id: int, executor_id: int, request: Request) -> None:
        self._by_caller[request_id] = executor_id
        self._by_executor[executor_id] = request_id
        self._lengths[request_id] = RequestLengths(request)

    def _send_responses(self) -> None:
        responses: dict[int, list[Response]] = {}
        for response in self._executor.await_responses(_ITERATION_S):
            responses.setdefault(response.request_id, []).append(response)
        for executor_id, group in responses.items():
            request_id = self._by_executor[executor_id]
            lengths = self._lengths[request_id]
            if group[-1].has_error() or group[-1].result.is_final:
                del self._by_executor[executor_id], self._by_caller[request_id], self._lengths[request_id]
            for response in group:
                self._guarded(partial(self._send_one, request_id, response, lengths))

    def _send_one(self, request_id: int, response: Response, lengths: RequestLengths) -> None:
        if response.has_error():
            self._send(request_id, [], True, response.error_msg)
        else:
            self._send(request_id, response_tensors(response.result, lengths), response.result.is_final, "")

    def _stop_requests(self) -> None:
        for request_id in self._poll() if self._poll else ():
            if request_id in self._by_caller:
                self._executor.cancel_request(self._by_caller[request_id])

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


def _config(
    model_type: TrtGptModelType,
    max_beam_width: int,
    scheduler_config: SchedulerConfig | CapacitySchedulerPolicy,
    optional: TrtGptModelOptionalParams,
) -> ExecutorConfig:
    if isinstance(scheduler_config, CapacitySchedulerPolicy):
        scheduler_config = SchedulerConfig(scheduler_config)
    return ExecutorConfig(
        max_beam_width,
        scheduler_config,
        optional.kv_cache_config,
        optional.enable_chunked_context,
        batching_type=model_type,
        parallel_config=ParallelConfig(device_ids=optional.device_ids) if optional.device_ids else None,
        peft_cache_config=optional.peft_cache_manager_config,
        decoding_config=DecodingConfig(optional.decoding_mode) if optional.decoding_mode else None,
        enable_trt_overlap=optional.enable_trt_overlap,
        normalize_log_probs=optional.normalize_log_probs,
    )


def _to_json(stats: IterationStats) -> str:
    return json.dumps({**stats.labelled(), **json.loads(stats.to_json_str())})
