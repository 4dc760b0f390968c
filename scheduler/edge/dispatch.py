"""The ZeroMQ port that workers connect to; sends steps and receives results.

Each message is one frame with one protobuf message. Messages that cannot be parsed are dropped and counted; the socket
itself drops frames above MAX_FRAME_BYTES and closes their connections. A message that can be parsed but is invalid
(scheduler/wire/worker_checks.py) ends its sender's epoch.

The socket is read in a callback on its file descriptor, and written as soon as a message is ready: pyzmq's asyncio
wrapper needs a task for each message sent and several iterations of the event loop for each one received.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from midstream.clock import SteadyClock
from midstream.rpc.health import LoopProgress, check_port
from protos import worker_pb2
from scheduler.core.effects import EpochEnded, FetchBlocks, GroupJoined, GroupRefused, SleepOrdered, StepPlan
from scheduler.core.events import StepDone, WorkerFailed, WorkerLost
from scheduler.edge.worker_keys import WorkerKeys
from scheduler.wire.prompt_tables import table_parts
from scheduler.wire.worker_checks import WrongMessageError
from scheduler.wire.worker_messages import WorkerAnswer, WorkerEvent, decode_worker_message, encode_step

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
MAX_HELD_BYTES = 1 << 30
_HIGH_WATER_MARK = 1000
# As integers, since each operation on a flag runs a dozen functions of `enum`.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
# Maximum messages read in one callback, so that other tasks can run before the rest are read.
_MAX_READ = 64
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
# Delays before the checks for a closed connection: the socket notices the loss a little later than its monitor.
_LOOK_AFTER_S = (0.0, 0.002, 0.02, 0.1)


@dataclass(slots=True)
class _HeldOutputs:
    epoch: int
    step_id: int
    outputs: list[tuple[int, bytes]] = field(default_factory=list)  # (row, serialized RowOutputs)
    num_bytes: int = 0


class Dispatcher:
    """The scheduler's side of the connections to all workers.

    Attributes:
        port: The bound port; before `bind`, the configured one.
        num_malformed: Number of messages dropped because they could not be parsed.
        num_refused: Number of connections that failed the handshake: the key was missing or wrong, or the peer was not
            ZeroMQ.
        num_unsent: Number of messages dropped because their worker was disconnected or did not read.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        heartbeat_interval_ms: int,
        worker_timeout_ms: int,
        max_held_bytes: int = MAX_HELD_BYTES,
        keys: WorkerKeys | None = None,
        clock: SteadyClock | None = None,
        is_standby: bool = False,
    ) -> None:
        """Bind the port, unless `is_standby`: until a standby becomes active, workers belong to the active scheduler.
        Port 0 chooses a free one. With `keys`, only workers whose keys it contains can connect.

        A worker may send at most `max_held_bytes` of tensors before a result. `clock` provides the times of events.
        Raises OSError if the port is in use.
        """
        self._clock = clock or SteadyClock()
        self.num_malformed = 0
        self.num_unsent = 0
        self.num_refused = 0
        self.on_adapter_result: Callable[[worker_pb2.LoraResult], None] = lambda _: None
        self.on_weights_prepared: Callable[[worker_pb2.WeightsPrepared], None] = lambda _: None
        self.on_image_result: Callable[[worker_pb2.ImageEncoded], None] = lambda _: None
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._worker_timeout_ms = worker_timeout_ms
        self._max_held_bytes = max_held_bytes
        self._outputs: dict[bytes, _HeldOutputs] = {}  # by connection: outputs of the step whose result comes next
        # The sockets of the monitor and of the authenticator are asyncio sockets, since they are rarely used.
        self._context = zmq.asyncio.Context()
        plain: Any = self._context.socket(zmq.ROUTER, socket_class=cast("Any", zmq.Socket))
        self._socket: zmq.Socket[bytes] = plain
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._epochs: dict[bytes, int] = {}  # by connection
        self._is_read_due = True  # also true during a read, and before `run` is called
        self._on_event: Callable[[WorkerEvent], None]
        self._on_read: Callable[[], None]
        self._progress: LoopProgress
        self._failed: asyncio.Future[None]
        self._authenticator = keys.secure(self._context, self._socket) if keys is not None else None
        self._host = f"[{host}]" if ":" in host else host
        self.port = port
        if is_standby:
            check_port(host, port)
        else:
            self.bind()

    def bind(self) -> None:
        """Bind the port; a standby does so once it has become active. Raises OSError if the port is in use."""
        address = f"{self._host}:{self.port}"
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def run(
        self, on_event: Callable[[WorkerEvent], None], on_read: Callable[[], None], progress: LoopProgress
    ) -> None:
        """Pass worker messages and lost connections to `on_event`; call `on_read` after each batch of them."""
        loop = asyncio.get_running_loop()
        self._on_event, self._on_read = on_event, on_read
        self._progress, self._failed = progress, loop.create_future()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, self._read)
        self._read()
        watching = loop.create_task(self._watch_links())
        try:
            done, _ = await asyncio.wait((watching, self._failed), return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            loop.remove_reader(descriptor)
            self._failed.cancel()
            watching.cancel()
            await asyncio.wait((watching,))

    async def _watch_links(self) -> None:
        """Detect the death of a worker by its closed connection, long before the heartbeat timeout expires."""
        monitor = cast("zmq.asyncio.Socket", self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED))
        try:
            while True:
                if parse_monitor_message(await monitor.recv_multipart())["event"] != zmq.EVENT_DISCONNECTED:
                    self.num_refused += 1
                    continue
                for delay_s in _LOOK_AFTER_S:
                    await asyncio.sleep(delay_s)
                    for connection in self._lost_links():
                        self._on_event(WorkerLost(self._clock.now_ns(), connection))
                    self._on_read()
        finally:
            monitor.close()

    def _lost_links(self) -> list[bytes]:
        """Stop tracking the connections that have an epoch but to which nothing can be sent any longer; return them."""
        lost = []
        for connection, epoch in list(self._epochs.items()):
            try:
                self._write(connection, _heartbeat_ack(epoch))
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    logger.warning("lost the connection of a worker", extra={"epoch": self._epochs.pop(connection)})
                    self._outputs.pop(connection, None)
                    lost.append(connection)
        self._read_if_readable()
        return lost

    def _read(self) -> None:
        """Read some messages, and schedule another read if more are left."""
        if self._failed.done():
            return
        self._progress.touch()
        self._is_read_due = True
        try:
            self._read_some()
            self._on_read()
            self._is_read_due = self._is_readable()
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self._failed.set_exception(error)
        self._progress.idle()
        if self._is_read_due:
            self._failed.get_loop().call_soon(self._read)

    def _read_some(self) -> None:
        """Handle up to _MAX_READ messages."""
        receive = self._socket.recv_multipart
        for _ in range(_MAX_READ):
            try:
                frames = receive(_NOBLOCK)
            except zmq.Again:
                return
            event = self._decode(frames)
            if event is not None:
                self._on_event(event)
            if not self._is_readable():  # cheaper than catching the exception
                return

    def _read_if_readable(self) -> None:
        """Schedule a read if there are messages: the descriptor does not signal those that arrive during a send."""
        if not self._is_read_due and self._is_readable():
            self._is_read_due = True
            self._failed.get_loop().call_soon(self._read)

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _decode(self, frames: list[bytes]) -> WorkerEvent | None:
        connection = frames[0]
        try:
            if len(frames) != 2:
                raise ValueError(f"{len(frames) - 1} frames; must have 1")
            event = decode_worker_message(frames[1], connection, self._clock.now_ns())
            if isinstance(event, StepDone) and connection in self._outputs:
                return self._with_outputs(event, self._outputs.pop(connection))
            if isinstance(event, WorkerAnswer):
                if self._epochs.get(connection) == event.epoch:
                    self._take(connection, event)
                return None
        except WrongMessageError as error:
            return WorkerFailed(self._clock.now_ns(), connection, f"wrong message: {error}")
        except ValueError as error:
            self.num_malformed += 1
            logger.warning("dropped a malformed message on the worker port: %s", error)
            return None
        except Exception as error:  # a worker's message must never end the loop
            logger.exception("failed to read a worker's message")
            return WorkerFailed(self._clock.now_ns(), connection, f"its message cannot be read: {error}")
        return event

    def _take(self, connection: bytes, message: WorkerAnswer) -> None:
        """Process a message of the sender's current epoch that is not an event of the core."""
        if isinstance(message, worker_pb2.StepOutputs):
            self._hold_outputs(connection, message)
        elif isinstance(message, worker_pb2.LoraResult):
            self.on_adapter_result(message)
        elif isinstance(message, worker_pb2.WeightsPrepared):
            self.on_weights_prepared(message)
        else:
            self.on_image_result(message)

    def _hold_outputs(self, connection: bytes, message: worker_pb2.StepOutputs) -> None:
        """Hold outputs until the result of their step arrives."""
        held = self._outputs.get(connection)
        if held is None or (held.epoch, held.step_id) != (message.epoch, message.step_id):
            held = self._outputs[connection] = _HeldOutputs(message.epoch, message.step_id)
        for item in message.outputs:
            data = item.SerializeToString()
            held.outputs.append((item.row, data))
            held.num_bytes += len(data)
        if held.num_bytes > self._max_held_bytes:
            del self._outputs[connection]
            raise WrongMessageError(f"the step_outputs of a step exceed {self._max_held_bytes} bytes")

    def _with_outputs(self, event: StepDone, held: _HeldOutputs) -> StepDone:
        if (held.epoch, held.step_id) != (event.epoch, event.step_id):
            return event
        return replace(event, outputs=(*held.outputs, *event.outputs))

    def send_step(self, plan: StepPlan) -> None:
        """Send a step, preceded by the prompt tables of its new sequences."""
        for part in table_parts(plan):
            self._send(plan.connection, part)
        self._send(plan.connection, encode_step(plan))

    def send_sleep(self, effect: SleepOrdered) -> None:
        """Tell a worker to sleep or to wake up."""
        logger.info("a worker is to have the sleep level %d", effect.level, extra={"epoch": effect.epoch})
        order = worker_pb2.SetSleep(epoch=effect.epoch, level=effect.level)
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(set_sleep=order))

    def send_fetch(self, effect: FetchBlocks) -> None:
        """Ask a worker to fetch blocks from another one."""
        fetch = worker_pb2.FetchBlocks(
            epoch=effect.epoch, hashes=effect.hashes, kv_store=effect.kv_store, kv_source=effect.kv_source
        )
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(fetch_blocks=fetch))

    def send_joined(self, effect: GroupJoined) -> None:
        """Send a worker the epoch under which it has joined."""
        logger.info("worker group %s joined", effect.group_id, extra={"epoch": effect.epoch})
        registered = worker_pb2.Registered(
            epoch=effect.epoch, heartbeat_interval_ms=self._heartbeat_interval_ms, timeout_ms=self._worker_timeout_ms
        )
        self._epochs[effect.connection] = effect.epoch
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(registered=registered))

    def send_refused(self, effect: GroupRefused) -> None:
        """Reject an incompatible worker."""
        logger.warning("rejected a worker: %s", effect.reason, extra={"field": effect.field})
        rejected = worker_pb2.Rejected(reason=effect.reason, field=effect.field)
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(rejected=rejected))

    def send_epoch_ended(self, effect: EpochEnded) -> None:
        """Tell a worker to drop its state and register again."""
        self._outputs.pop(effect.connection, None)
        if effect.reason:
            logger.warning("ended the epoch of a worker group: %s", effect.reason, extra={"epoch": effect.epoch})
        if self._epochs.get(effect.connection) == effect.epoch:
            del self._epochs[effect.connection]
        ended = worker_pb2.EpochEnded(epoch=effect.epoch)
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(epoch_ended=ended))

    def send_load_adapter(self, connection: bytes, epoch: int, name: str, path: str) -> None:
        """Ask a worker to load an adapter; its answer is passed to `on_adapter_result`."""
        load = worker_pb2.LoadLoraAdapter(name=name, path=path, epoch=epoch)
        self._send_message(connection, worker_pb2.SchedulerMessage(load_lora=load))

    def send_unload_adapter(self, connection: bytes, epoch: int, fingerprint: str) -> None:
        """Ask a worker to unload an adapter."""
        unload = worker_pb2.UnloadLoraAdapter(fingerprint=fingerprint, epoch=epoch)
        self._send_message(connection, worker_pb2.SchedulerMessage(unload_lora=unload))

    def send_weights(self, connection: bytes, message: worker_pb2.SchedulerMessage) -> None:
        """Send a command about weights; the answer is passed to `on_weights_prepared`."""
        self._send_message(connection, message)

    def send_image(self, connection: bytes, epoch: int, image_id: int, data: bytes) -> None:
        """Ask a worker to encode an image; its answer is passed to `on_image_result`."""
        image = worker_pb2.EncodeImage(epoch=epoch, id=image_id, data=data)
        self._send_message(connection, worker_pb2.SchedulerMessage(encode_image=image))

    def fail_worker(self, connection: bytes, reason: str) -> None:
        """End the epoch of a worker that does not answer."""
        self._on_event(WorkerFailed(self._clock.now_ns(), connection, reason))
        self._on_read()

    def send_heartbeat_ack(self, connection: bytes, epoch: int) -> None:
        self._send(connection, _heartbeat_ack(epoch))

    def _send_message(self, connection: bytes, message: worker_pb2.SchedulerMessage) -> None:
        self._send(connection, message.SerializeToString())

    def _send(self, connection: bytes, frame: bytes) -> None:
        # If the worker is gone or does not read, the heartbeat timeout soon ends its epoch.
        try:
            self._write(connection, frame)
        except zmq.ZMQError:
            self.num_unsent += 1
        self._read_if_readable()

    def _write(self, connection: bytes, frame: bytes) -> None:
        self._socket.send(connection, _NOBLOCK_MORE)
        self._socket.send(frame, _NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _heartbeat_ack(epoch: int) -> bytes:
    return worker_pb2.SchedulerMessage(heartbeat_ack=worker_pb2.HeartbeatAck(epoch=epoch)).SerializeToString()
