"""The executor: requests in, results out, while a thread of its own talks to the service.

1. `submit` numbers the request and hands it to the thread, which runs it as a stream of the native client; the stream
   goes on at another router when its own is lost.
2. Chunks gather in the request's GenerationResult, from where iterations, `result()` and `await_responses` take them.
3. What has been read to its end is forgotten here; the caller's GenerationResult keeps everything.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from midstream.client import AsyncClient, FinishReason
from midstream.client.request import Array
from midstream.errors import InvalidArgumentError, MidstreamError, NotFoundError
from midstream.executor.config import ExecutorConfig
from midstream.executor.request import (
    DraftTargetDecodingConfig,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    NGramDecodingConfig,
    PromptAdapterRequest,
)
from midstream.executor.response import Response
from midstream.executor.result import GenerationResult
from midstream.executor.sampling_params import SamplingParams
from midstream.executor.service import LocalService
from midstream.executor.stats import IterationStats
from midstream.model.folder import EMBEDDED_MODEL

_T = TypeVar("_T")
Prompt = Sequence[int] | str
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class GenerationExecutor:
    """Runs requests on a service; use it as a context manager, or call `shutdown`."""

    def __init__(self, addresses: Sequence[str], service: LocalService | None = None) -> None:
        """Connects; see `create`."""
        self._service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="midstream-executor", daemon=True)
        self._thread.start()
        self._client = self._run(_open(addresses))
        # A request's id in the service, which other executors use too.
        self._prefix = uuid.uuid4().hex[:16]
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._results: dict[int, GenerationResult] = {}
        self._running: dict[int, Future[None]] = {}
        self._news: Future[None] = Future()
        self._closed = False
        atexit.register(self.shutdown)

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
        """Starts the services on this machine, or connects to those at `address`.

        Args:
            model: Model folder, GGUF file, or `smollm2` for the embedded model.
            engine_dir: Another name for `model`.
            tokenizer_dir: Where given, it must be the model's folder: tokenizer and weights are one folder here.
            address: Routers of a running service; then nothing is started, and `executor_config` must not be given.
            num_workers: Worker processes.
            num_postprocess_workers: Detokenizers.
            postprocess_tokenizer_dir: As tokenizer_dir.
            executor_config: Settings of the services.

        Raises:
            InvalidArgumentError: Arguments that do not go together.
            ExecutionError: The services did not start.
        """
        model = engine_dir or model
        for name, folder in (
            ("tokenizer_dir", tokenizer_dir),
            ("postprocess_tokenizer_dir", postprocess_tokenizer_dir),
        ):
            if folder is not None and folder != model:
                raise InvalidArgumentError("must be the model's folder, or not be given", field=name)
        if address is not None:
            if executor_config is not None:
                raise InvalidArgumentError("a running service has its own settings", field="executor_config")
            return GenerationExecutor([address] if isinstance(address, str) else address)
        parts = {"workers": num_workers, "detokenizers": max(num_postprocess_workers, 1), "routers": 1}
        service = LocalService(model, parts, (executor_config or ExecutorConfig()).environment())
        return GenerationExecutor(service.addresses, service)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Runs a request, to which it gives an id.

        Raises:
            InvalidArgumentError: A value that its field cannot hold. What the service refuses, the result raises.
        """
        message = request.to_proto()
        if self._closed:
            raise InvalidArgumentError("the executor is shut down", field="executor")
        request.id = next(self._ids)
        message.request_id = self._wire_id(request.id)
        result = GenerationResult(request, self._forget)
        with self._lock:
            self._results[request.id] = result
            # Under the lock, for the stream may end before it is noted.
            self._running[request.id] = asyncio.run_coroutine_threadsafe(self._follow(result, message), self._loop)
        return result

    def generate_async(
        self,
        prompt_token_ids: Prompt | None,
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        prompt_tuning_table: Array | None = None,
        prompt_embeddings: Array | None = None,
        speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None,
    ) -> GenerationResult:
        """Runs one prompt, given as tokens or text; see GenerationRequest for the arguments."""
        return self.submit(
            GenerationRequest(
                prompt_token_ids,
                sampling_params or SamplingParams(),
                lora_request=lora_request,
                prompt_adapter_request=prompt_adapter_request,
                streaming=streaming,
                kv_cache_retention_config=kv_cache_retention_config,
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
        """Runs one prompt or several at once, and waits until all have ended.

        Args:
            prompt_token_ids: One prompt, or a sequence of them.
            sampling_params: For all, or one for each.
            options: As in `generate_async`, for all.

        Raises:
            InvalidArgumentError: As many prompts and parameters are not given.
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
        """Ends a request; its result says `abort`. One that has ended is left as it is."""
        if request_id in self._results:
            self._run(self._client.abort(self._wire_id(request_id)))

    def await_responses(self, request_id: int | None = None, timeout: float | None = None) -> list[Response]:
        """What has come and nobody has read yet, of one request or of all; waits until there is something.

        Args:
            request_id: Of a request whose final response has not been taken; None: any.
            timeout: Seconds; nothing came by then: an empty list.

        Raises:
            NotFoundError: No such request.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                news = self._news
                if request_id is not None and request_id not in self._results:
                    raise NotFoundError("no such request, or all of it has been read", field="request_id")
                results = list(self._results.values()) if request_id is None else [self._results[request_id]]
            responses = [response for result in results for response in result.take_responses()]
            left = None if deadline is None else deadline - time.monotonic()
            if responses or (left is not None and left <= 0):
                return responses
            if request_id is None or request_id in self._results:
                wait([news], left, FIRST_COMPLETED)

    def get_latest_stats(self) -> IterationStats:
        """The scheduler's latest iteration; of the first cell, where there are several."""
        return IterationStats(self._run(self._latest_stats()))

    def shutdown(self) -> None:
        """Ends what still runs, and the services that `create` started."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        for running in list(self._running.values()):
            running.cancel()
        wait(list(self._running.values()))
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._service is not None:
            self._service.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _follow(self, result: GenerationResult, message: Any) -> None:
        error: MidstreamError | None = None
        try:
            async for chunk in self._client.stream(message, timeout_s=result.request.timeout_s):
                # Behind the last chunk of a request that failed comes its error.
                chunk.is_final &= chunk.finish_reason not in _FAILURES
                result.put(chunk)
                self._wake()
        except MidstreamError as failure:
            error = failure
        finally:
            result.end(error)
            with self._lock:
                self._running.pop(result.request.id, None)
            self._wake()

    async def _latest_stats(self) -> dict[str, object]:
        latest: dict[str, object] = {}
        async for stats in self._client.iteration_stats():
            latest = latest or stats
        return latest

    def _wake(self) -> None:
        with self._lock:
            news, self._news = self._news, Future()
        news.set_result(None)

    def _forget(self, result: GenerationResult) -> None:
        with self._lock:
            self._results.pop(result.request.id, None)

    def _wire_id(self, request_id: int) -> str:
        return f"{self._prefix}-{request_id}"

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _open(addresses: Sequence[str]) -> AsyncClient:
    # Channels belong to the loop that they are made on.
    return AsyncClient(addresses)
