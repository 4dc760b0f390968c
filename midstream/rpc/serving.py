"""gRPC server lifecycle: start, report progress, drain, stop.

server = Server("scheduler", config.host, config.port, progress)
add_SchedulerServicer_to_server(servicer, server.grpc)
await server.start()
await server.run_until_signal(drain=servicer.drain, drain_timeout_s=config.drain_timeout_s)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar

from grpc_reflection.v1alpha import reflection

from midstream.errors import ExecutionError, MidstreamError
from midstream.rpc.channel import DEFAULT_MAX_MESSAGE_BYTES
from midstream.rpc.errors import Admit, ErrorMapper, Receive, TakeTurn
from midstream.rpc.health import HEALTH_SERVICE, Progress, add_health, check_port
from midstream.rpc.http2 import GrpcServer
from midstream.rpc.open_files import raise_open_files_limit
from midstream.security.tls import Tls

logger = logging.getLogger(__name__)


class Signals:
    """The signals that tell a server to stop.

    Attributes:
        are_awaited: Set once the server has started and waits for them.
        num_sent: How many were sent.
    """

    def __init__(self) -> None:
        self.are_awaited = asyncio.Event()
        self.num_sent = 0
        self._sent: asyncio.Queue[signal.Signals] = asyncio.Queue()

    def send(self, number: signal.Signals) -> None:
        self.num_sent += 1
        self._sent.put_nowait(number)

    async def get(self) -> signal.Signals:
        """Return the next signal, once it is sent."""
        self.are_awaited.set()
        return await self._sent.get()


# The signals for the server of the current part, if the process hosts several parts; otherwise, those of the process.
part_signals: ContextVar[Signals | None] = ContextVar("part_signals", default=None)

MAX_METADATA_BYTES = 16 << 10

_EVENT_LOOP_BEAT_S = 1.0


class Server:
    """A gRPC server with health based on progress, reflection, keepalive and error mapping.

    Attributes:
        grpc: The gRPC server, to which servicers are added before `start`.
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
            shared_port: Another port, on which other processes may listen as well; 0 means none.

        Raises:
            OSError: The port is in use.
        """
        self.grpc = GrpcServer(
            interceptors=[ErrorMapper(admit, receive, turn_of)],
            max_send_bytes=max_message_bytes,
            max_receive_bytes=max_request_bytes or max_message_bytes,
            max_concurrent_streams=max_concurrent_streams,
            max_metadata_bytes=MAX_METADATA_BYTES,
            max_connections=max_connections(),
            max_connections_per_address=max(max_connections() // 2, 1),
            max_resets=2 * max_concurrent_streams,
        )
        self.leaving, self.draining = asyncio.Event(), asyncio.Event()
        self._failed = asyncio.Event()
        self._is_hurried = asyncio.Event()
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
            self.grpc.add_port(host, shared_port, tls, is_shared=True)
        if is_standby:
            check_port(host, port)
        else:
            self.bind()

    def bind(self) -> None:
        """Bind the port. Raises OSError if the port is in use."""
        self.port = self.grpc.add_port(self._host, self.port, self._tls)

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
        signals = part_signals.get()
        if signals is None:
            signals = Signals()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, signals.send, number)
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
            self._is_hurried.set()
            await self.grpc.stop(0)
            if stop_other_port is not None:
                await stop_other_port(0.0)
        await stopping
        logger.info("stopped")

    def _leave(self) -> None:
        """Set NOT_SERVING and leave shared ports, so that the process gets no more work."""
        self._progress.set_reason("draining", stands=True)
        self.leaving.set()
        self.grpc.leave_shared_ports()

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
        stopping = asyncio.create_task(self.grpc.stop(drain_timeout_s))
        if drain is not None:
            await self._drain(drain, drain_timeout_s)
            await self.grpc.stop(0)
        await stopping
        if self._beat is not None:
            self._beat.cancel()

    async def _drain(self, drain: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Wait until `drain` has ended, but not beyond the timeout or a second signal."""
        draining = asyncio.ensure_future(drain())
        hurried = asyncio.create_task(self._is_hurried.wait())
        try:
            await asyncio.wait((draining, hurried), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
            draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining

    async def _keep_beating(self) -> None:
        while True:
            self._event_loop.touch()
            await asyncio.sleep(_EVENT_LOOP_BEAT_S)


def max_connections() -> int:
    """Return the number of connections that a server accepts: a share of the process's open-file limit."""
    return raise_open_files_limit() // 4
