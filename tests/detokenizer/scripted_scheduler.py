"""A scheduler that feeds scripted tokens over a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.clock import SteadyClock
from midstream.errors import InvalidArgumentError, NotFoundError, UnavailableError
from midstream.rpc.connection import Connection
from midstream.rpc.frames import FrameServer, Pump
from midstream.rpc.health import Progress
from midstream.rpc.serving import Server
from protos import (
    frames_pb2,
    ledger_pb2,
    loads_pb2,
    receipts_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    stats_pb2,
    status_pb2,
    weights_pb2,
)
from protos import generation_pb2 as pb
from scheduler.edge.document_calls import DocumentCalls
from scheduler.edge.submissions import Submissions
from scheduler.journal.documents import Documents
from scheduler.journal.sqlite_documents import SqliteDocuments

END_ID = 2


@dataclass
class Scripted:
    """One request: its tokens so far, and the ends of its sequences and of the request."""

    request: pb.GenerateRequest
    num_prompt_tokens: int = 3
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: list[scheduler_pb2.FeedSequenceEnd] = field(default_factory=list)
    ended: scheduler_pb2.FeedEnded | None = None


def scripted_scheduler() -> ScriptedScheduler:
    """Return a scheduler without requests."""
    return ScriptedScheduler()


class Feed:
    """The connection of one detokenizer: the attached requests, and the number of tokens sent for each of them."""

    def __init__(self, scheduler: ScriptedScheduler, connection: Connection) -> None:
        self.attached: dict[int, str] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.num_ends: dict[int, int] = {}
        self.opened: set[int] = set()
        self.pump = Pump(connection, self._collect)
        self.resume = self.pump.run
        self._scheduler = scheduler
        scheduler.feeds.append(self)

    def _collect(self) -> scheduler_pb2.FeedBatch | None:
        batch = self._scheduler.batch(self)
        return batch if batch.ByteSize() else None

    message_class = scheduler_pb2.FeedCommand

    def take(self, command: scheduler_pb2.FeedCommand) -> None:
        self._scheduler.obey(command, self)

    def lose(self, error: Exception | None) -> None:
        self._scheduler.feeds.remove(self)


class ScriptedScheduler(DocumentCalls, scheduler_pb2_grpc.SchedulerServicer):
    """A scheduler whose requests come from Submit or `add`; the test sends their tokens with `emit` and ends their
    sequences with `end`.
    """

    def __init__(self) -> None:
        super().__init__(Documents(SqliteDocuments(None), SteadyClock()), time.time_ns, 64 << 20)
        self._is_running = False
        self.requests: dict[str, Scripted] = {}
        self.submits: list[pb.GenerateRequest] = []
        self.has_receipts = True
        self.receipt_queries: list[receipts_pb2.GetReceiptRequest] = []
        self.aborts: list[str] = []
        self.stops: list[tuple[str, int, int, str]] = []
        self.feeds: list[Feed] = []
        self.submit_errors: list[Exception] = []
        self.features: tuple[str, ...] = ()
        self.num_blocks = 64
        self.status = status_pb2.CellStatus()
        self.status_requests: list[status_pb2.GetCellStatusRequest] = []
        self.routers: dict[str, status_pb2.RouterStatus] = {}
        self.loras: list[loads_pb2.LoraInfo] = []
        self.kv_events: list[stats_pb2.KvEvent] = []
        self.keeps_watchers = False
        self.kind_changed_at: tuple[int, ...] = ()  # of every request
        self.weights = weights_pb2.CellWeights(
            cell="cell", version=weights_pb2.WeightsVersion(version="default", path="/models/base"), num_groups=1
        )
        self.weights_calls: list[Any] = []
        self.changed = asyncio.Event()
        self.server: Server | None = None
        self.frames = FrameServer("127.0.0.1", 0, max_message_bytes=64 << 20)

    async def start(self, port: int = 0) -> str:
        """Start serving; return the address."""
        self.server = Server("midstream.v1.Scheduler", "127.0.0.1", port, Progress())
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self.server.grpc)
        self.frames = FrameServer("127.0.0.1", 0, max_message_bytes=64 << 20)
        await self.frames.start()
        self._documents = Documents(SqliteDocuments(None), SteadyClock())
        await self._documents.open(1)
        self._is_running = True
        await self.server.start()
        return f"127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        """Stop without notifying the peers."""
        assert self.server is not None
        await self.server.stop()
        await self.frames.close()
        if self._is_running:
            self._is_running = False
            await self._documents.close()

    def add(self, request_id: str, **fields: Any) -> None:
        """Add a running request."""
        self.requests[request_id] = Scripted(pb.GenerateRequest(request_id=request_id, **fields))

    def emit(self, request_id: str, token_ids: Iterable[int], sequence_index: int = 0) -> None:
        """Send tokens."""
        self.requests[request_id].tokens.setdefault(sequence_index, []).extend(token_ids)
        self._wake()

    def end(
        self,
        request_id: str,
        reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH,
        *,
        sequences: Sequence[int] = (0,),
        error: pb.ErrorInfo | None = None,
        **fields: Any,
    ) -> None:
        """End sequences; a request ends with its last sequence."""
        script = self.requests[request_id]
        for index in sequences:
            count = fields.pop("num_tokens", len(script.tokens.get(index, ())))
            script.ends.append(
                scheduler_pb2.FeedSequenceEnd(sequence_index=index, finish_reason=reason, num_tokens=count, **fields)
            )
        if len(script.ends) == max(script.request.sampling.num_return_sequences, 1):
            usage = pb.Usage(
                prompt_tokens=script.num_prompt_tokens, completion_tokens=sum(end.num_tokens for end in script.ends)
            )
            script.ended = scheduler_pb2.FeedEnded(usage=usage, error=error)
        self._wake()

    async def until(self, condition: Any) -> None:
        """Wait for a condition that depends on another component."""
        async with asyncio.timeout(240):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def OpenSubmissions(self, request: Any, context: Any) -> frames_pb2.FramesOffer:  # noqa: N802
        return self.frames.offer(lambda connection: Submissions(self, connection))

    async def Submit(  # noqa: N802
        self, request: scheduler_pb2.SubmitRequest, context: Any
    ) -> scheduler_pb2.SubmitResponse:
        return self.accept(request.request)

    def submit_now(self, request: pb.GenerateRequest, on_committed: Any) -> bool:
        """Accept a request over frames."""
        on_committed(self.accept(request))
        return True

    async def submit(self, request: pb.GenerateRequest, on_committed: Any) -> None:
        raise NotImplementedError

    def answer(self, accepted: Any) -> scheduler_pb2.SubmitResponse:
        return scheduler_pb2.SubmitResponse.FromString(accepted.SerializeToString())

    def accept(self, request: pb.GenerateRequest) -> scheduler_pb2.SubmitResponse:
        """Accept a request, or raise the next of `submit_errors`."""
        self.submits.append(request)
        if self.submit_errors:
            raise self.submit_errors.pop(0)
        known = request.request_id in self.requests
        if not known:
            self.requests[request.request_id] = Scripted(request, len(request.token_ids.values))
        self.changed.set()
        return scheduler_pb2.SubmitResponse(scheduler_epoch=1, attached=known, num_sequences=1)

    async def GetRequest(  # noqa: N802
        self, request: scheduler_pb2.GetRequestRequest, context: Any
    ) -> scheduler_pb2.GetRequestResponse:
        script = self.requests.get(request.request_id)
        if script is None:
            raise NotFoundError("no such request")
        is_over = script.ended is not None
        return scheduler_pb2.GetRequestResponse(
            request=script.request, has_started=bool(script.tokens), has_finished=is_over
        )

    async def GetLedger(  # noqa: N802
        self, request: ledger_pb2.GetLedgerRequest, context: Any
    ) -> ledger_pb2.GetLedgerResponse:
        if request.after:
            return ledger_pb2.GetLedgerResponse()
        entry = ledger_pb2.LedgerEntry(request_id="a", client_id="c", completion_tokens=3, finished_unix_ns=1 << 60)
        return ledger_pb2.GetLedgerResponse(entries=[entry], next_after="7")

    async def GetReceipt(  # noqa: N802
        self, request: receipts_pb2.GetReceiptRequest, context: Any
    ) -> receipts_pb2.GetReceiptResponse:
        """Return a receipt of the lengths for which it was asked."""
        script = self.requests.get(request.request_id)
        if script is None:
            raise NotFoundError("no such request")
        self.receipt_queries.append(request)
        if not self.has_receipts:
            raise UnavailableError("no receipt now")
        body = receipts_pb2.ReceiptBody(version=1, request_id=request.request_id)
        for count in request.num_tokens:
            body.sequences.add(num_tokens=count)
        receipt = receipts_pb2.Receipt(body=body.SerializeToString(), nonce=b"nonce", key_id="k", signature=b"s")
        return receipts_pb2.GetReceiptResponse(
            receipt=receipt,
            request=b"canonical" if request.include_request else b"",
            outputs=[receipts_pb2.ReceiptOutput(token_ids=[5, 6])] if request.include_outputs else [],
        )

    async def ListReceiptKeys(  # noqa: N802
        self, request: receipts_pb2.ListReceiptKeysRequest, context: Any
    ) -> receipts_pb2.ListReceiptKeysResponse:
        return receipts_pb2.ListReceiptKeysResponse(
            keys=[receipts_pb2.ReceiptKey(public_key=bytes(range(32)), created_unix_s=5)]
        )

    async def DeleteRequest(  # noqa: N802
        self, request: scheduler_pb2.DeleteRequestRequest, context: Any
    ) -> scheduler_pb2.DeleteRequestResponse:
        if self.requests.pop(request.request_id, None) is None:
            raise NotFoundError("no such request")
        return scheduler_pb2.DeleteRequestResponse()

    async def GetStatus(  # noqa: N802
        self, request: status_pb2.GetCellStatusRequest, context: Any
    ) -> status_pb2.CellStatus:
        self.status_requests.append(request)
        answer = status_pb2.CellStatus()
        answer.CopyFrom(self.status)
        self.routers[request.router.router_id] = request.router
        self.changed.set()
        answer.routers.extend(self.routers.values())
        for group in answer.groups:
            if request.max_map_cells:
                group.block_map.blocks_per_cell = 1
        return answer

    async def EncodeImage(self, request: scheduler_pb2.EncodeImageRequest, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Abort(self, request: loads_pb2.AbortRequest, context: Any) -> loads_pb2.AbortResponse:  # noqa: N802
        self.aborts.append(request.request_id)
        script = self.requests.get(request.request_id)
        running = script is not None and script.ended is None
        if running:
            self.end(request.request_id, pb.FINISH_REASON_ABORT)
        self.changed.set()
        return loads_pb2.AbortResponse(was_running=running)

    async def GetLoads(self, request: Any, context: Any) -> loads_pb2.GetLoadsResponse:  # noqa: N802
        load = loads_pb2.CellLoad(num_running_requests=len(self.requests), num_blocks=self.num_blocks)
        return loads_pb2.GetLoadsResponse(cells=[load])

    async def GetModelInfo(self, request: Any, context: Any) -> loads_pb2.ModelInfo:  # noqa: N802
        return loads_pb2.ModelInfo(features=self.features)

    async def GetRequestStats(self, request: Any, context: Any) -> stats_pb2.GetRequestStatsResponse:  # noqa: N802
        known = [
            stats_pb2.RequestStats(
                id=name, is_aborted=any(end.finish_reason == pb.FINISH_REASON_ABORT for end in self.requests[name].ends)
            )
            for name in request.request_ids
            if name in self.requests
        ]
        return stats_pb2.GetRequestStatsResponse(requests=known)

    async def LoadLora(self, request: Any, context: Any) -> loads_pb2.LoadLoraResponse:  # noqa: N802
        return loads_pb2.LoadLoraResponse(lora=loads_pb2.LoraInfo(name=request.name))

    async def UnloadLora(self, request: Any, context: Any) -> loads_pb2.UnloadLoraResponse:  # noqa: N802
        if request.name not in [lora.name for lora in self.loras]:
            raise NotFoundError("no such adapter", field="name")
        self.loras = [lora for lora in self.loras if lora.name != request.name]
        return loads_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: Any, context: Any) -> loads_pb2.ListLorasResponse:  # noqa: N802
        return loads_pb2.ListLorasResponse(loras=self.loras)

    async def UpdateWeights(  # noqa: N802
        self, request: weights_pb2.UpdateWeightsRequest, context: Any
    ) -> weights_pb2.UpdateWeightsResponse:
        self.weights_calls.append(request)
        if request.path.endswith("other"):
            raise InvalidArgumentError("num_layers differs from that of the served model", field="path")
        version = request.version or "root"
        self.weights.version.CopyFrom(weights_pb2.WeightsVersion(version=version, path=request.path))
        return weights_pb2.UpdateWeightsResponse(version=self.weights.version, num_requests=2)

    async def GetWeightsVersion(  # noqa: N802
        self, request: Any, context: Any
    ) -> weights_pb2.GetWeightsVersionResponse:
        return weights_pb2.GetWeightsVersionResponse(cells=[self.weights])

    async def PauseGeneration(  # noqa: N802
        self, request: weights_pb2.PauseGenerationRequest, context: Any
    ) -> weights_pb2.PauseGenerationResponse:
        self.weights_calls.append(request)
        self.weights.is_paused = True
        return weights_pb2.PauseGenerationResponse(num_requests=2)

    async def ResumeGeneration(  # noqa: N802
        self, request: Any, context: Any
    ) -> weights_pb2.ResumeGenerationResponse:
        self.weights_calls.append(request)
        self.weights.is_paused = False
        return weights_pb2.ResumeGenerationResponse()

    async def Sleep(self, request: weights_pb2.SleepRequest, context: Any) -> weights_pb2.SleepResponse:  # noqa: N802
        self.weights_calls.append(request)
        self.weights.is_sleeping = True
        return weights_pb2.SleepResponse(num_requests=2)

    async def WakeUp(self, request: weights_pb2.WakeUpRequest, context: Any) -> weights_pb2.WakeUpResponse:  # noqa: N802
        self.weights_calls.append(request)
        self.weights.is_sleeping = False
        return weights_pb2.WakeUpResponse()

    async def GetServerInfo(self, request: Any, context: Any) -> loads_pb2.ServerInfo:  # noqa: N802
        return loads_pb2.ServerInfo(scheduler_epoch=7)

    async def GetIterationStats(self, request: stats_pb2.GetIterationStatsRequest, context: Any) -> Any:  # noqa: N802
        for number in range(3 if request.stream else 1):
            yield stats_pb2.IterationStats(iter=number)
        if self.keeps_watchers:
            await asyncio.Event().wait()

    async def SubscribeKvEvents(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield stats_pb2.KvEventBatch(events=self.kv_events)
        await asyncio.Event().wait()

    async def OpenTokenFeed(self, request: Any, context: Any) -> frames_pb2.FramesOffer:  # noqa: N802
        return self.frames.offer(lambda connection: Feed(self, connection))

    def obey(self, command: scheduler_pb2.FeedCommand, feed: Feed) -> None:
        """Carry out a detokenizer's command."""
        if command.HasField("attach"):
            feed.attached[command.attach.stream] = command.attach.request_id
            feed.pump.wake()
        elif command.HasField("detach"):
            feed.attached.pop(command.detach.stream, None)
        elif command.HasField("stop"):
            stop = command.stop
            request_id = feed.attached.get(stop.stream)
            if request_id is not None:  # otherwise the stream has ended in the meantime
                self.stops.append((request_id, stop.sequence_index, stop.num_tokens, stop.stop_word))
        self.changed.set()

    def batch(self, feed: Feed) -> scheduler_pb2.FeedBatch:
        batch = scheduler_pb2.FeedBatch()
        for number, request_id in list(feed.attached.items()):
            script = self.requests.get(request_id)
            if script is None:
                error = pb.ErrorInfo(code=5, message=f"no request {request_id}")
                batch.opened.append(scheduler_pb2.FeedOpened(stream=number, request_id=request_id, error=error))
                del feed.attached[number]
                continue
            if number not in feed.opened:
                feed.opened.add(number)
                batch.opened.append(_opened(number, script))
                if self.kind_changed_at:
                    batch.kind_changes.add(stream=number, changed_at=self.kind_changed_at)
            for index, tokens in script.tokens.items():
                sent = feed.sent.get((number, index), 0)
                if tokens[sent:]:
                    batch.streams.append(number)
                    batch.sequence_indices.append(index)
                    batch.token_offsets.append(sent)
                    batch.num_tokens.append(len(tokens) - sent)
                    batch.token_ids.extend(tokens[sent:])
                    feed.sent[number, index] = len(tokens)
            for end in script.ends[feed.num_ends.get(number, 0) :]:
                batch.sequence_ends.add().CopyFrom(end)
                batch.sequence_ends[-1].stream = number
            feed.num_ends[number] = len(script.ends)
            if script.ended is not None:
                batch.ended.add().CopyFrom(script.ended)
                batch.ended[-1].stream = number
                del feed.attached[number]
        return batch

    def _wake(self) -> None:
        for feed in self.feeds:
            feed.pump.wake()


def _opened(number: int, script: Scripted) -> scheduler_pb2.FeedOpened:
    request = script.request
    with_input = request.output.HasField("exclude_input_from_output") and not request.output.exclude_input_from_output
    return scheduler_pb2.FeedOpened(
        stream=number,
        request_id=request.request_id,
        num_prompt_tokens=script.num_prompt_tokens,
        num_sequences=max(request.sampling.num_return_sequences, 1),
        stopping=request.stopping,
        output=request.output,
        min_tokens=request.sampling.min_tokens,
        prompt_token_ids=request.token_ids.values if with_input else [],
        streaming=request.streaming if request.HasField("streaming") else True,
    )
