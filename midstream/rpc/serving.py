"""gRPC server lifecycle (start, report progress, drain, stop), and client channels.

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
import importlib.util
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from midstream.errors import ConfigError, ExecutionError, MidstreamError
from midstream.rpc.errors import Admit, ErrorMapper, Receive, TakeTurn
from midstream.rpc.health import HEALTH_SERVICE, Progress, add_health, bind, check_port
from midstream.rpc.open_files import raise_open_files_limit
from midstream.security.secure_channel import SecureChannel
from midstream.security.tls import Tls

logger = logging.getLogger(__name__)

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20
MAX_METADATA_BYTES = 16 << 10

# Both sides must agree on this, otherwise the server sends GOAWAY too_many_pings; it allows pings twice as often as
# clients send them.
_KEEPALIVE_MS = 10_000
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Time limit for the reply to a ping; by default it is a minute, regardless of the keepalive timeout.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_EVENT_LOOP_BEAT_S = 0.5
_HANDSHAKE_MS = 10_000
_Context = grpc.aio.ServicerContext[Any, Any]
_AddPort = Callable[..., int]
_COLLECT_INTERVAL_S = 0.1
_next_collection = 0.0


class Server:
    """A gRPC server with health based on progress, reflection, keepalive and error mapping.

    Attributes:
        grpc: The gRPC server, to which servicers are added before `start`.
        limits_addresses: Whether the server itself limits the connections from one address.
        leaving: Set once the process should get no more work. It still accepts what arrives until `draining` is set.
        draining: Set once the process should finish its work and accept no new work.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        progress: Progress,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_request_bytes: int = 0,
        max_concurrent_streams: int = 4096,
        tls: Tls | None = None,
        admit: Admit | None = None,
        receive: Receive | None = None,
        turn_of: Callable[[str], TakeTurn | None] = lambda method: None,
        more_services: Sequence[str] = (),
        is_standby: bool = False,
        grpc_server: str = "auto",
        shared_port: int = 0,
    ) -> None:
        """Bind the port, or, if `is_standby`, check that it is free.

        Args:
            name: Full protobuf name of the service (`midstream.v1.Scheduler`), for health and reflection.
            progress: Source of the health status.
            max_request_bytes: Maximum size of a received message, in bytes; 0 means max_message_bytes.
            admit: Called before each method with its full name.
            receive: Reads the messages of unary requests; if None, gRPC reads them.
            turn_of: Returns how calls of a method wait for their turn once their message is read; None if they do not.
            more_services: Full protobuf names of other services that reflection shows.
            is_standby: Whether `bind` will be called later. Connections to a bound port would wait to be accepted.
            grpc_server: Implementation of the server: `own` (midstream/rpc/http2), `grpcio`, or `auto`, which is `own`
                if the package hpack is installed, otherwise `grpcio`.
            shared_port: Another port, on which other processes may listen as well; 0 means none.

        Raises:
            OSError: The port is in use.
            ConfigError: `own` was requested, but a package that it requires is not installed; or `shared_port` is set,
                but another server is used.
        """
        self.limits_addresses = _is_own(grpc_server)
        make = _own_server if self.limits_addresses else _grpcio_server
        self.grpc, self._add_port, self._leave_shared_ports = make(
            ErrorMapper(admit, receive, turn_of),
            max_send_bytes=max_message_bytes,
            max_receive_bytes=max_request_bytes or max_message_bytes,
            max_concurrent_streams=max_concurrent_streams,
            probes_bandwidth=receive is None,
        )
        self.leaving, self.draining = asyncio.Event(), asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: MidstreamError | None = None
        self._progress = progress
        self._event_loop = progress.loop("event loop")
        self._beat: asyncio.Task[None] | None = None
        add_health(self.grpc, progress, name)
        services = (name, *more_services, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self.grpc)
        self.port = port
        self._host, self._tls = host, tls
        if shared_port:
            if not self.limits_addresses:
                raise ConfigError("requires the service's own gRPC server; set grpc_server to own", field="shared_port")
            self._add_port(host, shared_port, tls, is_shared=True)
        if is_standby:
            check_port(host, port)
        else:
            self.bind()

    def bind(self) -> None:
        """Bind the port. Raises OSError if the port is in use."""
        self.port = self._add_port(self._host, self.port, self._tls)

    async def start(self) -> None:
        await self.grpc.start()
        self._beat = asyncio.create_task(self._keep_beating(), name="event-loop-beat")

    async def run_until_signal(
        self,
        *,
        drain: Callable[[], Awaitable[None]] | None = None,
        drain_timeout_s: float = 30.0,
        drain_delay_s: float = 0.0,
        stop_other_port: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the draining early.

        Args:
            drain: As for `stop`.
            drain_timeout_s: Time limit for everything.
            drain_delay_s: How long the process serves after SIGTERM, while its health already says that it stops, so
                that proxies and load balancers notice. After SIGINT it does not.
            stop_other_port: Stops the process's other port at the same time as this one; the argument is the number of
                seconds left. After a second signal, it is called with 0, even if it is already running.

        Raises:
            MidstreamError: The error passed to `fail`.
        """
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        signalled, failed = asyncio.create_task(signals.get()), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait((signalled, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            signalled.cancel()
        if self._failure is not None:
            await self.stop()
            raise self._failure
        logger.info("draining")

        self._leave()
        impatient = asyncio.create_task(signals.get())
        delay_s = min(drain_delay_s, drain_timeout_s) if signalled.result() == signal.SIGTERM else 0.0
        if delay_s > 0:
            await asyncio.wait((impatient,), timeout=delay_s)

        async def stop_all(left_s: float) -> None:
            other = () if stop_other_port is None else (stop_other_port(left_s),)
            await asyncio.gather(self.stop(drain=drain, drain_timeout_s=left_s), *other)

        stopping = asyncio.create_task(stop_all(drain_timeout_s - delay_s))
        await asyncio.wait((stopping, impatient), return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not stopping.done():
            await self.grpc.stop(0)
            if stop_other_port is not None:
                await stop_other_port(0.0)
        await stopping
        logger.info("stopped")

    def _leave(self) -> None:
        """Set NOT_SERVING and leave shared ports, so that the process gets no more work."""
        self._progress.set_reason("draining", stands=True)
        self.leaving.set()
        self._leave_shared_ports()

    def fail(self, error: MidstreamError) -> None:
        """Stop the process with an error, so that its supervisor restarts it."""
        if self._failure is None:
            self._failure = error
            self._progress.set_reason(str(error), stands=True)
            self._failed.set()

    def depend_on(self, task: asyncio.Task[None]) -> None:
        """Stop the process with an error if `task` ends before the process drains."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and not self.leaving.is_set():
                error = task.exception()
                logger.error("%s ended", task.get_name(), exc_info=error)
                self.fail(ExecutionError(f"{task.get_name()} ended: {error!r}"))

        task.add_done_callback(ended)

    async def stop(self, *, drain: Callable[[], Awaitable[None]] | None = None, drain_timeout_s: float = 0.0) -> None:
        """Set NOT_SERVING, reject new calls, and give those in progress up to `drain_timeout_s`.

        Args:
            drain: Awaited until the service has no work left; calls still open then are cancelled. If None, wait for
                the calls in progress instead.
            drain_timeout_s: Timeout in either case.
        """
        self._leave()
        self.draining.set()
        stopping = {asyncio.create_task(self.grpc.stop(drain_timeout_s))}
        if drain is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drain(), drain_timeout_s)
            stopping.add(asyncio.create_task(self.grpc.stop(0)))
        _, stopping = await asyncio.wait(stopping, timeout=_COLLECT_INTERVAL_S)
        while stopping:
            # The server waits until the last call object is freed. If an exception's traceback holds a call in a
            # reference cycle, only the garbage collector frees it.
            _collect_now_and_then()
            _, stopping = await asyncio.wait(stopping, timeout=_COLLECT_INTERVAL_S)
        if self._beat is not None:
            self._beat.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._event_loop.touch()
            await asyncio.sleep(_EVENT_LOOP_BEAT_S)


def _is_own(grpc_server: str) -> bool:
    """Return whether a setting selects our own server."""
    if grpc_server == "grpcio":
        return False
    if importlib.util.find_spec("hpack") is not None:
        return True
    if grpc_server == "own":
        raise ConfigError("own requires the package hpack; install it, or set grpcio", field="grpc_server")
    logger.warning("the package hpack is not installed; serving with gRPC's server, which takes more processor time")
    return False


def _grpcio_server(
    errors: ErrorMapper,
    *,
    max_send_bytes: int,
    max_receive_bytes: int,
    max_concurrent_streams: int,
    probes_bandwidth: bool,
) -> tuple[grpc.aio.Server, _AddPort, Callable[[], None]]:
    server = grpc.aio.server(
        interceptors=[errors],
        options=[
            *_KEEPALIVE,
            ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
            ("grpc.max_receive_message_length", max_receive_bytes),
            ("grpc.max_send_message_length", max_send_bytes),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", max_connections()),
            ("grpc.max_concurrent_streams", max_concurrent_streams),
            # Limit on calls that have arrived but not started. By default, beyond 1,000 of them, gRPC cancels some
            # at random.
            ("grpc.server.max_pending_requests", max_concurrent_streams),
            ("grpc.server.max_pending_requests_hard_limit", 2 * max_concurrent_streams),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            # With bandwidth probes, the flow-control window of a stream that is not read would grow to a megabyte.
            ("grpc.http2.bdp_probe", int(probes_bandwidth)),
            # If this were 1, a second process could silently share the port.
            ("grpc.so_reuseport", 0),
        ],
    )
    return server, functools.partial(bind, server), lambda: None  # it has no shared ports


def _own_server(
    errors: ErrorMapper,
    *,
    max_send_bytes: int,
    max_receive_bytes: int,
    max_concurrent_streams: int,
    probes_bandwidth: bool,
) -> tuple[grpc.aio.Server, _AddPort, Callable[[], None]]:
    from midstream.rpc.http2 import GrpcServer  # imported here, because hpack may not be installed

    server = GrpcServer(
        interceptors=[errors],
        max_send_bytes=max_send_bytes,
        max_receive_bytes=max_receive_bytes,
        max_concurrent_streams=max_concurrent_streams,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_connections=max_connections(),
        max_connections_per_address=max(max_connections() // 2, 1),
        max_resets=2 * max_concurrent_streams,
    )
    return server, server.add_port, server.leave_shared_ports


def _collect_now_and_then() -> None:
    """Collect garbage for all stopping servers, at most half of the time, since collecting a large heap takes long."""
    global _next_collection
    began = time.monotonic()
    if began >= _next_collection:
        gc.collect()
        ended = time.monotonic()
        _next_collection = ended + max(_COLLECT_INTERVAL_S, ended - began)


def max_connections() -> int:
    """Return the number of connections that a server accepts: a share of the process's open-file limit."""
    return raise_open_files_limit() // 4


def open_channel(
    target: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: Tls | None = None,
    server_name: str = "",
    token: str = "",
    uses_proxy: bool = False,
) -> grpc.aio.Channel:
    """Return a channel with the keepalive that `Server` expects, which reconnects within a second.

    Args:
        target: `host:port`, or `dns:///host:port` for all addresses of a name in turn.
        server_name: Name that the server's certificate must contain, if it differs from the target's.
        token: Bearer token to send with each call.
        uses_proxy: Whether to connect through the HTTP proxy that the environment names, if any.
    """
    options = channel_options(max_message_bytes, uses_proxy=uses_proxy)
    if tls is None:
        if not token:
            return grpc.aio.insecure_channel(target, options=options)
        return SecureChannel(lambda: grpc.aio.insecure_channel(target, options=options), lambda: 0, token)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return SecureChannel(
        lambda: grpc.aio.secure_channel(target, tls.channel_credentials(), options=options), tls.refresh, token
    )


def channel_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, *, uses_proxy: bool = False
) -> list[tuple[str, Any]]:
    """Return the options of every client channel, including synchronous ones."""
    return [
        *_KEEPALIVE,
        # By default, gRPC connects through http_proxy even to this machine.
        ("grpc.enable_http_proxy", int(uses_proxy)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A killed process is back within a second or two; clients would notice a longer wait.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),
        # Despite its name, this is the time limit for one attempt. It is long enough for TLS on a slow network or a
        # busy machine, and short enough for hosts that have disappeared without closing their connections.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        # A restarted process may have another address; by default, gRPC resolves a name at most once in 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", 250),
        # Each channel has its own backoff, even if several use the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.lb_policy_name", "round_robin"),
    ]
