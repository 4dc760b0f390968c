"""The ZeroMQ port that workers dial: steps go out, results come in.

Each message is one frame with one protobuf message. What does not parse is dropped and counted, and the socket itself
drops frames above `max_frame_bytes` and cuts the link they came over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from midstream.health import LoopProgress
from protos import worker_pb2
from scheduler.effects import EpochEnded, GroupJoined, GroupRefused, StepPlan
from scheduler.request_codec import ModelLimits
from scheduler.wire import WorkerEvent, decode_worker_message, encode_step

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_HIGH_WATER_MARK = 1000


class Dispatcher:
    """The scheduler's end of the links to all workers.

    Attributes:
        port: The bound port.
        num_malformed: Messages dropped because they did not parse.
        num_unsent: Messages dropped because their worker was gone or did not read.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        limits: ModelLimits,
        heartbeat_interval_ms: int,
        worker_timeout_ms: int,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Binds the port; 0 takes a free one.

        Raises:
            zmq.ZMQError: The port is taken.
        """
        self.num_malformed = 0
        self.num_unsent = 0
        self._limits = limits
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._worker_timeout_ms = worker_timeout_ms
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host else host
        self._socket.bind(f"tcp://{address}:{port}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def run(self, on_event: Callable[[WorkerEvent], None], progress: LoopProgress) -> None:
        """Hands in what workers say, until cancelled."""
        while True:
            progress.idle()
            frames = await self._socket.recv_multipart()
            progress.touch()
            event = self._decode(frames)
            if event is not None:
                on_event(event)

    def _decode(self, frames: list[bytes]) -> WorkerEvent | None:
        connection = frames[0]
        try:
            if len(frames) != 2:
                raise ValueError(f"{len(frames) - 1} frames, 1 is expected")
            event = decode_worker_message(frames[1], connection, time.time_ns())
        except ValueError as error:
            self.num_malformed += 1
            logger.warning("dropped a malformed message on the worker port: %s", error)
            return None
        return None if isinstance(event, worker_pb2.LoraResult) else event

    def send_step(self, plan: StepPlan) -> None:
        """Sends a step."""
        self._send(plan.connection, encode_step(plan, self._limits))

    def send_joined(self, effect: GroupJoined) -> None:
        """Tells a worker its epoch."""
        logger.info("worker group %s joined", effect.group_id, extra={"epoch": effect.epoch})
        registered = worker_pb2.Registered(
            epoch=effect.epoch,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            timeout_ms=self._worker_timeout_ms,
        )
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(registered=registered))

    def send_refused(self, effect: GroupRefused) -> None:
        """Tells a worker that it does not fit."""
        logger.warning("refused a worker: %s", effect.reason, extra={"field": effect.field})
        rejected = worker_pb2.Rejected(reason=effect.reason, field=effect.field)
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(rejected=rejected))

    def send_epoch_ended(self, effect: EpochEnded) -> None:
        """Tells a worker to begin anew."""
        if effect.reason:
            logger.warning("gave a worker group up: %s", effect.reason, extra={"epoch": effect.epoch})
        ended = worker_pb2.EpochEnded(epoch=effect.epoch)
        self._send_message(effect.connection, worker_pb2.SchedulerMessage(epoch_ended=ended))

    def send_heartbeat_ack(self, connection: bytes, epoch: int) -> None:
        """Answers a heartbeat."""
        ack = worker_pb2.HeartbeatAck(epoch=epoch)
        self._send_message(connection, worker_pb2.SchedulerMessage(heartbeat_ack=ack))

    def _send_message(self, connection: bytes, message: worker_pb2.SchedulerMessage) -> None:
        self._send(connection, message.SerializeToString())

    def _send(self, connection: bytes, frame: bytes) -> None:
        # A worker that is gone or does not read loses its epoch soon, by its silence.
        sent = asyncio.ensure_future(self._socket.send_multipart([connection, frame], zmq.NOBLOCK))
        sent.add_done_callback(self._on_sent)

    def _on_sent(self, future: asyncio.Task[zmq.MessageTracker | None]) -> None:
        if not future.cancelled() and future.exception() is not None:
            self.num_unsent += 1

    def close(self) -> None:
        """Closes the port."""
        self._socket.close()
        self._context.term()
