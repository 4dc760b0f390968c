"""TensorRT-LLM's `Executor`: requests are enqueued, and their responses awaited.

1. `enqueue_request` assigns an id and passes the request to the session's thread.
2. In that thread, chunks become results, which wait as responses until `await_responses` takes them.
3. The executor forgets a request whose last response has been taken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, overload

from midstream.chunk import Chunk, FinishReason
from midstream.errors import ConfigError, InvalidArgumentError, MidstreamError, UnavailableError, UnsupportedError
from midstream.executor.config import ExecutorConfig
from midstream.executor.engine_folder import write_engine
from midstream.executor.enums import ModelType
from midstream.executor.generation_executor import check_stop_tokens, fill_defaults
from midstream.executor.kv_cache import KVCacheEventManager
from midstream.executor.lora_weights import LoraFolders
from midstream.executor.post_processor_server import Call
from midstream.executor.request import Request
from midstream.executor.response import Response, Result
from midstream.executor.response_stream import ResponseStream
from midstream.executor.service import LocalService
from midstream.executor.session import Owner, Session
from midstream.executor.stats import DebugTensorsPerIteration, IterationStats, RequestStatsPerIteration
from midstream.executor.tensors import AnyTensor, length_of
from midstream.model.folder import EMBEDDED_MODEL
from protos import generation_pb2 as pb

Timeout = timedelta | float
# The stream of statistics may have been lost.
_STATS_TIMEOUT_S = 1.0


class _Running:
    """A request and its responses that nobody has taken."""

    def __init__(self, request_id: int, request: Request, on_news: Callable[[], None]) -> None:
        self.request = request
        self.ready: deque[Response] = deque()
        self._id, self._on_news = request_id, on_news
        self._stream = ResponseStream(request, request_id=request_id)
        self._has_final = False

    def put(self, chunk: Chunk) -> None:
        """Add a chunk."""
        # A failure is reported by the error that follows.
        if chunk.finish_reason is not FinishReason.ERROR and not self._has_final:
            try:
                for result in self._stream.add(chunk):
                    self._add(result)
            except MidstreamError as error:
                self.end(error)
        self._on_news()

    def end(self, error: MidstreamError | None) -> None:
        """Note the end of the output."""
        if not self._has_final:
            message = "the output ended early" if error is None else str(error)
            self.ready.append(Response(self._id, message, self.request.client_id))
            self._has_final = True
        self._on_news()

    def _add(self, result: Result) -> None:
        self._has_final |= result.is_final
        self.ready.append(Response(self._id, result, self.request.client_id))


class Executor:
    """Runs requests on services that it starts, or that run already. Use it as a context manager, or call
    `shutdown`.
    """

    @overload
    def __init__(
        self,
        model_path: str | PathLike[str],
        model_type: ModelType = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        engine_buffer: bytes | bytearray | memoryview,
        json_config_str: str,
        model_type: ModelType = ModelType.DECODER_ONLY,
        executor_config: ExecutorConfig | None = None,
        managed_weights: Mapping[str, AnyTensor] | None = None,
    ) -> None: ...

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Start the services on this machine.

        Args:
            arguments, named: The model, its type and the settings of the services. The model is a folder, a GGUF
                file or `smollm2`; or the contents of a GGUF file, or of a model.safetensors and its config.json.

        Raises:
            ConfigError: The model does not exist.
            InvalidArgumentError: A setting is invalid.
            UnsupportedError: The model is not decoder-only, or a setting is not implemented.
            ExecutionError: The services did not start.
        """
        model, model_type, config, folder = _model_of(arguments, named)
        try:
            if model_type is not ModelType.DECODER_ONLY:
                raise UnsupportedError("must be DECODER_ONLY", field="model_type")
            service = LocalService(model, config)
        finally:
            if folder is not None:
                self._folder = folder  # until the executor is gone
        self._open(Session(service.addresses, service), service, config)

    @classmethod
    def connect(cls, address: str | Sequence[str]) -> Self:
        """Return an executor for the running service with these routers; it cannot be configured."""
        executor = cls.__new__(cls)
        executor._open(Session([address] if isinstance(address, str) else address), None, ExecutorConfig())
        return executor

    def _open(self, session: Session, service: LocalService | None, config: ExecutorConfig) -> None:
        self._session, self._service, self._config = session, service, config
        self._loras = LoraFolders(session, None if service is None else service.model_config)
        self._condition = threading.Condition()
        self._requests: dict[int, _Running] = {}
        self._last_id = 0
        self._kv_events: KVCacheEventManager | None = None
        self._iterations: deque[IterationStats] = deque(maxlen=config.iter_stats_max_iterations)
        self._last_iteration, self._iterated = 0, threading.Condition()
        self._request_stats: deque[RequestStatsPerIteration] = deque(maxlen=config.request_stats_max_iterations)
        if service is not None:
            service.find_function = self._function_of
        try:
            check_stop_tokens(config, session)
            if self._follows_iterations:
                has_requests = bool(config.request_stats_max_iterations)
                session.follow_iterations(self._add_iteration, self._request_stats.append if has_requests else None)
            self._follow_kv_events()
        except BaseException:
            self.shutdown()
            raise

    @property
    def _follows_iterations(self) -> bool:
        return bool(self._config.iter_stats_max_iterations or self._config.request_stats_max_iterations)

    def _add_iteration(self, stats: IterationStats) -> None:
        with self._iterated:
            self._iterations.append(stats)
            self._last_iteration = stats.iter
            self._iterated.notify_all()

    def _wait_for_iterations(self) -> None:
        """Wait for the statistics of the iterations that have ended, which come beside the responses."""
        if not self._follows_iterations:
            return
        with contextlib.suppress(UnavailableError):
            newest = self._session.newest_iteration()
            with self._iterated:
                self._iterated.wait_for(lambda: self._last_iteration >= newest, _STATS_TIMEOUT_S)

    def _follow_kv_events(self) -> None:
        config = self._config.kv_cache_config
        if config.event_buffer_max_size > 0:
            window = max(config.windows or [self._session.model.max_sequence_length])
            blocks = self._session.num_blocks(config.host_cache_size or 0)
            self._kv_events = KVCacheEventManager(config.event_buffer_max_size, blocks, window, self._loras.task_id)
            self._session.follow_kv_events(self._kv_events.add)

    def enqueue_request(self, request: Request) -> int:
        """Run a request whose output is read by `await_responses`; return its id.

        Raises:
            InvalidArgumentError: A value is invalid for its field. If the service rejects the request, its response has
                an error.
        """
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Iterable[Request]) -> list[int]:
        """Run several requests; return their ids. If one is invalid, none of them runs.

        Raises:
            InvalidArgumentError: As in `enqueue_request`.
        """
        self._session.check_open()
        prepared = [(request, self._to_proto(request)) for request in requests]
        return [self._enqueue(request, message) for request, message in prepared]

    def _enqueue(self, request: Request, message: pb.GenerateRequest) -> int:
        request_id = self._last_id = self._session.new_id()
        running = self._requests[request_id] = _Running(request_id, request, self._wake)
        num_bias = None if request.embedding_bias is None else length_of(request.embedding_bias)
        if num_bias is not None and num_bias != self._session.model.vocab_size:
            vocab_size = self._session.model.vocab_size
            shape = f"embedding bias shape is not as expected: [{num_bias}]; must be [{vocab_size}]"
            running.end(InvalidArgumentError(shape, field="embedding_bias"))
        else:
            self._session.run(request_id, message, Owner(running.put, running.end))
        return request_id

    def _to_proto(self, request: Request) -> pb.GenerateRequest:
        if request.logits_post_processor is not None and self._service is None:
            raise UnsupportedError(
                "functions run only with services that this executor has started; name a post-processor of the workers",
                field="logits_post_processor",
            )
        message = request.to_proto()
        if request.lora_config is not None:
            message.lora.CopyFrom(self._loras.to_proto(request.lora_config))
        fill_defaults(message, self._config)
        return message

    @overload
    def await_responses(self, timeout: Timeout | None = None) -> list[Response]: ...

    @overload
    def await_responses(self, id: int, timeout: Timeout | None = None) -> list[Response]: ...

    @overload
    def await_responses(self, ids: Sequence[int], timeout: Timeout | None = None) -> list[list[Response]]: ...

    def await_responses(self, *arguments: Any, **named: Any) -> Any:
        """Return the unread responses of all requests, of the request `id`, or of each request of `ids`; wait until
        there is one, or for `timeout`, a duration or a number of seconds.

        A request that has been read completely gives a response with an error.

        Raises:
            InvalidArgumentError: The executor is shut down, or there is no such request.
        """
        which, timeout = _which(arguments, named)
        self._session.check_open()
        if isinstance(which, int):
            return self._await(which, timeout)
        if which is None:
            return self._await(None, timeout)
        return [self._await(int(request_id), timeout) for request_id in which]

    def get_num_responses_ready(self, id: int | None = None) -> int:  # noqa: A002 (TensorRT-LLM's name)
        """Return the number of unread responses of a request, or of all requests."""
        self._session.check_open()
        with self._condition:
            if id is None:
                return sum(len(running.ready) for running in self._requests.values())
            return len(self._requests[id].ready) if id in self._requests else 0

    def cancel_request(self, id: int) -> None:  # noqa: A002 (TensorRT-LLM's name)
        """End a request with the finish reason CANCELLED in its last response; no effect if it has already ended."""
        self._session.abort(id)

    def can_enqueue_requests(self) -> bool:
        """Return whether requests are accepted."""
        return not self._session.is_closed

    def is_participant(self) -> bool:
        """Return whether this process takes part; it always does."""
        return True

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the statistics of at most `iter_stats_max_iterations` iterations since the last call, oldest first.

        The list is empty only if there were no iterations. If there are several cells, their iterations are separate
        entries that name the worker group.
        """
        self._session.check_open()
        if not self._iterations:
            self._wait_for_iterations()
        return [self._iterations.popleft() for _ in range(len(self._iterations))]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return the statistics of the unfinished requests in at most `request_stats_max_iterations` iterations
        since the last call, oldest first; each is read shortly after its iteration.
        """
        self._session.check_open()
        if not self._request_stats:
            self._wait_for_iterations()
        return [self._request_stats.popleft() for _ in range(len(self._request_stats))]

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """Return an empty list, since nothing is kept for debugging."""
        self._session.check_open()
        return []

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """Return the events of the KV caches; None if `event_buffer_max_size` of the KvCacheConfig is 0."""
        self._session.check_open()
        return self._kv_events

    def shutdown(self) -> None:
        """Abort running requests, wake threads in `await_responses`, and stop the services that this executor started.
        No effect in a forked process.
        """
        self._session.close()
        self._wake()
        if self._kv_events is not None:
            self._kv_events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _await(self, request_id: int | None, timeout: float | None) -> list[Response]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                found = self._take(request_id)
                left = None if deadline is None else deadline - time.monotonic()
                if found or self._session.is_closed or (left is not None and left <= 0):
                    return found
                self._condition.wait(left)

    def _take(self, request_id: int | None) -> list[Response]:
        if request_id is None:
            return [response for number in list(self._requests) for response in self._take(number)]
        running = self._requests.get(request_id)
        if running is None:
            if not 0 < request_id <= self._last_id:
                raise InvalidArgumentError(f"there is no request {request_id}", field="id")
            return [Response(request_id, f"ReqId {request_id} has already been processed and was terminated.")]
        found = [running.ready.popleft() for _ in range(len(running.ready))]
        if found and (found[-1].has_error() or found[-1].result.is_final):
            del self._requests[request_id]
        return found

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _function_of(self, wire_id: str) -> Call:
        request_id = self._session.request_id(wire_id)
        request = self._requests[request_id].request
        return Call(request_id, request.client_id, request.is_beam_search, request.logits_post_processor)


def _model_of(
    arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[str, ModelType, ExecutorConfig, TemporaryDirectory[str] | None]:
    """Return the model's path, its type, the settings, and a folder for a model that was given by its contents."""
    first = arguments[0] if arguments else named.get("engine_buffer")
    is_buffer = isinstance(first, bytes | bytearray | memoryview)
    names = (
        ("engine_buffer", "json_config_str", "model_type", "executor_config", "managed_weights")
        if is_buffer
        else ("model_path", "model_type", "executor_config")
    )
    if not is_buffer and len(arguments) > 1 and not isinstance(arguments[1], ModelType):
        raise UnsupportedError("encoder-decoder models are not supported; give one model", field="encoder_model_path")
    values = dict(zip(names, arguments, strict=False)) | named
    unknown = values.keys() - set(names)
    if unknown or len(arguments) > len(names):
        raise TypeError(f"Executor takes {', '.join(names)}; not {', '.join(sorted(unknown)) or 'more arguments'}")
    config = values.get("executor_config") or ExecutorConfig()
    model_type = ModelType(values.get("model_type") or ModelType.DECODER_ONLY)
    if is_buffer:
        if values.get("managed_weights"):
            raise UnsupportedError("put all weights in engine_buffer", field="managed_weights")
        folder = TemporaryDirectory(prefix="midstream-engine-")
        engine, text = values["engine_buffer"], values.get("json_config_str") or ""
        return write_engine(engine, text, Path(folder.name) / "engine"), model_type, config, folder
    path = str(values["model_path"])
    if path != EMBEDDED_MODEL and "/" not in path and not Path(path).expanduser().exists():
        raise ConfigError(f"File does not exist: {path}", field="model_path")
    return path, model_type, config, None


def _which(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[int | Iterable[int] | None, float | None]:
    """Return the id or ids and the timeout in seconds that were given in any of TensorRT-LLM's forms."""
    values = dict(named)
    for item in arguments:
        is_timeout = item is None or isinstance(item, timedelta | float)
        values["timeout" if is_timeout and "timeout" not in values else "id"] = item
    unknown = values.keys() - {"id", "ids", "timeout"}
    if unknown:
        raise TypeError(f"await_responses takes id or ids, and timeout; not {', '.join(sorted(unknown))}")
    timeout = values.get("timeout")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return values.get("id", values.get("ids")), seconds
