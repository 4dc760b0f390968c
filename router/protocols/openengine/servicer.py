"""`openengine.v1.Inference` and `openengine.v1.Control`, implemented with the native services and the cells.

If a request is rejected, the call fails with the error's status. If it fails after it was accepted, the stream ends
with an EngineError and the call with OK, as the protocol requires.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from typing import Any

import grpc
from grpc.aio import ServicerContext

from midstream import __version__
from midstream.chunk import FinishReason
from midstream.errors import MidstreamError, UnsupportedError
from protos import generation_pb2 as pb
from protos import loads_pb2, openengine_pb2_grpc, stats_pb2
from protos import openengine_pb2 as oe
from router.pipeline.generation import FrontDoor
from router.pipeline.idempotency import key_of, make_repeatable, request_id_of
from router.pipeline.keep_alives import KeptStream
from router.pipeline.request_checks import MAX_LOG_PROBS, check_model
from router.protocols import kind_change, validation
from router.protocols.openengine.request import native_request
from router.protocols.openengine.response import Events
from router.servicer import RouterServicer

_PROBE_TIMEOUT_S = 5.0
_SCHEMA_RELEASE = "v1"
_HASH_BYTES = 8


class InferenceServicer(openengine_pb2_grpc.InferenceServicer):
    """Implements the Inference service, which generates text."""

    def __init__(self, front: FrontDoor, tokens: Mapping[str, int]) -> None:
        """`tokens` are the markers of the model's format that are a single token, with the token's id."""
        self._front = front
        self._tokens = tokens

    async def Generate(  # type: ignore[override]  # it writes to the context
        self, request: oe.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> None:
        """Run a request and stream its events."""
        native = native_request(request, context.invocation_metadata() or (), self._tokens)
        key = key_of(context.invocation_metadata() or ())
        if key:
            make_repeatable(native, request_id_of(key, "openengine"))
        request.request_id = native.request_id = native.request_id or uuid.uuid4().hex

        def beat() -> Coroutine[object, object, None]:
            empty = oe.GenerateResponse(request_id=request.request_id, token=oe.TokenOutput(output_index=0))
            return context.write(empty)

        with self._front.keep_alives.keep(beat) as stream:
            await self._relay(request, native, key, stream, context)

    async def _relay(
        self,
        request: oe.GenerateRequest,
        native: pb.GenerateRequest,
        key: str,
        stream: KeptStream,
        context: ServicerContext[Any, Any],
    ) -> None:
        opened = await self._front.start(native, context.time_remaining(), key)
        # By now the input has been converted to token ids.
        request.token_ids.ids[:] = native.token_ids.values
        events = Events(request, self._front.runner.model.end_ids, self._spell)
        # By name and sequence.
        trailing: dict[tuple[str, int], str] = {}
        try:
            async with opened as output:
                while not output.is_final:
                    for chunk in await output.take():
                        known = len(trailing)
                        if chunk.kind_changed_at is not None:
                            trailing[kind_change.METADATA, 0] = str(chunk.kind_changed_at)
                        found = validation.validation_of(chunk)
                        if found:
                            fields = {"output_index": chunk.sequence_index, **found[validation.NAME]}
                            trailing[validation.METADATA, chunk.sequence_index] = json.dumps(fields)
                        if len(trailing) > known:
                            pairs = tuple((name, value) for (name, _), value in trailing.items())
                            context.set_trailing_metadata(pairs)
                        if chunk.finish_reason not in (FinishReason.ERROR, FinishReason.DEADLINE):
                            for event in events.of(chunk):
                                await stream.write(context.write, event)
            output.raise_failure()
        except MidstreamError as error:
            await stream.write(context.write, events.failure(error))

    def _spell(self, token_id: int) -> str:
        return self._front.runner.prompts.tokenizer.decode([token_id], skip_special_tokens=False)


class ControlServicer(openengine_pb2_grpc.ControlServicer):
    """Implements the Control service: information about engine and model, and control of adapters and requests."""

    def __init__(self, front: FrontDoor, native: RouterServicer, served: Sequence[str]) -> None:
        """`native` is the native service, which covers all cells; `served` are the names of the router's models."""
        self._served = served
        self._front = front
        self._model = front.runner.model
        self._native = native

    async def GetServerInfo(self, request: oe.GetServerInfoRequest, context: object) -> oe.ServerInfo:
        """Return information about all cells, presented as one engine."""
        info = await self._native.GetServerInfo(loads_pb2.GetServerInfoRequest(), context)
        answer = oe.ServerInfo(
            engine_name="midstream",
            engine_version=__version__,
            engine_role=oe.ENGINE_ROLE_AGGREGATED,
            instance_id=info.router_id,
            supported_models=self._served,
            schema_revision=1,
            minimum_client_revision=1,
            schema_release=_SCHEMA_RELEASE,
        )
        answer.parallelism.data_parallel_size = len(info.worker_groups)
        answer.parallelism.tensor_parallel_size = max((group.world_size for group in info.worker_groups), default=1)
        answer.capacity.kv_block_size = info.tokens_per_block
        answer.capacity.total_kv_blocks = sum(group.num_blocks for group in info.worker_groups)
        return answer

    async def GetModelInfo(self, request: oe.GetModelInfoRequest, context: object) -> oe.ModelInfo:
        """Return information about the served model."""
        model, features = self._model, self._front.runner.cells.any().features or frozenset()
        check_model(request.model, model)
        top_n = [oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N]
        info = oe.ModelInfo(
            model_id=model.name,
            served_model_name=model.name,
            max_context_length=model.max_sequence_length,
            max_output_tokens=model.max_sequence_length,
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora="lora" in features,
            supports_multimodal=False,
        )
        generation = info.generation
        for name, capability in (
            ("prompt_log_probs", generation.prompt_logprobs),
            ("log_probs", generation.output_logprobs),
        ):
            capability.supported = name in features
            if capability.supported:
                capability.candidate_selection_modes.extend(top_n)
                capability.max_top_n = MAX_LOG_PROBS
        guided = generation.guided_decoding
        guided.supported = "guided_decoding" in features
        if guided.supported:
            guided.modes.extend(
                (
                    oe.GUIDED_DECODING_MODE_JSON_SCHEMA,
                    oe.GUIDED_DECODING_MODE_REGEX,
                    oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
                    oe.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
                    oe.GUIDED_DECODING_MODE_CHOICE,
                    oe.GUIDED_DECODING_MODE_JSON_OBJECT,
                )
            )
        generation.supports_priority = generation.supports_stop_in_output = generation.supports_cache_salt = True
        generation.supports_prefix_cache_bypass = False
        return info

    async def GetLoad(self, request: oe.GetLoadRequest, context: object) -> oe.LoadInfo:
        """Return the total load of all cells."""
        loads = (await self._native.GetLoads(loads_pb2.GetLoadsRequest(), context)).cells
        return oe.LoadInfo(
            timestamp_unix_nanos=time.time_ns(),
            running_requests=sum(load.num_running_requests for load in loads),
            queued_requests=sum(load.num_queued_requests for load in loads),
            used_kv_blocks=sum(load.num_blocks - load.num_free_blocks for load in loads),
            total_kv_blocks=sum(load.num_blocks for load in loads),
            waiting_tokens=sum(load.num_queued_tokens for load in loads),
        )

    async def Health(self, request: oe.HealthRequest, context: object) -> oe.HealthResponse:
        """Return the health of the router and its schedulers; on request, test whether a token can be generated."""
        checks = [oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY), await self._scheduler_check(context)]
        if self._front.leaving.is_set():
            checks[0].state = oe.HEALTH_STATE_DRAINING
        if request.include_inference_probe:
            checks.append(await self._probe(request.model))
        return oe.HealthResponse(state=max(check.state for check in checks), checks=checks)

    async def Abort(self, request: oe.AbortRequest, context: object) -> oe.AbortResponse:
        if request.WhichOneof("target") != "request_id":
            raise UnsupportedError("abort requests one at a time, by request id", field="target")
        was_running = await self._front.abort(request.request_id)
        return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED if was_running else oe.ABORT_STATUS_ALREADY_FINISHED)

    async def LoadLora(self, request: oe.LoadLoraRequest, context: object) -> oe.LoadLoraResponse:
        """Load an adapter in every cell."""
        adapter = request.adapter
        known = (await self._native.ListLoras(loads_pb2.ListLorasRequest(), context)).loras
        load = loads_pb2.LoadLoraRequest(name=adapter.lora_name, path=adapter.source_path)
        await self._native.LoadLora(load, context)
        is_known = any(item.name == adapter.lora_name for item in known)
        return oe.LoadLoraResponse(adapter=adapter, already_loaded=is_known)

    async def UnloadLora(self, request: oe.UnloadLoraRequest, context: object) -> oe.UnloadLoraResponse:
        """Unload an adapter in every cell."""
        await self._native.UnloadLora(loads_pb2.UnloadLoraRequest(name=request.lora_name), context)
        return oe.UnloadLoraResponse(adapter=oe.LoraAdapter(lora_name=request.lora_name))

    async def ListLoras(self, request: oe.ListLorasRequest, context: object) -> oe.ListLorasResponse:
        """Return the loaded adapters."""
        loras = (await self._native.ListLoras(loads_pb2.ListLorasRequest(), context)).loras
        adapters = [oe.LoraAdapter(lora_name=item.name, source_path=item.path) for item in loras]
        return oe.ListLorasResponse(adapters=adapters)

    async def GetKvEventSources(
        self, request: oe.GetKvEventSourcesRequest, context: object
    ) -> oe.GetKvEventSourcesResponse:
        """Return the only event source: SubscribeKvEvents of this service, at the address of this call."""
        source = oe.KvEventSource(transport="grpc", encoding="protobuf", schema_version=1)
        return oe.GetKvEventSourcesResponse(sources=[source])

    async def SubscribeKvEvents(
        self, request: oe.SubscribeKvEventsRequest, context: object
    ) -> AsyncIterator[oe.SubscribeKvEventsResponse]:
        """Stream the KV-cache events of the only cell. Worker groups are data-parallel ranks, numbered in the order in
        which the stream names them; an event for all groups is sent for each of them.
        """
        cells = self._front.runner.cells
        if len(cells.cells) > 1:
            raise UnsupportedError("each cell numbers its own KV events; subscribe at the schedulers")
        ranks: dict[str, int] = {}
        native = stats_pb2.SubscribeKvEventsRequest(start_sequence_number=request.start_sequence_number)
        async for batch in cells.any().watch_stub.SubscribeKvEvents(native):
            for event in batch.events:
                if event.group_id:
                    named: Collection[int] = [ranks.setdefault(event.group_id, len(ranks))]
                else:
                    named = ranks.values() or request.data_parallel_ranks or [0]
                for rank in named:
                    if not request.data_parallel_ranks or rank in request.data_parallel_ranks:
                        yield oe.SubscribeKvEventsResponse(batch=_kv_batch(event, rank))

    async def _scheduler_check(self, context: object) -> oe.HealthCheck:
        try:
            await self._native.GetLoads(loads_pb2.GetLoadsRequest(), context)
        except (MidstreamError, grpc.RpcError) as error:
            return oe.HealthCheck(name="scheduler", state=oe.HEALTH_STATE_NOT_READY, message=str(error))
        return oe.HealthCheck(name="scheduler", state=oe.HEALTH_STATE_READY)

    async def _probe(self, model: str) -> oe.HealthCheck:
        native = pb.GenerateRequest(model=model, max_tokens=1, token_ids=pb.TokenIds(values=[0]))
        try:
            async with await self._front.start(native, _PROBE_TIMEOUT_S) as output:
                while not output.is_final:
                    await output.take()
            output.raise_failure()
        except MidstreamError as error:
            return oe.HealthCheck(name="inference_probe", state=oe.HEALTH_STATE_NOT_READY, message=str(error))
        return oe.HealthCheck(name="inference_probe", state=oe.HEALTH_STATE_READY)


def _kv_batch(event: stats_pb2.KvEvent, rank: int) -> oe.KvEventBatch:
    batch = oe.KvEventBatch(sequence_number=event.sequence_number, data_parallel_rank=rank)
    kind, item = event.WhichOneof("event"), oe.KvEvent()
    if kind == "stored":
        stored = item.block_stored
        stored.block_hashes.extend(_hash(value) for value in event.stored.block_hashes)
        if event.stored.parent_hash:
            stored.parent_block_hash.CopyFrom(_hash(event.stored.parent_hash))
        stored.token_ids.extend(event.stored.token_ids)
        stored.block_size, stored.lora_name = event.stored.tokens_per_block, event.stored.lora_name
    elif kind == "removed":
        item.block_removed.block_hashes.extend(_hash(value) for value in event.removed.block_hashes)
    elif kind == "updated":
        if not event.updated.cache_level:
            return batch  # a priority, for which there is no event
        item.block_removed.block_hashes.extend(_hash(value) for value in event.updated.block_hashes)
        item.block_removed.medium = oe.STORAGE_MEDIUM_GPU
    else:
        item.all_blocks_cleared.SetInParent()
    batch.events.append(item)
    return batch


def _hash(value: int) -> oe.KvBlockHash:
    return oe.KvBlockHash(value=value.to_bytes(_HASH_BYTES, "little"), encoding="bytes")
