"""The life of a gRPC service: start, say whether it makes progress, map errors to statuses, drain, stop.

server = Server("scheduler", config.host, config.port, progress)
add_SchedulerServicer_to_server(servicer, server.grpc)
await server.start()
await server.run_until_signal(drain=servicer.drain, drain_timeout_s=config.drain_timeout_s)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from midstream.errors import MidstreamError, OverloadedError, from_status
from midstream.health import HEALTH_SERVICE, Progress, add_health, bind
from midstream.secure_channel import SecureChannel
from midstream.transport_security import Tls

logger = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MAX_METADATA_BYTES = 16 << 10
RETRY_AFTER_KEY = "retry-after-ms"
FIELD_KEY = "midstream-field"
_MAX_FIELD_CHARACTERS = 256
# A status's text is metadata too, percent-encoded; clients take 8 KiB of metadata by default.
_MAX_DETAIL_CHARACTERS = 800

# Both sides must agree, or the server answers GOAWAY too_many_pings; it allows pings twice as often as clients send.
_KEEPALIVE_MS = 10_000
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_EVENT_LOOP_BEAT_S = 0.5
_Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[str, _Context], None]
_COLLECT_INTERVAL_S = 0.1
_next_collection = 0.0


class Server:
    """A grpc.aio server with health by progress, reflection, keepalive and error mapping.

    Attributes:
        grpc: The server that servicers are added to, before `start`.
        port: The bound port.
        draining: Set once the process should finish what it has and take nothing new.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        progress: Progress,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_concurrent_streams: int = 4096,
        tls: Tls | None = None,
        admit: Admit | None = None,
        more_services: Sequence[str] = (),
    ) -> None:
        """Binds the port.

        Args:
            name: Full protobuf name of the service (`midstream.v1.Scheduler`), for health and reflection.
            host: Address to listen on.
            port: 0 takes a free one.
            progress: What health is computed from.
            max_message_bytes: Largest message, each way.
            max_concurrent_streams: Calls at once on one connection.
            tls: Certificates; None: plain text.
            admit: Called before each method with its full name; raises where the caller may not.
            more_services: Full protobuf names of other services that reflection shows.

        Raises:
            OSError: The port is taken.
        """
        self.grpc = grpc.aio.server(
            interceptors=[_ErrorMapper(admit)],
            options=[
                *_KEEPALIVE,
                ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", max_concurrent_streams),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                # Else a second process would share the port in silence.
                ("grpc.so_reuseport", 0),
            ],
        )
        self.draining = asyncio.Event()
        self._progress = progress
        self._event_loop = progress.loop("event loop")
        self._beat: asyncio.Task[None] | None = None
        add_health(self.grpc, progress, name)
        services = (name, *more_services, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self.grpc)
        self.port = bind(self.grpc, host, port, tls.server_credentials() if tls is not None else None)

    async def start(self) -> None:
        """Begins to answer calls."""
        await self.grpc.start()
        self._beat = asyncio.create_task(self._keep_beating(), name="event-loop-beat")

    async def run_until_signal(
        self, *, drain: Callable[[], Awaitable[None]] | None = None, drain_timeout_s: float = 30.0
    ) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal ends the draining."""
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, None)
        await signals.get()
        logger.info("draining")
        stopping = asyncio.create_task(self.stop(drain=drain, drain_timeout_s=drain_timeout_s))
        impatient = asyncio.create_task(signals.get())
        await asyncio.wait((stopping, impatient), return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not stopping.done():
            await self.grpc.stop(0)
        await stopping
        logger.info("stopped")

    async def stop(self, *, drain: Callable[[], Awaitable[None]] | None = None, drain_timeout_s: float = 0.0) -> None:
        """Turns NOT_SERVING, refuses new calls, and gives those in progress up to `drain_timeout_s`.

        Args:
            drain: Returns when the service has nothing left to do; streams still open then are cut. Without it, calls
                in progress are waited for.
            drain_timeout_s: Limit of both.
        """
        self._progress.set_reason("draining", stands=True)
        self.draining.set()
        stopping = {asyncio.create_task(self.grpc.stop(drain_timeout_s))}
        if drain is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drain(), drain_timeout_s)
            stopping.add(asyncio.create_task(self.grpc.stop(0)))
        _, stopping = await asyncio.wait(stopping, timeout=_COLLECT_INTERVAL_S)
        while stopping:
            # The server waits until the last call object is gone, and one that an exception's traceback holds in a
            # reference cycle goes only when it is collected.
            _collect_now_and_then()
            _, stopping = await asyncio.wait(stopping, timeout=_COLLECT_INTERVAL_S)
        if self._beat is not None:
            self._beat.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._event_loop.touch()
            await asyncio.sleep(_EVENT_LOOP_BEAT_S)


def _collect_now_and_then() -> None:
    """Collects garbage for all servers that stop, half of the time at most: a large heap takes long."""
    global _next_collection
    began = time.monotonic()
    if began >= _next_collection:
        gc.collect()
        ended = time.monotonic()
        _next_collection = ended + max(_COLLECT_INTERVAL_S, ended - began)


def open_channel(
    target: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: Tls | None = None,
    server_name: str = "",
    token: str = "",
) -> grpc.aio.Channel:
    """A channel with the keepalive that `Server` expects, which reconnects within a second.

    Args:
        target: `host:port`, or `dns:///host:port` for all addresses of a name in turn.
        max_message_bytes: Largest message, each way.
        tls: Certificates; None: plain text.
        server_name: Name that the server's certificate must carry, where that is not the target's.
        token: Bearer token that goes with each call.
    """
    options = channel_options(max_message_bytes)
    if tls is None:
        if not token:
            return grpc.aio.insecure_channel(target, options=options)
        return SecureChannel(lambda: grpc.aio.insecure_channel(target, options=options), lambda: 0, token)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return SecureChannel(
        lambda: grpc.aio.secure_channel(target, tls.channel_credentials(), options=options), tls.refresh, token
    )


def channel_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Options of every client channel, synchronous ones too."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A part that was killed is back within a second or two; waiting longer than it takes would show to clients.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        # A channel's back-off is its own, also where several point at one address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.lb_policy_name", "round_robin"),
    ]


def error_from_rpc(error: grpc.RpcError) -> MidstreamError:
    """The error that a failed call stands for, with its field and retry hint."""
    code: grpc.StatusCode = error.code()
    metadata: Any = error.trailing_metadata() or ()  # pairs, in the synchronous and the asynchronous API alike
    trailing = {str(key): str(value) for key, value in metadata}
    field = trailing.get(FIELD_KEY, "")
    message = (error.details() or code.name.lower()).removeprefix(f"{field}: ")
    result = from_status(code.value[0], message, field)
    if isinstance(result, OverloadedError):
        with contextlib.suppress(KeyError, ValueError):
            result.retry_after_ms = int(trailing[RETRY_AFTER_KEY])
    return result


def trailing_metadata(error: MidstreamError) -> tuple[tuple[str, str], ...]:
    """What a call that fails with `error` sends after its status."""
    metadata: list[tuple[str, str]] = []
    if error.field:
        metadata.append((FIELD_KEY, _printable(error.field)))
    if isinstance(error, OverloadedError):
        metadata.append((RETRY_AFTER_KEY, str(error.retry_after_ms)))
    return tuple(metadata)


class _ErrorMapper(grpc.aio.ServerInterceptor):
    """The one place where exceptions become statuses."""

    def __init__(self, admit: Admit | None) -> None:
        self._admit = admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        admit = functools.partial(self._admit, handler_call_details.method) if self._admit is not None else None
        wrap = _map_generator if inspect.isasyncgenfunction(behaviour) else _map_coroutine
        wrapped = wrap(behaviour, admit)
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        return make(  # type: ignore[no-any-return]
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _map_coroutine(behaviour: Callable[..., Any], admit: Callable[[_Context], None] | None) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if admit is not None:
                admit(context)
            response = behaviour(request, context)
            return await response if inspect.isawaitable(response) else response
        except Exception as error:  # noqa: BLE001 (mapped, and logged where unexpected)
            await _abort(error, context)

    return call


def _map_generator(
    behaviour: Callable[..., AsyncIterator[Any]], admit: Callable[[_Context], None] | None
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            if admit is not None:
                admit(context)
            # Closed here and now when the caller leaves, so that its `finally` does not wait for the garbage collector.
            async with contextlib.aclosing(behaviour(request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 (mapped, and logged where unexpected)
            await _abort(error, context)

    return call


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _printable(field: str) -> str:
    """What metadata can carry: some fields have names that a client chose."""
    return "".join(character if " " <= character <= "~" else "?" for character in field[:_MAX_FIELD_CHARACTERS])


async def _abort(error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError):
        raise error
    if isinstance(error, grpc.RpcError):
        error = error_from_rpc(error)
    if isinstance(error, MidstreamError):
        await context.abort(_STATUS_CODES[error.code], str(error)[:_MAX_DETAIL_CHARACTERS], trailing_metadata(error))
    if context.done():
        # The caller has left: nobody to tell, and what failed is usually a write to it.
        logger.debug("error after the end of a call", exc_info=error)
        return
    # What went wrong inside is in the log under the request's id, and nobody else's business.
    logger.error("unexpected error in a call", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; the log has its details")
