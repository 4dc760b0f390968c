"""The executor, which communicates with the service in a background thread.

1. `submit` assigns an id and passes the request to the thread, which runs it as a stream of the native client; if the
   router is lost, the stream resumes at another.
2. Chunks accumulate in the request's GenerationResult, where iterations, `result()` and `await_responses` read them.
3. The executor forgets a request that has been read completely; the caller's GenerationResult keeps everything.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self, overload

from midstream.client import AsyncClient, FinishReason
from midstream.client.background_loop import BackgroundLoop
from midstream.client.request import Array
from midstream.errors import AbortedError, InvalidArgumentError, MidstreamError, NotFoundError
from midstream.executor.api_request import Request
from midstream.executor.config import ExecutorConfig, GuidedDecodingConfig
from midstream.executor.engine_folder import one_tokenizer
from midstream.executor.lifecycle import RequestState, RequestStats
from midstream.executor.request import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    MultimodalParams,
    NGramDecodingConfig,
    PromptAdapterRequest,
)
from midstream.executor.response import Response
from midstream.executor.result import GenerationResult
from midstream.executor.sampling_params import SamplingParams
from midstream.executor.service import LocalService
from midstream.executor.stats import IterationStats, sum_up
from midstream.model.folder import EMBEDDED_MODEL
from protos import generation_pb2 as pb

Prompt = Sequence[int] | str
_RETRY_S, _ABORT_RETRY_S = 0.2, 0.02
_MAX_ITERATIONS = 1000
_MAX_REQUEST_STATS = 1024
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class GenerationExecutor:
    """Runs requests on a service. Use it as a context manager, or call `shutdown`."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: LocalService | None = None,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """Connect to the service; see `create`."""
        self._service = service
        self._config = executor_config or ExecutorConfig()
        self._process = os.getpid()
        self._loop = BackgroundLoop("executor")
        try:
            self._client = self._loop.run(_open(addresses))
        except BaseException:
            self._loop.close()
            raise
        # This makes request ids unique among executors of the same service.
        self._prefix = uuid.uuid4().hex[:16]
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._results: dict[int, GenerationResult] = {}
        self._running: dict[int, Future[None]] = {}
        self._news: Future[None] = Future()
        self._iterations: deque[IterationStats] = deque(maxlen=_MAX_ITERATIONS)
        self._iteration_reader: Future[None] | None = None
        self._closed = False
        atexit.register(self.shutdown)
        try:
            self._check_guided(self._config.guided_decoding_config)
        except BaseException:
            self.shutdown()
            raise

    @staticmethod
    def create(
        model: str = EMBEDDED_MODEL,
        *,
        engine_dir: str | None = None,
        tokenizer_dir: str | None = None,
        address: str | Sequence[str] | None = None,
        num_workers: int = 1,
        num_postprocess_workers: int = 1,
        postprocess_tokenizer_dir: str | None = None,
        executor_config: ExecutorConfig | None = None,
    ) -> GenerationExecutor:
        """Start the services on this machine, or connect to those at `address`.

        Args:
            model: Model folder, GGUF file, or `smollm2` for the embedded model.
            engine_dir: Another name for `model`.
            tokenizer_dir: Folder of the tokenizer, if it is not the model's.
            address: Routers of a running service. No service is started, and services cannot be configured.
            num_workers: Number of worker groups, each with the ranks of `executor_config.parallel_config`.
            num_postprocess_workers: Number of detokenizers; at least one runs.
            postprocess_tokenizer_dir: Folder of the detokenizers' tokenizer, which must equal that of tokenizer_dir.
            executor_config: Settings of the services.

        Raises:
            InvalidArgumentError: Arguments conflict.
            UnsupportedError: A setting is not implemented.
            ExecutionError: The services did not start.
        """
        if address is not None:
            if executor_config is not None:
                raise InvalidArgumentError("a running service cannot be configured", field="executor_config")
            return GenerationExecutor([address] if isinstance(address, str) else address)
        config = executor_config or ExecutorConfig()
        tokenizer = one_tokenizer(tokenizer_dir, postprocess_tokenizer_dir)
        service = LocalService(
            engine_dir or model,
            config,
            tokenizer_dir=tokenizer,
            num_workers=num_workers,
            num_detokenizers=max(num_postprocess_workers, 1),
        )
        return GenerationExecutor(service.addresses, service, config)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Assign an id to the request and run it.

        Raises:
            InvalidArgumentError: A value is invalid for its field. If the service rejects the request, the result
                raises.
        """
        message = self._to_proto(request)
        if self._closed:
            raise InvalidArgumentError("the executor is shut down", field="executor")
        # The result keeps a copy, since the same request may be submitted again.
        request.set_id(next(self._ids))
        request = replace(request)
        message.request_id = self._wire_id(request.id)
        result = GenerationResult(request, self._forget, self._ask_state)
        with self._lock:
            self._results[request.id] = result
            # The lock is held because the stream could otherwise end before the entry is added.
            self._running[request.id] = self._loop.start(self._follow(result, message))
        return result

    def enqueue_request(self, request: Request | GenerationRequest) -> int:
        """Run a request whose output is read by `await_responses`; return its id.

        Raises:
            InvalidArgumentError: As in `submit`.
        """
        native = request.to_generation_request() if isinstance(request, Request) else request
        return self.submit(native).request.id

    def enqueue_requests(self, requests: Sequence[Request | GenerationRequest]) -> list[int]:
        """Run several requests; return their ids. If one is invalid, none of them runs.

        Raises:
            InvalidArgumentError: As in `submit`.
        """
        native = [item.to_generation_request() if isinstance(item, Request) else item for item in requests]
        for request in native:
            self._to_proto(request)
        return [self.submit(request).request.id for request in native]

    def can_enqueue_requests(self) -> bool:
        """Return whether requests are accepted."""
        return not self._closed

    def _to_proto(self, request: GenerationRequest) -> pb.GenerateRequest:
        message = request.to_proto()
        known = {item.name for item in message.output.additional_outputs}
        for item in self._config.additional_model_outputs:
            if item.name not in known:
                message.output.additional_outputs.add(name=item.name, gather_context=item.gather_context)
        if self._config.speculative_config is not None and not message.HasField("speculative"):
            message.speculative.CopyFrom(self._config.speculative_config.to_proto())
        return message

    def generate_async(
        self,
        prompt_token_ids: Prompt | None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        max_tokens: int | None = None,
        query_token_ids: Sequence[int] | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        multimodal_params: MultimodalParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        prompt_tuning_table: Array | None = None,
        prompt_embeddings: Array | None = None,
        speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None,
    ) -> GenerationResult:
        """Run one prompt, given as tokens or text; see GenerationRequest for the arguments."""
        return self.submit(
            GenerationRequest(
                prompt_token_ids,
                sampling_params or SamplingParams(),
                max_tokens=max_tokens,
                query_token_ids=query_token_ids,
                lora_request=lora_request,
                prompt_adapter_request=prompt_adapter_request,
                streaming=streaming,
                kv_cache_retention_config=kv_cache_retention_config,
                multimodal_params=multimodal_params,
                arrival_time=arrival_time,
                priority=priority,
                client_id=client_id,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                prompt_tuning_table=prompt_tuning_table,
                prompt_embeddings=prompt_embeddings,
                speculative_config=speculative_config,
            )
        )

    @overload
    def generate(
        self, prompt_token_ids: Sequence[int] | str, sampling_params: SamplingParams | None = None, **options: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int] | str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt_token_ids: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Run one prompt or several prompts concurrently, and wait until all have ended.

        Args:
            prompt_token_ids: One prompt, or a sequence of them.
            sampling_params: Parameters for all prompts, or a sequence with those of each.
            options: As in `generate_async`; they apply to all prompts.

        Raises:
            InvalidArgumentError: The numbers of prompts and parameters differ.
            MidstreamError: A request failed.
        """
        is_one = isinstance(prompt_token_ids, str) or not any(
            isinstance(item, str | Sequence) for item in prompt_token_ids
        )
        prompts: list[Any] = [prompt_token_ids] if is_one else list(prompt_token_ids)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise InvalidArgumentError(f"{len(params)} for {len(prompts)} prompts", field="sampling_params")
        results = [self.generate_async(prompt, item, **options) for prompt, item in zip(prompts, params, strict=True)]
        for result in results:
            result.result()
        return results[0] if is_one else results

    def abort_request(self, request_id: int) -> None:
        """End a request with finish reason `abort`; no effect if it has already ended."""
        if request_id in self._results:
            self._loop.run(self._abort(request_id))

    def cancel_request(self, request_id: int) -> None:
        """End a request with finish reason `abort` in its last response; no effect if it has already ended."""
        self.abort_request(request_id)

    def await_responses(
        self, request_id: int | None = None, timeout: float | timedelta | None = None
    ) -> list[Response]:
        """Return the unread responses of one request or of all requests; wait until there is one.

        Args:
            request_id: Id of a request whose final response has not been taken; None means all requests.
            timeout: Seconds, or a duration, after which an empty list is returned.

        Raises:
            NotFoundError: The request does not exist, or it has been read completely.
            InvalidArgumentError: The executor is shut down, and everything has been read.
        """
        timeout = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                news, is_over = self._news, self._closed and not self._running
                if request_id is not None and request_id not in self._results:
                    raise NotFoundError("no such request, or it has been read completely", field="request_id")
                results = list(self._results.values()) if request_id is None else [self._results[request_id]]
            responses = [response for result in results for response in result.take_responses()]
            left = None if deadline is None else deadline - time.monotonic()
            if responses or (left is not None and left <= 0):
                return responses
            if is_over:
                raise InvalidArgumentError("the executor is shut down", field="executor")
            if request_id is None or request_id in self._results:
                wait([news], left, FIRST_COMPLETED)

    def get_latest_stats(self) -> IterationStats:
        """Return the statistics of the latest iteration, summed over all cells."""
        return sum_up(self._loop.run(self._latest_stats()))

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the statistics of at most 1,000 iterations since the last call, oldest first; the first call returns
        none.

        If there are several cells, their iterations are separate entries that name the worker group.
        """
        self.follow_iterations()
        return [self._iterations.popleft() for _ in range(len(self._iterations))]

    def follow_iterations(self) -> None:
        """Start to collect iterations for `get_latest_iteration_stats`; return once the service sends them."""
        if self._iteration_reader is None:
            follows: Future[None] = Future()
            reading = self._read_iterations(follows)
            self._iteration_reader = self._loop.start(reading)
            follows.result()

    def get_latest_request_stats(self, request_ids: Sequence[int] | None = None) -> list[RequestStats]:
        """Return the states of requests and the resources that they hold; requests that the service has forgotten are
        omitted.

        Args:
            request_ids: Ids of the requests; by default, those of all unfinished requests.
        """
        if request_ids is None:
            with self._lock:
                request_ids = list(self._running)
        by_wire_id = {self._wire_id(request_id): request_id for request_id in request_ids}
        found: list[RequestStats] = []
        wire_ids = list(by_wire_id)
        for start in range(0, len(wire_ids), _MAX_REQUEST_STATS):
            stats = self._loop.run(self._client.request_stats(wire_ids[start : start + _MAX_REQUEST_STATS]))
            found += [RequestStats.from_proto(by_wire_id[item.id], item) for item in stats]
        return found

    def shutdown(self) -> None:
        """Abort running requests, whose results raise AbortedError, and stop the services that `create` started. No
        effect in a forked process.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        running = [*self._running.values(), *filter(None, [self._iteration_reader])]
        for item in running:
            item.cancel()
        wait(running)
        self._loop.close(self._client.close())
        self._wake()
        if self._service is not None:
            self._service.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _follow(self, result: GenerationResult, message: Any) -> None:
        error: MidstreamError | None = None
        try:
            async for chunk in self._client.stream(message, timeout_s=result.request.timeout_s):
                # The error of a failed request follows its last chunk.
                chunk.is_final &= chunk.finish_reason not in _FAILURES
                result.put(chunk)
                self._wake()
        except MidstreamError as failure:
            error = failure
        except asyncio.CancelledError:
            error = AbortedError("the executor was shut down before the request ended")
            raise
        finally:
            result.end(error)
            with self._lock:
                self._running.pop(result.request.id, None)
            self._wake()

    async def _abort(self, request_id: int) -> None:
        # The abort may arrive before the request itself, which the service then does not know yet.
        while request_id in self._running:
            if await self._client.abort(self._wire_id(request_id)):
                return
            await asyncio.sleep(_ABORT_RETRY_S)

    async def _latest_stats(self) -> list[dict[str, object]]:
        return [stats async for stats in self._client.iteration_stats()]

    async def _read_iterations(self, follows: Future[None]) -> None:
        """Collect iterations as they arrive; if a router is lost, continue with the newest iteration."""
        while True:
            try:
                stream = self._client.iteration_stats(follow=True, on_open=lambda: _set(follows))
                async for stats in stream:
                    self._iterations.append(IterationStats(stats))
            except MidstreamError:
                await asyncio.sleep(_RETRY_S)

    def _ask_state(self, request_id: int) -> RequestState:
        stats = self.get_latest_request_stats([request_id])
        # If the service does not know the request, it may not have arrived yet.
        return stats[0].state if stats else RequestState.PENDING

    def _check_guided(self, config: GuidedDecodingConfig | None) -> None:
        """Check the tokenizer settings against the model's tokenizer."""
        if config is None:
            return
        info = self._loop.run(self._client.model_info())
        if config.encoded_vocab is not None and len(config.encoded_vocab) > info.vocab_size:
            raise InvalidArgumentError(
                f"has {len(config.encoded_vocab)} tokens; the model has {info.vocab_size}",
                field="guided_decoding_config.encoded_vocab",
            )
        unknown = set(config.stop_token_ids or ()) - set(info.end_ids)
        if unknown:
            raise InvalidArgumentError(
                f"{sorted(unknown)} are not end ids of the model: {list(info.end_ids)}",
                field="guided_decoding_config.stop_token_ids",
            )

    def _wake(self) -> None:
        with self._lock:
            news, self._news = self._news, Future()
        news.set_result(None)

    def _forget(self, result: GenerationResult) -> None:
        with self._lock:
            self._results.pop(result.request.id, None)

    def _wire_id(self, request_id: int) -> str:
        return f"{self._prefix}-{request_id}"


class ModelType(StrEnum):
    """Model architecture, as in TensorRT-LLM's `ModelType`; only decoder-only models are supported."""

    DECODER_ONLY = "decoder_only"


class Executor(GenerationExecutor):
    """The Executor API: `enqueue_request` submits requests, and `await_responses` returns their output."""

    def __init__(
        self,
        model_path: str,
        model_type: ModelType = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """Start the services on this machine.

        Args:
            model_path: Model folder, GGUF file, or `smollm2`.
            model_type: Only DECODER_ONLY is supported.
            executor_config: Settings of the services.

        Raises: As in `GenerationExecutor.create`.
        """
        config = executor_config or ExecutorConfig()
        if model_type not in list(ModelType):
            raise InvalidArgumentError("must be decoder_only", field="model_type")
        service = LocalService(model_path, config)
        super().__init__(service.addresses, service, config)


async def _open(addresses: Sequence[str]) -> AsyncClient:
    # Channels belong to the event loop on which they were created.
    return AsyncClient(addresses)


def _set(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)
