"""The public gRPC service, which converts messages and status codes; requests are processed in generation.py."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc.aio import ServicerContext

from midstream import __version__
from midstream.chunk import Chunk
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.rpc.errors import error_from_rpc
from protos import generation_pb2 as pb
from protos import loads_pb2, receipts_pb2, service_pb2, service_pb2_grpc, stats_pb2, status_pb2, weights_pb2
from router.authentication import current_caller
from router.permissions import Role
from router.pipeline.cells import Cell
from router.pipeline.embedder import Embedder, EmbedInput, Pooling, VectorShape
from router.pipeline.generation import FrontDoor, Output
from router.pipeline.idempotency import check_no_id, key_of, make_repeatable, request_id_of
from router.pipeline.keep_alives import KeepAlives
from router.pipeline.request_checks import check_adapter_path, check_model
from router.protocols.openai.structural_tags import replace_structural_tag
from router.status import StatusFeed

_T = TypeVar("_T")
_CALL_TIMEOUT_S = 10.0
# Maximum number of tensor bytes in one response; by default, gRPC clients accept messages of up to 4 MiB.
_MAX_TENSOR_BYTES = 2 << 20
_POOLING = {
    service_pb2.POOLING_UNSPECIFIED: None,
    service_pb2.POOLING_LAST: Pooling.LAST,
    service_pb2.POOLING_MEAN: Pooling.MEAN,
    service_pb2.POOLING_CLS: Pooling.CLS,
    service_pb2.POOLING_MAX: Pooling.MAX,
    service_pb2.POOLING_MEAN_SQRT_LEN_TOKENS: Pooling.MEAN_SQRT_LENGTH,
    service_pb2.POOLING_WEIGHTEDMEAN: Pooling.WEIGHTED_MEAN,
}


class RouterServicer(service_pb2_grpc.MidstreamServicer):
    """Implements protos/service.proto."""

    def __init__(self, front: FrontDoor, status: StatusFeed, router_id: str, tokens: Mapping[str, int]) -> None:
        """`tokens` are the markers of the model's format that are a single token, with the token's id."""
        self._front, self._tokens = front, tokens
        self._embedder = Embedder(front)
        self._model = front.runner.model
        self._cells, self._everywhere = front.runner.cells, front.runner.everywhere
        self._status = status
        self._router_id = router_id

    async def Generate(  # type: ignore[override]  # it writes to the context
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> None:
        """Run a request and stream its output."""
        for field, is_set in (
            ("attachment", request.attachment),
            ("receipt_nonce", request.receipt_nonce),
            ("template_fingerprint", request.template_fingerprint),
        ):
            if is_set:
                raise InvalidArgumentError("must not be set by clients", field=field)
        if request.HasField("guided_decoding"):
            replace_structural_tag(request, self._tokens, "guided_decoding.guide")
        key = key_of(context.invocation_metadata() or ())
        if key:
            make_repeatable(request, request_id_of(key, "Generate"))
        opening = self._front.start(request, context.time_remaining(), key)
        await _relay(opening, context, self._front.keep_alives, request.request_id)

    async def Resume(  # type: ignore[override]  # it writes to the context
        self, request: service_pb2.ResumeRequest, context: ServicerContext[Any, Any]
    ) -> None:
        """Stream the rest of a request."""
        offsets = request.from_token_by_sequence[:]

        async def resume() -> Output:
            return self._front.resume(request.request_id, request.from_token, offsets, context.time_remaining())

        from_token = offsets[0] if offsets else request.from_token
        await _relay(resume(), context, self._front.keep_alives, request.request_id, from_token)

    async def Abort(self, request: loads_pb2.AbortRequest, context: object) -> loads_pb2.AbortResponse:
        return loads_pb2.AbortResponse(was_running=await self._front.abort(request.request_id))

    async def GetReceipt(
        self, request: receipts_pb2.GetReceiptRequest, context: object
    ) -> receipts_pb2.GetReceiptResponse:
        """Return the receipt of a request of the caller."""
        if not request.request_id:
            raise InvalidArgumentError("must be set", field="request_id")
        return await self._front.runner.receipts.get(
            current_caller.get().scope(request.request_id),
            request.num_tokens,
            include_request=request.include_request,
            include_outputs=request.include_outputs,
        )

    async def ListReceiptKeys(
        self, request: receipts_pb2.ListReceiptKeysRequest, context: object
    ) -> receipts_pb2.ListReceiptKeysResponse:
        return receipts_pb2.ListReceiptKeysResponse(keys=await self._front.runner.receipts.keys())

    async def Embed(
        self, request: service_pb2.EmbedRequest, context: ServicerContext[Any, Any]
    ) -> service_pb2.EmbedResponse:
        """Return the embeddings of all inputs."""
        key = key_of(context.invocation_metadata() or ())
        if key:
            check_no_id(request.request_id)
        request_id = request_id_of(key, "Embed") if key else request.request_id or uuid.uuid4().hex
        base = pb.GenerateRequest(
            request_id=request_id,
            model=request.model,
            client_id=request.client_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora=request.lora if request.HasField("lora") else None,
        )
        if not request.inputs:
            raise InvalidArgumentError("must not be empty", field="inputs")
        inputs = [_embed_input(index, item) for index, item in enumerate(request.inputs)]
        shape = VectorShape(
            request.dimensions if request.HasField("dimensions") else None,
            not request.HasField("normalize") or request.normalize,
        )
        if request.pooling not in _POOLING:
            raise InvalidArgumentError(f"has the unknown value {request.pooling}", field="pooling")
        truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        if truncate is not None and truncate < 1 and truncate != -1:
            raise InvalidArgumentError(
                "must be at least 1, or -1 for the model's limit", field="truncate_prompt_tokens"
            )
        vectors, usage = await self._embedder.embed(
            base,
            inputs,
            shape,
            pooling=_POOLING[request.pooling],
            timeout_s=context.time_remaining(),
            key=key,
            truncate=truncate,
        )
        response = service_pb2.EmbedResponse(
            request_id=request_id, usage=pb.Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        )
        for vector in vectors:
            response.embeddings.add(values=vector)
        return response

    async def GetModelInfo(self, request: loads_pb2.GetModelInfoRequest, context: object) -> loads_pb2.ModelInfo:
        """Return model information from the model folder, and the workers' `features`."""
        check_model(request.model, self._model)
        return self._model.to_proto(self._cells.any().features or ())

    async def GetServerInfo(self, request: loads_pb2.GetServerInfoRequest, context: object) -> loads_pb2.ServerInfo:
        """Return the first cell's information, with the worker groups and detokenizers of all cells that respond."""
        answers = await self._ask(lambda cell: cell.watch_stub.GetServerInfo(request, timeout=_CALL_TIMEOUT_S))
        first, *others = answers.values()
        for other in others:
            first.worker_groups.extend(other.worker_groups)
            first.detokenizers.extend(other.detokenizers)
        first.router_id = self._router_id
        first.version = first.version or __version__
        return first

    async def GetLoads(self, request: loads_pb2.GetLoadsRequest, context: object) -> loads_pb2.GetLoadsResponse:
        """Return the load of every cell that responds; the others get no requests either."""
        response = loads_pb2.GetLoadsResponse()
        answers = await self._ask(lambda cell: cell.watch_stub.GetLoads(request, timeout=_CALL_TIMEOUT_S))
        for cell, answer in answers.items():
            for load in answer.cells:
                load.cell = load.cell or cell.name
                response.cells.append(load)
        return response

    async def _ask(self, call: Callable[[Cell], Awaitable[_T]]) -> dict[Cell, _T]:
        """Return the answers of the cells that respond; there is at least one. Raises MidstreamError if none does."""
        self._everywhere.any()
        cells = list(self._everywhere.cells.values())
        answers = await asyncio.gather(*map(call, cells), return_exceptions=True)
        found: dict[Cell, _T] = {}
        for cell, answer in zip(cells, answers, strict=True):
            if not isinstance(answer, BaseException):
                found[cell] = answer
            elif not isinstance(answer, grpc.aio.AioRpcError):
                raise answer
        if not found:
            raise next(error_from_rpc(answer) for answer in answers if isinstance(answer, grpc.aio.AioRpcError))
        return found

    async def GetIterationStats(
        self, request: stats_pb2.GetIterationStatsRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[stats_pb2.IterationStats]:
        """Stream the statistics of all cells."""
        calls = [cell.watch_stub.GetIterationStats(request) for cell in self._everywhere.cells.values()]
        if request.stream:
            # From here on, the caller receives every iteration.
            await asyncio.gather(*(call.initial_metadata() for call in calls))
            await context.send_initial_metadata(())
        reads = {asyncio.ensure_future(call.read()): call for call in calls}
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for read in done:
                    call, item = reads.pop(read), read.result()
                    if isinstance(item, stats_pb2.IterationStats):
                        reads[asyncio.ensure_future(call.read())] = call
                        yield item
        finally:
            for call in calls:
                call.cancel()

    async def GetRequestStats(
        self, request: stats_pb2.GetRequestStatsRequest, context: object
    ) -> stats_pb2.GetRequestStatsResponse:
        scope = current_caller.get().scope
        names = {scope(request_id): request_id for request_id in request.request_ids}
        scoped = stats_pb2.GetRequestStatsRequest(request_ids=names)
        cells = self._everywhere.cells.values()
        calls = [cell.watch_stub.GetRequestStats(scoped, timeout=_CALL_TIMEOUT_S) for cell in cells]
        response = stats_pb2.GetRequestStatsResponse()
        for answer in await asyncio.gather(*calls):
            for stats in answer.requests:
                stats.id = names[stats.id]
                response.requests.append(stats)
        return response

    async def SubscribeKvEvents(
        self, request: stats_pb2.SubscribeKvEventsRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[stats_pb2.KvEventBatch]:
        """Stream the KV-cache events of the only cell."""
        if len(self._cells.cells) > 1:
            raise UnsupportedError("each cell numbers its own KV events; subscribe at the schedulers")
        call = self._cells.any().watch_stub.SubscribeKvEvents(request)
        # From here on, the caller receives every event.
        await call.initial_metadata()
        await context.send_initial_metadata(())
        async for batch in call:
            yield batch

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: object
    ) -> AsyncIterator[status_pb2.SystemStatus]:
        """Stream the status of every process, once or continuously."""
        async with contextlib.aclosing(self._status.watch()) as states:
            async for state in states:
                yield state
                if not request.stream:
                    return

    async def LoadLora(self, request: loads_pb2.LoadLoraRequest, context: object) -> loads_pb2.LoadLoraResponse:
        """Load an adapter in every cell."""
        check_adapter_path(request.path, self._front.runner.adapter_root, "path")
        self._cells.any()
        first, *_ = await asyncio.gather(*(cell.watch_stub.LoadLora(request) for cell in self._cells.cells.values()))
        return first

    async def UnloadLora(self, request: loads_pb2.UnloadLoraRequest, context: object) -> loads_pb2.UnloadLoraResponse:
        """Unload an adapter in every cell; NOT_FOUND means that no cell has it."""
        self._cells.any()
        calls = [cell.watch_stub.UnloadLora(request) for cell in self._cells.cells.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        failures = [error for error in errors if not _is_not_found(error)]
        if failures or len(errors) == len(results):
            raise (failures or errors)[0]
        return loads_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: loads_pb2.ListLorasRequest, context: object) -> loads_pb2.ListLorasResponse:
        """Return the loaded adapters, which are the same in all cells."""
        response = await self._cells.any().watch_stub.ListLoras(request, timeout=_CALL_TIMEOUT_S)
        if Role.ADMIN not in current_caller.get().roles:
            for lora in response.loras:
                lora.ClearField("path")
        return response

    async def UpdateWeights(
        self, request: weights_pb2.UpdateWeightsRequest, context: object
    ) -> weights_pb2.UpdateWeightsResponse:
        """Replace the weights in every cell."""
        return await self._front.runner.weights.update(request)

    async def GetWeightsVersion(
        self, request: weights_pb2.GetWeightsVersionRequest, context: object
    ) -> weights_pb2.GetWeightsVersionResponse:
        """Return the version of each cell; only administrators see paths and problems."""
        cells = await self._front.runner.weights.state()
        if Role.ADMIN not in current_caller.get().roles:
            for cell in cells:
                cell.version.ClearField("path")
                cell.ClearField("problems")
        return weights_pb2.GetWeightsVersionResponse(cells=cells)

    async def PauseGeneration(
        self, request: weights_pb2.PauseGenerationRequest, context: object
    ) -> weights_pb2.PauseGenerationResponse:
        """Pause generation in every cell."""
        return weights_pb2.PauseGenerationResponse(num_requests=await self._front.runner.weights.pause(request.mode))

    async def ResumeGeneration(
        self, request: weights_pb2.ResumeGenerationRequest, context: object
    ) -> weights_pb2.ResumeGenerationResponse:
        """Resume generation in every cell."""
        await self._front.runner.weights.resume()
        return weights_pb2.ResumeGenerationResponse()

    async def Sleep(self, request: weights_pb2.SleepRequest, context: object) -> weights_pb2.SleepResponse:
        """Let the workers of every cell sleep."""
        return weights_pb2.SleepResponse(num_requests=await self._front.runner.weights.sleep(request))

    async def WakeUp(self, request: weights_pb2.WakeUpRequest, context: object) -> weights_pb2.WakeUpResponse:
        """Wake the workers of every cell."""
        await self._front.runner.weights.wake(request.tags)
        return weights_pb2.WakeUpResponse()


def _is_not_found(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND


def _embed_input(index: int, item: service_pb2.EmbedInput) -> EmbedInput:
    field = f"inputs[{index}]"
    kind = item.WhichOneof("input")
    if kind is None:
        raise InvalidArgumentError("must be prompt or token_ids", field=field)
    return EmbedInput(f"{field}.{kind}", item.prompt if kind == "prompt" else item.token_ids.values)


async def _relay(
    opening: Awaitable[Output],
    context: ServicerContext[Any, Any],
    keep_alives: KeepAlives,
    request_id: str,
    from_token: int = 0,
) -> None:
    """Write output to the client as it arrives; `from_token` is the offset of the first token of sequence 0."""
    last: Chunk | None = None

    def beat() -> Coroutine[object, object, None]:
        offset = from_token if last is None else last.next_offset
        message = pb.GenerateResponse(request_id=request_id, token_offset=offset, is_keep_alive=True)
        return context.write(message)

    with keep_alives.keep(beat) as stream:
        async with await opening as output:
            request_id = output.request_id
            while not output.is_final:
                for chunk in await output.take():
                    if not chunk.sequence_index:
                        last = chunk
                    for piece in chunk.pieces(_MAX_TENSOR_BYTES):
                        # As `stream.write` does, whose coroutine would be a twentieth of the cost of a message.
                        if stream.beating is not None:
                            await asyncio.wait((stream.beating,))
                        stream.num_quiet_ticks, stream.is_writing = 0, True
                        await context.write(piece.to_proto(request_id))
                        stream.is_writing = False
    output.raise_failure()
