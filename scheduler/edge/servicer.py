"""The scheduler's gRPC service for routers and detokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from grpc.aio import ServicerContext

import midstream
from midstream.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from midstream.model.folder import ModelFolder
from midstream.rpc.frames import FrameServer
from protos import (
    frames_pb2,
    generation_pb2,
    ledger_pb2,
    loads_pb2,
    receipts_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    stats_pb2,
    status_pb2,
    weights_pb2,
)
from scheduler.core.effects import Accepted
from scheduler.core.events import AbortRequested
from scheduler.core.prefix_cache import CacheCleared
from scheduler.edge.document_calls import DocumentCalls
from scheduler.edge.engine import Engine
from scheduler.edge.feed_session import FeedSession
from scheduler.edge.images import Images
from scheduler.edge.kept_requests import KeptRequests
from scheduler.edge.ledger import Ledger
from scheduler.edge.lora_registry import Adapters
from scheduler.edge.metrics import used_loras
from scheduler.edge.payloads import Payloads
from scheduler.edge.receipts import Receipts
from scheduler.edge.sleep import WorkerSleep
from scheduler.edge.status import CellStatusReport, detokenizer_infos
from scheduler.edge.submissions import Submissions
from scheduler.edge.weights import Weights
from scheduler.journal import LoadedAdapter
from scheduler.journal.documents import Documents
from scheduler.wire.kinds import kind_to_proto
from scheduler.wire.requests import ModelLimits, spec_from_proto
from scheduler.wire.stats import iteration_stats_proto, kv_event_proto, kv_snapshot_proto, request_stats_proto

_MAX_REQUEST_STATS = 1024
# Time to wait until the submissions that were sent before an Abort have been processed.
_UNREAD_GRACE_S = 0.1


class SchedulerServicer(DocumentCalls, scheduler_pb2_grpc.SchedulerServicer):
    """The service of one engine."""

    def __init__(
        self,
        engine: Engine,
        adapters: Adapters,
        images: Images,
        kept: KeptRequests,
        ledger: Ledger | None,
        receipts: Receipts | None,
        payloads: Payloads | None,
        documents: Documents,
        *,
        model: ModelFolder,
        limits: ModelLimits,
        weights: Weights,
        sleep: WorkerSleep,
        cell: str,
        policies: tuple[str, str, str],
        max_stored_bytes: int,
        frames: FrameServer,
    ) -> None:
        """Serve `engine`.

        Args:
            kept: Ended requests that are kept for a long time.
            ledger: Usage of ended requests; None if it is off.
            receipts: Receipts of ended requests; None if they are off.
            payloads: Requests and answers that are stored for audits; None if they are not.
            documents: Where routers store files and batches.
            weights: The version of the workers' weights.
            sleep: Sleep of the workers.
            policies: Names of the capacity policy, the batching type and the journal, for GetServerInfo.
            max_stored_bytes: Maximum bytes of documents that one owner may store.
            frames: Accepts the connections of detokenizers and routers.
        """
        super().__init__(documents, engine.now_ns, max_stored_bytes)
        self._frames = frames
        self._engine = engine
        self._adapters = adapters
        self._images = images
        self._kept = kept
        self._ledger = ledger
        self._receipts = receipts
        self._payloads = payloads
        self._model = model
        self._limits = limits
        self._cell = cell
        self._weights, self._sleep = weights, sleep
        self._policies = policies
        self._started_ns = engine.now_ns()
        self._status = CellStatusReport(engine.core, engine.hub, cell)

    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: object) -> scheduler_pb2.SubmitResponse:
        """Accept a request, or attach to the known request with the same id."""
        answered: asyncio.Future[scheduler_pb2.SubmitResponse] = asyncio.get_running_loop().create_future()

        def on_committed(accepted: Accepted) -> None:
            if not answered.done():  # the call may have been cancelled
                answered.set_result(self.answer(accepted))

        await self.submit(request.request, on_committed)
        return await answered

    async def OpenSubmissions(self, request: frames_pb2.OpenFramesRequest, context: object) -> frames_pb2.FramesOffer:
        """Offer a frame connection on which each message has the effect of Submit."""
        return self._frames.offer(lambda connection: Submissions(self, connection))

    def submit_now(self, request: generation_pb2.GenerateRequest, on_committed: Callable[[Accepted], None]) -> bool:
        """Accept a request unless something has to be awaited first; return whether it was accepted.

        `on_committed` is called once it is committed. Raises MidstreamError if it is rejected.
        """
        if request.keep_s or request.HasField("lora") or request.HasField("prompt_tuning"):
            return False
        self._prepare(request)
        self._engine.submit(spec_from_proto(request, self._limits, *self._times(request)), on_committed)
        return True

    async def submit(self, request: generation_pb2.GenerateRequest, on_committed: Callable[[Accepted], None]) -> None:
        """Accept any request; otherwise like `submit_now`."""
        self._prepare(request)
        if request.keep_s:
            await self._kept.find(request.request_id)
        if request.request_id not in self._engine.core.lifecycle.requests:
            await self._adapters.resolve(request)
        arguments = request, self._limits, *self._times(request)
        if request.prompt_tuning.HasField("table"):  # there may be megabytes to hash and to copy
            spec = await asyncio.to_thread(spec_from_proto, *arguments)
        else:
            spec = spec_from_proto(*arguments)
        self._engine.submit(spec, on_committed)

    def _prepare(self, request: generation_pb2.GenerateRequest) -> None:
        """Set the nonce of the request's receipt. Raises MidstreamError if the request has no id, or asks for a receipt
        while they are off.
        """
        if not request.request_id:
            raise InvalidArgumentError("must not be empty", field="request_id")
        if self._receipts is not None:
            request.receipt_nonce = self._receipts.new_nonce()
        elif request.HasField("output") and request.output.return_receipt:
            raise UnsupportedError("this scheduler makes no receipts (--receipts off)", field="output.return_receipt")

    def _times(self, request: generation_pb2.GenerateRequest) -> tuple[int, int]:
        """Return the current time, and the time at which the request arrived at the router."""
        clock = self._engine.clock
        return clock.now_ns(), clock.from_unix_ns(request.arrival_time_unix_ns)

    def answer(self, accepted: Accepted) -> scheduler_pb2.SubmitResponse:
        """Return the answer to a committed submission; its client is now expected to read the request."""
        if accepted.is_attached:
            self._engine.hub.expect_reader(accepted.request.request_id)
        return scheduler_pb2.SubmitResponse(
            scheduler_epoch=self._engine.core.config.scheduler_epoch,
            attached=accepted.is_attached,
            num_sequences=accepted.request.spec.num_sequences,
        )

    async def EncodeImage(
        self, request: scheduler_pb2.EncodeImageRequest, context: object
    ) -> scheduler_pb2.EncodeImageResponse:
        """Have a worker encode an image."""
        return await self._images.encode(request.data)

    async def Abort(self, request: loads_pb2.AbortRequest, context: object) -> loads_pb2.AbortResponse:
        if request.only_if_unread:
            # The client may have returned through another router. If this process was stopped in the meantime, that
            # router's submission may still be in a socket, although it was sent before this call.
            await asyncio.sleep(_UNREAD_GRACE_S)
            if self._engine.has_reader_left(request.request_id):
                return loads_pb2.AbortResponse()
        effects = self._engine.handle(AbortRequested(self._engine.now_ns(), request.request_id))
        return loads_pb2.AbortResponse(was_running=bool(effects))

    async def GetRequest(
        self, request: scheduler_pb2.GetRequestRequest, context: object
    ) -> scheduler_pb2.GetRequestResponse:
        """Return an accepted request and its state."""
        found = await self._kept.find(request.request_id)
        if found is None or found.request_id not in self._engine.hub.logs:
            raise NotFoundError(f"no request {request.request_id[:128]!r} is known here")
        return scheduler_pb2.GetRequestResponse(
            request=generation_pb2.GenerateRequest.FromString(found.spec.payload),
            has_started=bool(found.times.first_scheduled_ns),
            has_finished=self._engine.hub.is_over(found.request_id),
        )

    async def DeleteRequest(
        self, request: scheduler_pb2.DeleteRequestRequest, context: object
    ) -> scheduler_pb2.DeleteRequestResponse:
        await self._kept.delete(request.request_id)
        return scheduler_pb2.DeleteRequestResponse()

    async def OpenTokenFeed(self, request: frames_pb2.OpenFramesRequest, context: object) -> frames_pb2.FramesOffer:
        return self._frames.offer(lambda connection: FeedSession(self._engine, self._kept, connection))

    async def GetLedger(self, request: ledger_pb2.GetLedgerRequest, context: object) -> ledger_pb2.GetLedgerResponse:
        if self._ledger is None:
            raise UnsupportedError("this scheduler keeps no ledger (--ledger-ttl-s 0)")
        return await self._ledger.read(request.after)

    async def GetReceipt(
        self, request: receipts_pb2.GetReceiptRequest, context: object
    ) -> receipts_pb2.GetReceiptResponse:
        """Return the receipt of a known request, or the one in the ledger."""
        if self._receipts is None:
            raise UnsupportedError("this scheduler makes no receipts (--receipts off)")
        found = await self._receipts.find(request)
        if found is not None:
            return found
        stored = await self._ledger.receipt(request.request_id) if self._ledger is not None else None
        if stored is None:
            raise NotFoundError(f"no request {request.request_id[:128]!r} is known here")
        response = receipts_pb2.GetReceiptResponse(receipt=stored)
        if self._payloads is not None:
            await self._payloads.fill(response, request)
        return response

    async def ListReceiptKeys(
        self, request: receipts_pb2.ListReceiptKeysRequest, context: object
    ) -> receipts_pb2.ListReceiptKeysResponse:
        if self._receipts is None:
            raise UnsupportedError("this scheduler makes no receipts (--receipts off)")
        return receipts_pb2.ListReceiptKeysResponse(keys=await self._receipts.keys())

    async def GetModelInfo(self, request: loads_pb2.GetModelInfoRequest, context: object) -> loads_pb2.ModelInfo:
        model = self._model
        if request.model not in ("", model.name):
            raise NotFoundError(f"{request.model!r} is not served here; the model is {model.name!r}", field="model")
        features = [set(group.registration.features) for group in self._engine.core.groups]
        return model.to_proto(set.intersection(*features) if features else ())

    async def GetServerInfo(self, request: loads_pb2.GetServerInfoRequest, context: object) -> loads_pb2.ServerInfo:
        """Return the scheduler's version and policies, and the connected workers and detokenizers."""
        core = self._engine.core
        capacity_policy, batching_type, journal = self._policies
        return loads_pb2.ServerInfo(
            version=midstream.__version__,
            scheduler_epoch=core.config.scheduler_epoch,
            started_unix_ns=self._engine.clock.to_unix_ns(self._started_ns),
            worker_groups=[
                loads_pb2.WorkerGroupInfo(
                    group_id=group.group_id,
                    epoch=group.epoch,
                    num_blocks=group.blocks.num_blocks * group.units_per_block,
                    block_bytes=group.registration.block_bytes // group.units_per_block,
                    world_size=group.registration.world_size,
                    device=group.registration.device,
                    dtype=group.registration.dtype,
                    num_active_sequences=group.max_batch_size - group.num_free_rows,
                    num_placed_requests=group.num_placed,
                    num_steps=group.next_step_id - 1,
                    held_off=group.reason_held_off,
                    kind=kind_to_proto(group.kind),
                )
                for group in core.groups
            ],
            detokenizers=detokenizer_infos(self._engine.hub),
            tokens_per_block=core.config.tokens_per_block,
            capacity_policy=capacity_policy,
            batching_type=batching_type,
            journal=journal,
        )

    async def GetLoads(self, request: loads_pb2.GetLoadsRequest, context: object) -> loads_pb2.GetLoadsResponse:
        core = self._engine.core
        used = used_loras(core)
        load = loads_pb2.CellLoad(
            cell=self._cell,
            scheduler_epoch=core.config.scheduler_epoch,
            num_running_requests=core.num_active_requests,
            num_queued_requests=len(core.queue),
            max_num_queued_requests=core.queue.max_size,
            num_blocks=sum(group.blocks.num_blocks * group.units_per_block for group in core.groups),
            num_free_blocks=sum(group.blocks.num_available * group.units_per_block for group in core.groups),
            num_queued_tokens=core.queue.num_tokens + sum(group.num_context_tokens for group in core.groups),
            tokens_per_block=core.config.tokens_per_block,
            running_loras=used.running,
            waiting_loras=used.waiting,
            max_loras=used.max_loras,
        )
        return loads_pb2.GetLoadsResponse(cells=[load])

    async def GetIterationStats(
        self, request: stats_pb2.GetIterationStatsRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[stats_pb2.IterationStats]:
        """Yield the current state and then, with `stream`, the statistics of every iteration."""
        if not request.stream:
            yield iteration_stats_proto(self._engine.core.current_stats(self._engine.now_ns()), self._engine.clock)
            return
        with self._engine.watch_iterations() as iterations:
            first = iterations.last_number + 1
            await context.send_initial_metadata(())  # tells the caller that the subscription has started
            async for run in iterations.follow(first):
                for _, stats in run if request.min_interval_ms == 0 else run[-1:]:
                    yield iteration_stats_proto(stats, self._engine.clock)
                await asyncio.sleep(request.min_interval_ms / 1e3)

    async def GetRequestStats(
        self, request: stats_pb2.GetRequestStatsRequest, context: object
    ) -> stats_pb2.GetRequestStatsResponse:
        if not 1 <= len(request.request_ids) <= _MAX_REQUEST_STATS:
            raise InvalidArgumentError(f"must name 1 to {_MAX_REQUEST_STATS} requests", field="request_ids")
        known = self._engine.core.lifecycle.requests
        stats = [request_stats_proto(known[item]) for item in request.request_ids if item in known]
        return stats_pb2.GetRequestStatsResponse(requests=stats)

    async def SubscribeKvEvents(
        self, request: stats_pb2.SubscribeKvEventsRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[stats_pb2.KvEventBatch]:
        """Yield KV events, from a sequence number or a snapshot on; `cleared` replaces events that were lost."""
        events = self._engine.kv_events
        expected = request.start_sequence_number or events.last_number + 1
        await context.send_initial_metadata(())
        if request.include_snapshot:
            expected = events.last_number + 1
            yield kv_snapshot_proto(events.last_number, self._engine.core.groups)
        async for run in events.follow(expected):
            batch = stats_pb2.KvEventBatch()
            if run[0][0] > expected:
                batch.events.append(kv_event_proto(run[0][0] - 1, "", CacheCleared()))
            for number, (group_id, change) in run:
                batch.events.append(kv_event_proto(number, group_id, change))
            expected = run[-1][0] + 1
            yield batch

    async def GetStatus(self, request: status_pb2.GetCellStatusRequest, context: object) -> status_pb2.CellStatus:
        """Return the cell's status, for monitoring."""
        return self._status.answer(request, self._engine.now_ns())

    async def LoadLora(self, request: loads_pb2.LoadLoraRequest, context: object) -> loads_pb2.LoadLoraResponse:
        return loads_pb2.LoadLoraResponse(lora=_lora_info(await self._adapters.load(request.name, request.path)))

    async def UnloadLora(self, request: loads_pb2.UnloadLoraRequest, context: object) -> loads_pb2.UnloadLoraResponse:
        """Prevent new requests from naming an adapter."""
        await self._adapters.unload(request.name)
        return loads_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: loads_pb2.ListLorasRequest, context: object) -> loads_pb2.ListLorasResponse:
        return loads_pb2.ListLorasResponse(loras=map(_lora_info, self._adapters.loaded()))

    async def UpdateWeights(
        self, request: weights_pb2.UpdateWeightsRequest, context: object
    ) -> weights_pb2.UpdateWeightsResponse:
        """Replace the weights of all workers."""
        return await self._weights.update(request)

    async def GetWeightsVersion(
        self, request: weights_pb2.GetWeightsVersionRequest, context: object
    ) -> weights_pb2.GetWeightsVersionResponse:
        return weights_pb2.GetWeightsVersionResponse(cells=[self._weights.state()])

    async def PauseGeneration(
        self, request: weights_pb2.PauseGenerationRequest, context: object
    ) -> weights_pb2.PauseGenerationResponse:
        """Return once no step runs."""
        return weights_pb2.PauseGenerationResponse(num_requests=await self._weights.pause(request.mode))

    async def ResumeGeneration(
        self, request: weights_pb2.ResumeGenerationRequest, context: object
    ) -> weights_pb2.ResumeGenerationResponse:
        self._weights.resume()
        return weights_pb2.ResumeGenerationResponse()

    async def Sleep(self, request: weights_pb2.SleepRequest, context: object) -> weights_pb2.SleepResponse:
        """Return once the workers sleep."""
        return weights_pb2.SleepResponse(num_requests=await self._sleep.sleep(request))

    async def WakeUp(self, request: weights_pb2.WakeUpRequest, context: object) -> weights_pb2.WakeUpResponse:
        """Return once the workers are awake."""
        await self._sleep.wake(request.tags)
        return weights_pb2.WakeUpResponse()


def _lora_info(adapter: LoadedAdapter) -> loads_pb2.LoraInfo:
    return loads_pb2.LoraInfo(**asdict(adapter))
