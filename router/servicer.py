"""The public gRPC service. Protobuf and status codes stop here; what a request goes through is in generation.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter, Histogram

from midstream import __version__
from midstream.chunk import Chunk, FinishReason
from midstream.errors import DeadlineError, ExecutionError, OverloadedError, UnsupportedError
from midstream.telemetry import Metrics, current_request_id
from protos import generation_pb2 as pb
from protos import loads_pb2, service_pb2, service_pb2_grpc, stats_pb2
from router.cells import Cells
from router.generation import Generation, Runner
from router.request_checks import check_model

_CALL_TIMEOUT_S = 10.0


class RouterMetrics:
    """What clients of this router see."""

    def __init__(self, metrics: Metrics) -> None:
        self.first_token: Histogram = metrics.histogram("time_to_first_token_seconds", "Arrival to first output.")
        self.inter_token: Histogram = metrics.histogram(
            "inter_token_latency_seconds", "Time per token after the first."
        )
        self.request: Histogram = metrics.histogram("e2e_request_latency_seconds", "Arrival to last output.")
        self.success: Counter = metrics.counter("request_success", "Requests that ended.", ("finished_reason",))
        self.tokens: Counter = metrics.counter("relayed_tokens", "Tokens sent to clients.")


class RouterServicer(service_pb2_grpc.MidstreamServicer):
    """Implements protos/service.proto."""

    def __init__(
        self, runner: Runner, cells: Cells, metrics: RouterMetrics, router_id: str, draining: asyncio.Event
    ) -> None:
        self._runner = runner
        self._cells = cells
        self._metrics = metrics
        self._router_id = router_id
        self._draining = draining

    async def Generate(  # type: ignore[override]  # noqa: N802 (it writes to the context)
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Runs a request and streams its output."""
        current_request_id.set(request.request_id)
        arrival = time.monotonic()
        generation = await self._runner.start(request, context.time_remaining(), _canceller())
        current_request_id.set(generation.request_id)
        await self._relay(generation, context, arrival)

    async def Resume(  # type: ignore[override]  # noqa: N802 (it writes to the context)
        self,
        request: service_pb2.ResumeRequest,
        context: grpc.aio.ServicerContext[service_pb2.ResumeRequest, pb.GenerateResponse],
    ) -> None:
        """Streams the rest of a request."""
        current_request_id.set(request.request_id)
        generation = self._runner.resume(
            request.request_id,
            request.from_token,
            request.from_token_by_sequence[:],
            context.time_remaining(),
            _canceller(),
        )
        await self._relay(generation, context, time.monotonic())

    async def _relay(self, generation: Generation, context: grpc.aio.ServicerContext[Any, Any], arrival: float) -> None:
        """Writes output as it comes. While a write waits for the client, what comes is merged in generation.stream."""
        request_id, last = generation.request_id, None
        left = False
        try:
            while True:
                for chunk in await generation.take():
                    last = self._observe(chunk, arrival, last)
                    await context.write(chunk.to_proto(request_id))
                if chunk.is_final:
                    break
        except asyncio.CancelledError:
            left = not self._draining.is_set()
            if generation.stream.overflowed:
                # This task was cancelled to get out of a write that the client does not take.
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                raise OverloadedError("the client reads too slowly") from None
            raise
        finally:
            generation.close(abort=left)
        self._metrics.request.observe(time.monotonic() - arrival)
        self._metrics.success.labels(chunk.finish_reason or "").inc()
        _raise_for(chunk)

    def _observe(self, chunk: Chunk, arrival: float, last: float | None) -> float:
        now, num_tokens = time.monotonic(), len(chunk.token_ids)
        if last is None:
            self._metrics.first_token.observe(now - arrival)
        elif num_tokens:
            self._metrics.inter_token.observe((now - last) / num_tokens)
        self._metrics.tokens.inc(num_tokens)
        return now

    async def Abort(self, request: loads_pb2.AbortRequest, context: object) -> loads_pb2.AbortResponse:  # noqa: N802
        """Ends a request."""
        current_request_id.set(request.request_id)
        return loads_pb2.AbortResponse(was_running=await self._cells.abort(request.request_id))

    async def GetModelInfo(self, request: loads_pb2.GetModelInfoRequest, context: object) -> loads_pb2.ModelInfo:  # noqa: N802
        """What is served. Answered from the model folder; only `features` is the workers' word."""
        check_model(request.model, self._runner.model)
        model = self._runner.model
        info = loads_pb2.ModelInfo(
            model=model.name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_sequence_length,
            end_ids=model.end_ids,
            fingerprint=model.fingerprint,
            has_chat_template=model.chat_template is not None,
            features=sorted(self._cells.any().features or ()),
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
        )
        if model.pad_id is not None:
            info.pad_id = model.pad_id
        return info

    async def GetServerInfo(self, request: loads_pb2.GetServerInfoRequest, context: object) -> loads_pb2.ServerInfo:  # noqa: N802
        """The first cell's word, with the worker groups and detokenizers of all cells."""
        calls = [cell.stub.GetServerInfo(request, timeout=_CALL_TIMEOUT_S) for cell in self._cells.cells.values()]
        first, *others = await asyncio.gather(*calls)
        for other in others:
            first.worker_groups.extend(other.worker_groups)
            first.detokenizers.extend(other.detokenizers)
        first.router_id = self._router_id
        first.version = first.version or __version__
        return first

    async def GetLoads(self, request: loads_pb2.GetLoadsRequest, context: object) -> loads_pb2.GetLoadsResponse:  # noqa: N802
        """The load of every cell."""
        response = loads_pb2.GetLoadsResponse()
        cells = list(self._cells.cells.values())
        answers = await asyncio.gather(*(cell.stub.GetLoads(request, timeout=_CALL_TIMEOUT_S) for cell in cells))
        for cell, answer in zip(cells, answers, strict=True):
            for load in answer.cells:
                load.cell = load.cell or cell.name
                response.cells.append(load)
        return response

    async def GetIterationStats(  # noqa: N802
        self, request: stats_pb2.GetIterationStatsRequest, context: object
    ) -> AsyncIterator[stats_pb2.IterationStats]:
        """Statistics of all cells, as they come."""
        calls = [cell.stub.GetIterationStats(request) for cell in self._cells.cells.values()]
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

    async def SubscribeKvEvents(  # noqa: N802
        self, request: stats_pb2.SubscribeKvEventsRequest, context: object
    ) -> AsyncIterator[stats_pb2.KvEventBatch]:
        """KV-cache events of the one cell."""
        if len(self._cells.cells) > 1:
            raise UnsupportedError("each cell numbers its own KV events: subscribe at the schedulers")
        async for batch in self._cells.any().stub.SubscribeKvEvents(request):
            yield batch

    async def LoadLora(self, request: loads_pb2.LoadLoraRequest, context: object) -> loads_pb2.LoadLoraResponse:  # noqa: N802
        """Loads an adapter in every cell."""
        await asyncio.gather(*(cell.stub.LoadLora(request) for cell in self._cells.cells.values()))
        return loads_pb2.LoadLoraResponse()

    async def UnloadLora(self, request: loads_pb2.UnloadLoraRequest, context: object) -> loads_pb2.UnloadLoraResponse:  # noqa: N802
        """Unloads an adapter in every cell."""
        await asyncio.gather(*(cell.stub.UnloadLora(request) for cell in self._cells.cells.values()))
        return loads_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: loads_pb2.ListLorasRequest, context: object) -> loads_pb2.ListLorasResponse:  # noqa: N802
        """The adapters that are loaded; all cells have the same."""
        return await self._cells.any().stub.ListLoras(request, timeout=_CALL_TIMEOUT_S)


def _canceller() -> Callable[[], None]:
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None:
            task.cancel()

    return cancel


def _raise_for(chunk: Chunk) -> None:
    """A request that failed or ran out of time fails the call too, after its final chunk."""
    if chunk.finish_reason is FinishReason.DEADLINE:
        raise DeadlineError("the request's deadline passed")
    if chunk.finish_reason is FinishReason.ERROR:
        raise chunk.error or ExecutionError("the request failed")
