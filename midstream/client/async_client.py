"""The asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from midstream.chunk import usage_from_proto
from midstream.client.features import Drafts, Guide, KvRetention
from midstream.client.info import CellLoad, LoraInfo, ModelInfo, ServerInfo
from midstream.client.request import Array, Message, SamplingParams, naming, set_fields, set_input, tensor_of
from midstream.client.result import Embeddings
from midstream.client.retries import Retries, broken_error, is_broken
from midstream.client.stream import AsyncStream
from midstream.config import API_KEY_VARIABLE
from midstream.errors import InvalidArgumentError
from midstream.receipts.evidence import Evidence
from midstream.receipts.jwk import ReceiptKey
from midstream.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES, open_channel
from midstream.rpc.errors import error_from_rpc
from midstream.rpc.target import check_target, is_local
from midstream.security.tls import Tls
from protos import generation_pb2 as pb
from protos import loads_pb2, receipts_pb2, service_pb2, service_pb2_grpc, stats_pb2, status_pb2, weights_pb2

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

DEFAULT_ADDRESS = "127.0.0.1:50051"
_T = TypeVar("_T")
_CALL_TIMEOUT_S = 10.0
_LOAD_TIMEOUT_S = 300.0


class AsyncClient:
    """Talks to the routers of a service; use it as an asynchronous context manager.

    async with AsyncClient(["router-0:50051", "router-1:50051"]) as client:
        async for chunk in client.generate("Once upon a time", sampling=SamplingParams(max_tokens=64)):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        unavailable_timeout_s: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        tls: Tls | None = None,
        server_name: str = "",
        token: str | None = None,
    ) -> None:
        """Create a client without connections. It belongs to the event loop in which it is first used.

        Args:
            addresses: Routers as `host:port` or `dns:///host:port`, used in turn. If a request's router is lost,
                another router continues the request. Other machines are reached through the HTTP proxy that the
                environment names, if any (`https_proxy`, `no_proxy`).
            unavailable_timeout_s: How long a stream or `embed` waits for a router, unless its deadline is earlier.
            max_message_bytes: Maximum size of a message in either direction, in bytes.
            tls: `Tls(ca=FILE)`, with `cert` and `key` if routers require a client certificate; None for plain text.
            server_name: Name in the routers' certificates, if it differs from their address.
            token: API key or other bearer token, if routers require one; None for that in MIDSTREAM_API_KEY, if any. Do
                not send it over a network without TLS.
        """
        if token is None:
            token = os.environ.get(API_KEY_VARIABLE, "")
        addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not addresses:
            raise InvalidArgumentError("needs at least one router", field="addresses")
        for address in addresses:
            check_target(address)
        self._unavailable_timeout_s = unavailable_timeout_s
        self._open_channel = functools.partial(
            open_channel, max_message_bytes=max_message_bytes, tls=tls, server_name=server_name, token=token
        )
        self._addresses = addresses
        self._num_routers = len(addresses)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Iterator[Stub] = iter(())
        self._is_closed = False
        with contextlib.suppress(RuntimeError):  # without a running loop, the first call does this
            self._bind(asyncio.get_running_loop())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; streams in progress raise ConflictError."""
        self._is_closed = True
        for channel in self._channels:
            await channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        sampling: SamplingParams | None = None,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        streaming: bool = True,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        detached: bool = False,
        lora: str = "",
        guided: Guide | None = None,
        logits_post_processor: str = "",
        prompt_adapter: str = "",
        prompt_tuning_table: Array | None = None,
        prompt_embeddings: Array | None = None,
        kv_retention: KvRetention | None = None,
        speculative: Drafts | None = None,
    ) -> AsyncStream:
        """Run a request; it is sent when iteration begins.

        Args:
            prompt: Text to continue.
            token_ids: Tokens to continue, instead of text.
            messages: Chat turns for the model's chat template, instead of text or tokens.
            tools: Tool definitions for the chat template.
            sampling: How tokens are chosen.
            model: Name of the served model; empty for whichever is served.
            request_id: Id of the request, with at most 128 characters; generated if empty.
            timeout_s: The request's deadline.
            streaming: If False, there is one chunk per sequence, at its end.
            priority: -100..100; higher runs first.
            client_id: The client to which the request belongs, for fairness.
            cache_salt: Prefixes are shared only with requests that have the same salt.
            detached: Whether the request continues without a listener; reattach with `resume`.
            lora: Name of a loaded LoRA adapter.
            guided: Constraint on the output's format.
            logits_post_processor: Name of a post-processor installed on the workers.
            prompt_adapter: Name of a loaded prompt-tuning adapter.
            prompt_tuning_table: Virtual tokens [count, hidden size] instead of a named adapter, such as a numpy array
                of float32 or float16. Token id vocabulary size + i stands for row i; a prompt without such ids begins
                with all rows.
            prompt_embeddings: The prompt itself [tokens, hidden size], instead of the first four arguments.
            kv_retention: Which of the request's cached blocks are kept longer than others.
            speculative: Speculative decoding, which affects only the speed.

        Raises:
            InvalidArgumentError: There is not exactly one input, or a value has the wrong type. The router checks
                ranges.
        """
        request = pb.GenerateRequest()
        set_fields(
            request,
            request_id=request_id or uuid.uuid4().hex,
            model=model,
            streaming=streaming,
            priority=priority,
            client_id=client_id,
            cache_salt=cache_salt,
            detached=detached,
        )
        if prompt_embeddings is None:
            set_input(request, prompt, token_ids, messages, tools)
        elif any(item is not None for item in (prompt, token_ids, messages, tools)):
            raise InvalidArgumentError("is the prompt; leave the other inputs unset", field="prompt_embeddings")
        else:
            request.prompt_embeddings.CopyFrom(tensor_of(prompt_embeddings, "prompt_embeddings"))
        if lora:
            with naming("lora"):
                request.lora.name = lora
        if prompt_adapter and prompt_tuning_table is not None:
            raise InvalidArgumentError("cannot be combined with prompt_tuning_table", field="prompt_adapter")
        if prompt_adapter:
            with naming("prompt_adapter"):
                request.prompt_tuning.name = prompt_adapter
        if prompt_tuning_table is not None:
            request.prompt_tuning.table.CopyFrom(tensor_of(prompt_tuning_table, "prompt_tuning_table"))
        with naming("logits_post_processor"):
            request.logits_post_processor_name = logits_post_processor
        if guided is not None:
            request.guided_decoding.CopyFrom(guided.to_proto())
        if kv_retention is not None:
            request.kv_retention.CopyFrom(kv_retention.to_proto())
        if speculative is not None:
            request.speculative.CopyFrom(speculative.to_proto())
        (sampling or SamplingParams()).fill(request)
        return self.stream(request, timeout_s=timeout_s)

    def stream(self, request: pb.GenerateRequest, *, timeout_s: float | None = None) -> AsyncStream:
        """Run a request given as a message, which may set fields that `generate` lacks."""
        request.request_id = request.request_id or uuid.uuid4().hex
        return AsyncStream(
            request.request_id,
            request,
            self._next_stub,
            timeout_s=timeout_s,
            unavailable_timeout_s=self._unavailable_timeout_s,
            has_other_routers=self._num_routers > 1,
        )

    def resume(self, request_id: str, from_token: int = 0, *, timeout_s: float | None = None) -> AsyncStream:
        """Return the rest of a running or recently finished request, starting at a token offset.

        Raises:
            InvalidArgumentError: `from_token` is not a valid offset. The stream raises OutOfRangeError if the output
                ends before it.
        """
        set_fields(service_pb2.ResumeRequest(), from_token=from_token)
        return AsyncStream(
            request_id,
            None,
            self._next_stub,
            timeout_s=timeout_s,
            unavailable_timeout_s=self._unavailable_timeout_s,
            from_token=from_token,
            has_other_routers=self._num_routers > 1,
        )

    async def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        pooling: Literal["last", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"] | None = None,
        truncate_prompt_tokens: int | None = None,
        model: str = "",
        lora: str = "",
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Return the embeddings of texts or token ids; if the router is lost, another one continues the call.

        Args:
            inputs: A text, or several texts and lists of token ids.
            dimensions: Return only this many leading values of each vector; None returns all.
            normalize: Whether to scale vectors to unit length.
            pooling: Whether to use the hidden state at the last token or the mean of all or, for encoders, another of
                these; None for the pooling that the model was trained for.
            truncate_prompt_tokens: Number of tokens to which inputs are truncated; -1 means as many as the model takes,
                and None means that longer inputs are refused.
            model: Name of the served model; empty for whichever is served.
            lora: Name of a loaded LoRA adapter.
            priority: -100..100; higher runs first.
            client_id: The client to which the requests belong, for fairness.
            cache_salt: Prefixes are shared only with requests that have the same salt.
            timeout_s: Deadline of the call.
        """
        request = _embed_request(inputs, lora, pooling)
        set_fields(request, model=model, normalize=normalize, priority=priority, client_id=client_id)
        set_fields(request, cache_salt=cache_salt)
        if dimensions is not None:
            set_fields(request, dimensions=dimensions)
        if truncate_prompt_tokens is not None:
            set_fields(request, truncate_prompt_tokens=truncate_prompt_tokens)
        metadata, retries = (("idempotency-key", uuid.uuid4().hex),), Retries(timeout_s, self._unavailable_timeout_s)
        while True:
            try:
                answer = await self._next_stub().Embed(request, metadata=metadata, timeout=retries.left_s())
            except grpc.aio.AioRpcError as error:
                if not is_broken(error):
                    raise error_from_rpc(error) from None
                await retries.wait(broken_error(error))
            else:
                vectors = tuple(tuple(item.values) for item in answer.embeddings)
                return Embeddings(vectors, usage_from_proto(answer.usage))

    async def abort(self, request_id: str) -> bool:
        """Abort a request; return whether it was running."""
        request = loads_pb2.AbortRequest(request_id=request_id)
        return (await self._ask(lambda stub: stub.Abort(request, timeout=_CALL_TIMEOUT_S))).was_running

    async def receipt(
        self, request_id: str, *, include_request: bool = False, include_outputs: bool = False
    ) -> Evidence:
        """Return the receipt of an ended request, and its canonical request and its output tokens if they are asked for
        and known.

        Raises:
            NotFoundError: There is no receipt, or the request has not ended.
        """
        query = receipts_pb2.GetReceiptRequest(
            request_id=request_id, include_request=include_request, include_outputs=include_outputs
        )
        answer = await self._ask(lambda stub: stub.GetReceipt(query, timeout=_CALL_TIMEOUT_S))
        outputs = [list(output.token_ids) for output in answer.outputs] if answer.outputs else None
        return Evidence(answer.receipt, answer.request, outputs)

    async def receipt_keys(self) -> tuple[ReceiptKey, ...]:
        """Return the public keys of all receipts."""
        query = receipts_pb2.ListReceiptKeysRequest()
        answer = await self._ask(lambda stub: stub.ListReceiptKeys(query, timeout=_CALL_TIMEOUT_S))
        return tuple(map(ReceiptKey.from_proto, answer.keys))

    async def model_info(self, model: str = "") -> ModelInfo:
        """Return information about the served model.

        Raises:
            NotFoundError: Another model is served.
        """
        request = loads_pb2.GetModelInfoRequest(model=model)
        return ModelInfo.from_proto(await self._ask(lambda stub: stub.GetModelInfo(request, timeout=_CALL_TIMEOUT_S)))

    async def server_info(self) -> ServerInfo:
        """Return information about the running system."""
        request = loads_pb2.GetServerInfoRequest()
        return ServerInfo.from_proto(await self._ask(lambda stub: stub.GetServerInfo(request, timeout=_CALL_TIMEOUT_S)))

    async def loads(self) -> list[CellLoad]:
        """Return the load of each cell."""
        request = loads_pb2.GetLoadsRequest()
        response = await self._ask(lambda stub: stub.GetLoads(request, timeout=_CALL_TIMEOUT_S))
        return [CellLoad.from_proto(load) for load in response.cells]

    async def iteration_stats(
        self, *, follow: bool = False, min_interval_ms: int = 0, on_open: Callable[[], None] = lambda: None
    ) -> AsyncIterator[dict[str, object]]:
        """Yield the statistics of the latest scheduler iteration or, with `follow`, of all iterations from now on, with
        TensorRT-LLM's names.

        `on_open` is called when the stream is open, so that no later iteration will be missed.
        """
        request = stats_pb2.GetIterationStatsRequest(stream=follow, min_interval_ms=min_interval_ms)
        call = self._next_stub().GetIterationStats(request)
        try:
            await call.initial_metadata()
            on_open()
            async for stats in call:
                yield MessageToDict(stats, always_print_fields_with_no_presence=True)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()  # if the caller has stopped iterating

    async def kv_events(
        self, *, start_sequence_number: int = 0, on_open: Callable[[], None] = lambda: None
    ) -> AsyncIterator[stats_pb2.KvEvent]:
        """Yield the events of the KV caches from a number on, or from now on if it is 0. Requires an administrator's
        key, if the service has keys.

        `on_open` is called when the stream is open, so that no later event will be missed.
        """
        request = stats_pb2.SubscribeKvEventsRequest(start_sequence_number=start_sequence_number)
        call = self._next_stub().SubscribeKvEvents(request)
        try:
            await call.initial_metadata()
            on_open()
            async for batch in call:
                for event in batch.events:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()  # if the caller has stopped iterating

    async def request_stats(self, request_ids: Sequence[str]) -> list[stats_pb2.RequestStats]:
        """Return the states of running and recently finished requests; unknown requests are omitted."""
        request = stats_pb2.GetRequestStatsRequest(request_ids=request_ids)
        answer = await self._ask(lambda stub: stub.GetRequestStats(request, timeout=_CALL_TIMEOUT_S))
        return list(answer.requests)

    async def status(self, *, follow: bool = False) -> AsyncIterator[status_pb2.SystemStatus]:
        """Yield the system's status once, or every second with `follow`, first with samples of the last few minutes."""
        call = self._next_stub().GetStatus(status_pb2.GetStatusRequest(stream=follow))
        try:
            async for status in call:
                yield status
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()  # if the caller has stopped iterating

    async def load_lora(self, name: str, path: str) -> LoraInfo:
        """Load a LoRA or prompt-tuning adapter from a PEFT folder that every worker can read.

        Raises:
            InvalidArgumentError: The adapter does not fit the model; the message names the file and the tensor or
                setting.
            AlreadyExistsError: An adapter from another folder has this name.
        """
        request = loads_pb2.LoadLoraRequest(name=name, path=path)
        response = await self._ask(lambda stub: stub.LoadLora(request, timeout=_LOAD_TIMEOUT_S))
        return LoraInfo.from_proto(response.lora)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter; new requests can no longer use it.

        Raises:
            NotFoundError: The adapter is not loaded.
        """
        request = loads_pb2.UnloadLoraRequest(name=name)
        await self._ask(lambda stub: stub.UnloadLora(request, timeout=_CALL_TIMEOUT_S))

    async def loras(self) -> list[LoraInfo]:
        """Return the adapters that requests can name."""
        request = loads_pb2.ListLorasRequest()
        response = await self._ask(lambda stub: stub.ListLoras(request, timeout=_CALL_TIMEOUT_S))
        return [LoraInfo.from_proto(lora) for lora in response.loras]

    async def update_weights(
        self, path: str, version: str = "", *, on_update: Literal["recompute", "finish", "abort"] = "recompute"
    ) -> weights_pb2.WeightsVersion:
        """Replace the weights of all workers by those of a folder.

        Args:
            path: Absolute path of the folder on every worker.
            version: Name of the version; by default the root of the weights.
            on_update: Whether running requests continue under the new weights, finish first, or end.

        Returns:
            The new version.

        Raises:
            ConflictError: Some cells have changed their weights, and others have not.
            UnavailableError: A worker was lost, or the outcome is unknown; see `weights`.
            MidstreamError: All workers keep their weights.
        """
        mode = weights_pb2.OnUpdate.Value(f"ON_UPDATE_{on_update.upper()}")
        request = weights_pb2.UpdateWeightsRequest(path=path, version=version, on_update=mode)
        return (await self._ask(lambda stub: stub.UpdateWeights(request))).version

    async def weights(self) -> list[weights_pb2.CellWeights]:
        """Return the version of the weights of each cell, and how many workers have it."""
        request = weights_pb2.GetWeightsVersionRequest()
        return [*(await self._ask(lambda stub: stub.GetWeightsVersion(request, timeout=_CALL_TIMEOUT_S))).cells]

    async def pause_generation(self, mode: Literal["keep", "recompute", "finish", "abort"] = "keep") -> None:
        """Pause generation, and return once no step runs; `mode` says what happens to running requests."""
        number = weights_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        request = weights_pb2.PauseGenerationRequest(mode=number)
        await self._ask(lambda stub: stub.PauseGeneration(request))

    async def resume_generation(self) -> None:
        """End a pause."""
        request = weights_pb2.ResumeGenerationRequest()
        await self._ask(lambda stub: stub.ResumeGeneration(request, timeout=_CALL_TIMEOUT_S))

    async def sleep(self, level: Literal[1, 2] = 1, mode: Literal["keep", "finish", "abort"] = "keep") -> None:
        """Let all workers give their memory back until `wake_up`, and return once they have.

        Args:
            level: With 2, the files of the weights are dropped from the hosts' page cache as well.
            mode: What happens to running requests; with `keep`, they continue afterwards.

        Raises:
            UnsupportedError: A worker cannot sleep.
        """
        number = weights_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
        await self._ask(lambda stub: stub.Sleep(weights_pb2.SleepRequest(level=level, mode=number)))

    async def wake_up(self, *tags: Literal["weights", "kv_cache"]) -> None:
        """Wake all workers, and return once they are ready. With `weights` alone no step runs, but weights can be
        updated.
        """
        await self._ask(lambda stub: stub.WakeUp(weights_pb2.WakeUpRequest(tags=tags)))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create the channels, which belong to the running loop."""
        self._channels = [self._open_channel(address, uses_proxy=not is_local(address)) for address in self._addresses]
        stubs: list[Stub] = [service_pb2_grpc.MidstreamStub(channel) for channel in self._channels]  # type: ignore[misc]
        random.shuffle(stubs)
        self._stubs, self._loop = itertools.cycle(stubs), loop

    def _next_stub(self) -> Stub:
        if self._is_closed:
            raise InvalidArgumentError("is closed; create another one", field="client")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._bind(loop)
        elif self._loop is not loop:
            raise InvalidArgumentError("belongs to another event loop; create one for each loop", field="client")
        return next(self._stubs)

    async def _ask(self, call: Callable[[Stub], Awaitable[_T]]) -> _T:
        """Return the response of the first available router."""
        for left in reversed(range(self._num_routers)):
            try:
                return await call(self._next_stub())
            except grpc.aio.AioRpcError as error:
                if not is_broken(error):
                    raise error_from_rpc(error) from None
                if not left:
                    raise broken_error(error) from None
        raise AssertionError("unreachable")


_POOLINGS = {name.removeprefix("POOLING_").lower(): value for name, value in service_pb2.Pooling.items() if value}


def _embed_request(
    inputs: str | Sequence[str | Sequence[int]], lora: str, pooling: str | None
) -> service_pb2.EmbedRequest:
    request = service_pb2.EmbedRequest()
    if lora:
        request.lora.name = lora
    if pooling is not None:
        if pooling not in _POOLINGS:
            raise InvalidArgumentError(f"must be one of {', '.join(_POOLINGS)}", field="pooling")
        request.pooling = _POOLINGS[pooling]
    with naming("inputs"):
        for item in [inputs] if isinstance(inputs, str) else inputs:
            if isinstance(item, str):
                request.inputs.add(prompt=item)
            else:
                request.inputs.add(token_ids=pb.TokenIds(values=item))
    return request
