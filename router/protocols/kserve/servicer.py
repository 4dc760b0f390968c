"""`inference.GRPCInferenceService`: converts requests to native ones, and their output to tensors.

1. `ModelInfer` and `ModelStreamInfer` read the tensors (tensors.py), and convert each row to a native request
   (ensemble.py).
2. The rows run concurrently as native requests. `ModelInfer` responds when all have ended.
3. `ModelStreamInfer` is decoupled: its requests run concurrently, and every chunk is a response; the last response of a
   request has the parameter `triton_final_response`. While a request waits, it gets responses with an empty text from
   time to time. When the client disconnects, all are aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from typing import Any, NamedTuple

from grpc.aio import ServicerContext

from midstream import __version__
from midstream.chunk import Chunk
from midstream.client.result import Result
from midstream.errors import (
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from protos import generation_pb2, kserve_pb2_grpc
from protos import kserve_pb2 as pb
from router.pipeline.concurrent import run_all
from router.pipeline.generation import FrontDoor
from router.pipeline.idempotency import key_of, make_repeatable, request_id_of
from router.pipeline.stream_slots import StreamSlots
from router.protocols.kserve.ensemble import (
    INPUTS,
    OUTPUTS,
    check_outputs,
    naming_tensors,
    native_request,
    num_rows,
    piece_outputs,
    whole_outputs,
)
from router.protocols.kserve.parameters import Parameters, read_parameters
from router.protocols.kserve.tensors import (
    FINAL,
    InputTensor,
    StreamResponses,
    fill_outputs,
    note_kind_change,
    note_validation,
    parse_inputs,
)
from router.protocols.openai.structural_tags import replace_structural_tag

logger = logging.getLogger(__name__)

# Passes on a response of a stream.
Put = Callable[[pb.ModelStreamInferResponse], Coroutine[object, object, None]]

_ALIAS = "ensemble"
_VERSION = "1"
# Triton's extensions of the protocol; the last two are those of HTTP.
_EXTENSIONS = ["model_configuration", "statistics", "binary_tensor_data", "generate"]
_TYPES = {"BYTES": pb.TYPE_STRING}
# Maximum number of responses queued for a slow reader of a stream, in addition to each request's own pending output.
_MAX_WAITING = 64
# Time in which a router that drains still reads the request of a call that has just arrived, and its end.
_LAST_REQUEST_S = 1.0


class _Key(NamedTuple):
    """A call's idempotency key, and the id that one of its requests gets from it."""

    text: str
    request_id: str


class KserveServicer(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Implements protos/kserve.proto. The model is served under its names and, if it is the router's first, as
    `ensemble`.

    Attributes:
        peers: The servicers of all models of the router, by name.
    """

    def __init__(self, front: FrontDoor, tokens: Mapping[str, int]) -> None:
        """`tokens` are the markers of the model's format that are a single token, with the token's id."""
        self.keep_alives = front.keep_alives
        self._front, self._tokens = front, tokens
        self._model = front.runner.model
        self._prompts = front.runner.prompts
        self._slots = StreamSlots()
        self.peers: Mapping[str, KserveServicer] = {self._model.name: self}
        self._num_success = self._num_failures = self._success_ns = self._failure_ns = self._last_ms = 0

    async def ServerLive(self, request: pb.ServerLiveRequest, context: object) -> pb.ServerLiveResponse:
        """Report that the process is live."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: object) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._front.leaving.is_set())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: object) -> pb.ModelReadyResponse:
        known = request.name in (_ALIAS, *self._model.names) and request.version in ("", _VERSION)
        return pb.ModelReadyResponse(ready=known and not self._front.leaving.is_set())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: object) -> pb.ServerMetadataResponse:
        """Return the server's name, version and extensions."""
        return pb.ServerMetadataResponse(name="midstream", version=__version__, extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: object) -> pb.ModelMetadataResponse:
        """Return the model's input and output tensors."""
        self.check_model(request.name, request.version)
        response = pb.ModelMetadataResponse(name=request.name, versions=[_VERSION], platform="midstream")
        for name, field in INPUTS.items():
            response.inputs.add(name=name, datatype=field.datatype, shape=(-1, *field.dims))
        for name, (datatype, dims) in OUTPUTS.items():
            response.outputs.add(name=name, datatype=datatype, shape=dims)
        return response

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: object) -> pb.ModelConfigResponse:
        """Return the model's tensors as a Triton configuration."""
        self.check_model(request.name, request.version)
        config = pb.ModelConfig(name=request.name, platform="midstream", backend="midstream")
        config.model_transaction_policy.decoupled = True
        for name, field in INPUTS.items():
            config.input.add(
                name=name, data_type=_data_type(field.datatype), dims=field.dims, optional=field.is_optional
            )
        for name, (datatype, dims) in OUTPUTS.items():
            config.output.add(name=name, data_type=_data_type(datatype), dims=dims)
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: object) -> pb.ModelStatisticsResponse:
        """Return counts of this router's KServe requests."""
        if not request.name:
            return pb.ModelStatisticsResponse(model_stats=[peer.statistics() for peer in self.peers.values()])
        self.check_model(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[self.statistics()])

    def statistics(self) -> pb.ModelStatistics:
        """Return counts of this router's KServe requests to the model."""
        done = self._num_success + self._num_failures
        statistics = pb.ModelStatistics(
            name=self._model.name, version=_VERSION, last_inference=self._last_ms, inference_count=done
        )
        statistics.execution_count = done
        statistics.inference_stats.success.count, statistics.inference_stats.success.ns = (
            self._num_success,
            self._success_ns,
        )
        statistics.inference_stats.fail.count, statistics.inference_stats.fail.ns = (
            self._num_failures,
            self._failure_ns,
        )
        return statistics

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: ServicerContext[Any, Any]
    ) -> pb.ModelInferResponse:
        """Run all rows of the batch, and return all their sequences."""
        key = key_of(context.invocation_metadata() or ())
        return await self.infer(request, key, context.time_remaining(), "ModelInfer")

    async def infer(
        self, request: pb.ModelInferRequest, key_text: str, timeout_s: float | None, call: str
    ) -> pb.ModelInferResponse:
        """Run all rows of a request, and return all their sequences.

        Args:
            key_text: Idempotency key of the call; empty if there is none.
            timeout_s: Time limit of the call; None if there is none.
            call: Name of the method, so that methods do not share keys.

        Raises:
            MidstreamError: The request is invalid, or has failed.
        """
        started = time.monotonic_ns()
        try:
            with self._front.counting_failures("text_completion"):
                parameters = self._check(request)
                inputs, wanted = self._read(request)
            if "stream" in inputs and any(inputs["stream"].values):
                reason = "streaming is only supported by ModelStreamInfer and generate_stream"
                raise InvalidArgumentError(reason, field="stream")
            rows = num_rows(inputs)
            key = _Key(key_text, request_id_of(key_text, call)) if key_text else None
            left_s = parameters.limit(timeout_s)
            results = await run_all(
                self._collect(request, parameters, inputs, index, rows, left_s, key) for index in range(rows)
            )
        except Exception:
            self._count(started, failed=True)
            raise
        self._count(started, failed=False)
        response = self._response(request)
        fill_outputs(response, [t for t in whole_outputs(results) if t.name in wanted])
        changes = [sequence.kind_changed_at for result in results for sequence in result.sequences]
        note_kind_change(response, changes)
        note_validation(response, [sequence.validation for result in results for sequence in result.sequences])
        return response

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Run requests as they arrive; a failed request gets its own error response and does not affect the others.

        If the call is repeated with its idempotency key, each request attaches to the one with the same id before or,
        if several have this id, with the same number among them.

        When the router drains, the call ends with UNAVAILABLE once the requests that have been read are answered.
        """
        key, num_by_id = key_of(context.invocation_metadata() or ()), Counter[str]()
        stream = self._slots.stream(request_iterator)
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(_MAX_WAITING)
        failure: MidstreamError | None = None

        async def read() -> None:
            nonlocal failure
            try:
                async with asyncio.TaskGroup() as group:
                    try:
                        async for request, ended in stream.requests():
                            name = f"{num_by_id[request.id]}-{request.id}"
                            num_by_id[request.id] += 1
                            keyed = _Key(key, request_id_of(key, f"ModelStreamInfer\0{name}")) if key else None
                            owner = self._owner(request.model_name)
                            answer = owner._stream(request, responses, context.time_remaining(), keyed)
                            task = group.create_task(answer)
                            task.add_done_callback(ended)
                    except (OverloadedError, UnavailableError) as error:
                        failure = error  # raised once the requests that run have ended
            except* Exception:  # raised by gRPC: errors of requests are sent in the stream
                logger.debug("a request stream failed", exc_info=True)
                failure = InvalidArgumentError("the message is not a ModelInferRequest")
            await responses.put(None)

        async def end_when_draining() -> None:
            await self._front.draining.wait()
            await asyncio.sleep(_LAST_REQUEST_S)
            stream.refuse(UnavailableError, "this router is draining; make the call again")

        reading, ending = asyncio.create_task(read()), asyncio.create_task(end_when_draining())
        try:
            while (response := await responses.get()) is not None:
                yield response
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback holds this frame, so the call would stay in memory until a full collection
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)

    async def _stream(
        self,
        request: pb.ModelInferRequest,
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None],
        timeout_s: float | None,
        key: _Key | None,
    ) -> None:
        """Run one request of a stream; its failure is a response, and does not affect the stream's other requests."""
        try:
            await self._run(request, responses.put, timeout_s, key)
        except Exception as error:
            shown = error
            if not isinstance(error, MidstreamError):
                logger.exception("unexpected error in a stream")
                shown = ExecutionError("internal error; the log has its details")
            response = self._response(request)
            response.parameters[FINAL].bool_param = True
            await responses.put(pb.ModelStreamInferResponse(error_message=str(shown), infer_response=response))

    async def stream(
        self, request: pb.ModelInferRequest, put: Put, timeout_s: float | None, key_text: str, call: str
    ) -> None:
        """Run one request, and pass its responses to `put`; otherwise like `infer`."""
        await self._run(request, put, timeout_s, _Key(key_text, request_id_of(key_text, call)) if key_text else None)

    async def _run(self, request: pb.ModelInferRequest, put: Put, timeout_s: float | None, key: _Key | None) -> None:
        started = time.monotonic_ns()
        try:
            with self._front.counting_failures("text_completion"):
                parameters = self._check(request)
                inputs, wanted = self._read(request)
            rows, limit_s = num_rows(inputs), parameters.limit(timeout_s)
            await run_all(
                self._stream_row(request, parameters, inputs, index, rows, wanted, put, limit_s, key)
                for index in range(rows)
            )
        except Exception:
            self._count(started, failed=True)
            raise
        self._count(started, failed=False)
        if rows > 1 or parameters.wants_empty_final:
            response = self._response(request)
            response.parameters[FINAL].bool_param = True
            await put(pb.ModelStreamInferResponse(infer_response=response))

    async def _stream_row(
        self,
        request: pb.ModelInferRequest,
        parameters: Parameters,
        inputs: Mapping[str, InputTensor],
        index: int,
        rows: int,
        wanted: frozenset[str],
        put: Put,
        timeout_s: float | None,
        key: _Key | None,
    ) -> None:
        named = {item.name for item in request.outputs}
        last_is_marked = rows == 1 and not parameters.wants_empty_final
        pieces = StreamResponses(self._response(request))

        def beat() -> Coroutine[object, object, None]:
            tensors = [tensor for tensor in piece_outputs(Chunk(0, 0), index) if tensor.name in wanted]
            return put(pieces.make(tensors, is_final=False))

        with naming_tensors(inputs.keys() | named), self._front.keep_alives.keep(beat) as stream:
            native = await self._native(inputs, index, rows, named, parameters, key)
            async with await self._front.start(native, timeout_s, key.text if key else "") as output:
                while not output.is_final:
                    for chunk in await output.take():
                        has_failed = chunk.finish_reason is not None and chunk.finish_reason.is_failure
                        if has_failed and not chunk.text:
                            continue
                        tensors = [tensor for tensor in piece_outputs(chunk, index) if tensor.name in wanted]
                        is_final = last_is_marked and chunk.is_final and not has_failed
                        response = pieces.make(tensors, is_final=is_final)
                        note_kind_change(response.infer_response, [chunk.kind_changed_at])
                        note_validation(response.infer_response, [chunk.validation])
                        await stream.write(put, response)
            output.raise_unfinished()

    async def _collect(
        self,
        request: pb.ModelInferRequest,
        parameters: Parameters,
        inputs: Mapping[str, InputTensor],
        index: int,
        rows: int,
        timeout_s: float | None,
        key: _Key | None,
    ) -> Result:
        named = {item.name for item in request.outputs}
        with naming_tensors(inputs.keys() | named):
            native = await self._native(inputs, index, rows, named, parameters, key)
            result = Result(native.request_id)
            async with await self._front.start(native, timeout_s, key.text if key else "") as output:
                while not output.is_final:
                    for chunk in await output.take():
                        result.add(chunk)
            output.raise_unfinished()
        return result

    async def _native(
        self,
        inputs: Mapping[str, InputTensor],
        index: int,
        rows: int,
        outputs: Collection[str],
        parameters: Parameters,
        key: _Key | None,
    ) -> generation_pb2.GenerateRequest:
        native = await native_request(inputs, index, rows, self._prompts, outputs)
        replace_structural_tag(native, self._tokens, "guided_decoding_guide")
        native.priority = parameters.priority
        _name(native, key, index, rows)
        return native

    def _check(self, request: pb.ModelInferRequest) -> Parameters:
        self.check_model(request.model_name, request.model_version)
        return read_parameters(request)

    def _read(self, request: pb.ModelInferRequest) -> tuple[dict[str, InputTensor], frozenset[str]]:
        wanted = check_outputs([item.name for item in request.outputs])
        return parse_inputs(request), wanted

    def check_model(self, name: str, version: str) -> None:
        """Raise NotFoundError unless a model of this name and version is served."""
        if name not in (_ALIAS, *self._model.names) or version not in ("", _VERSION):
            wanted = f"{name} version {version}" if version else name
            names = ", ".join(repr(name) for peer in self.peers.values() for name in peer._model.names)
            known = f"the models are {names}" if ", " in names else f"the model is {names}"
            raise NotFoundError(f"{wanted!r} is not served here; {known}", field="model_name")

    def _owner(self, name: str) -> KserveServicer:
        """Return the servicer of a model; this one for other names, which it refuses."""
        return next((peer for peer in self.peers.values() if name in peer._model.names), self)

    def _response(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        return pb.ModelInferResponse(model_name=request.model_name, model_version=_VERSION, id=request.id)

    def _count(self, started_ns: int, *, failed: bool) -> None:
        took, self._last_ms = time.monotonic_ns() - started_ns, time.time_ns() // 1_000_000
        if failed:
            self._num_failures, self._failure_ns = self._num_failures + 1, self._failure_ns + took
        else:
            self._num_success, self._success_ns = self._num_success + 1, self._success_ns + took


def _name(native: generation_pb2.GenerateRequest, key: _Key | None, index: int, rows: int) -> None:
    """Set the id of a row's request, which is unique unless there is a key. Clients number their requests from 1, so
    the ids of different clients would collide.
    """
    if key is not None:
        make_repeatable(native, f"kserve-{key.request_id}-{index}")
    else:
        native.request_id = f"kserve-{uuid.uuid4().hex}-{index}" if rows > 1 else f"kserve-{uuid.uuid4().hex}"


def _data_type(datatype: str) -> pb.DataType.ValueType:
    return _TYPES.get(datatype) or pb.DataType.Value(f"TYPE_{datatype}")
