"""The worker's connection to the scheduler: a ZeroMQ DEALER socket in its own thread.

Register is sent until Registered assigns an epoch. From then on, steps arrive in order of step_id and are put into the
inbox, from which the compute loop takes them; its results go through the outbox to the scheduler, and heartbeats report
progress in between. If the scheduler ends the epoch or falls silent, or if a step is missing, the epoch ends: all its
steps and results are dropped, and Register is sent again. A restarted scheduler, a lost connection and a lost message
are thus handled in the same way.

The compute loop's thread itself sends results that contain only tokens: waking the connection's thread for each of them
would cost more than sending it. A lock guards the socket and the state of the epoch; no thread waits while holding it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from gpu_worker.batch.step import Step, StepOutput
from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.kv.tiers import KvTiers
from gpu_worker.kv.transfer import BlockFetcher
from gpu_worker.lora.cache import AdapterCache
from gpu_worker.lora.messages import AdapterMessages
from gpu_worker.models.images import ImageEncoder
from gpu_worker.scheduler_link.connection import LINK_EVENTS, Connector
from gpu_worker.scheduler_link.images import ImageMessages
from gpu_worker.scheduler_link.messages import decode_step, encode_result
from gpu_worker.sleep import SleepOrdered
from gpu_worker.weight_updates import WeightsReady
from midstream.security.curve import WorkerCredentials
from midstream.telemetry import Metrics
from protos import worker_pb2

logger = logging.getLogger(__name__)

_REGISTER_INTERVAL_S, _CONNECT_INTERVAL_S = 0.5, 0.05
# How long a worker that leaves waits for the results of its steps. Others compute what is not finished by then.
_HAND_OVER_S = 0.03
# Number of hashes of stored blocks in one message: 8 MiB.
MAX_HASHES_PER_MESSAGE = 1 << 20
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # operations on pyzmq's enum types are slow
_STOPPING = frozenset((signal.SIGTERM, signal.SIGINT))
_FAILED_EXIT_CODE = 1
_REJECTED_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """All sequences were dropped; steps of a new epoch follow."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process is to end."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """A step, and the time of its arrival (time.perf_counter)."""

    step: Step
    received_at: float


@dataclass(frozen=True, slots=True)
class Pool:
    """The parts of a worker that belong to its model and KV pool; see SchedulerLink."""

    adapters: AdapterCache[Any]
    kept: KeptBlocks
    tiers: KvTiers | None
    fetcher: BlockFetcher | None


Work = WaitingStep | EpochStarted | WeightsReady | SleepOrdered | Stopped


class SchedulerLink:
    """Registers the worker, receives steps, sends results and heartbeats.

    Attributes:
        inbox: Work for the compute loop, in order.
        epoch: The current epoch; 0 if there is none. Steps of other epochs need not run.
        on_weights: Called with messages about the weights and the current epoch, in the link's thread.
        leave_blocks: Called before the worker leaves, in the link's thread; returns whether other workers can copy its
            blocks from then on.
        on_left: Called when the worker has left, in the link's thread.
    """

    def __init__(
        self,
        address: str,
        register: worker_pb2.Register,
        metrics: Metrics,
        memory: Callable[[], worker_pb2.MemoryUsage],
        adapters: AdapterCache[Any],
        kept: KeptBlocks,
        credentials: WorkerCredentials | None = None,
        tiers: KvTiers | None = None,
        fetcher: BlockFetcher | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """Create the link; `start` connects it.

        Args:
            address: ZeroMQ address of the scheduler.
            register: The registration to send.
            metrics: Registry for the link's counters.
            memory: Returns the memory in use.
            adapters: The worker's adapter cache.
            kept: Content hashes of the worker's blocks.
            credentials: Keys of the connection; None for plain text.
            tiers: Tiers of the KV pool, if any.
            fetcher: Fetches blocks from other workers; None if requests to do so are to be ignored.
            images: Encodes images; None if requests to do so are to be ignored.
        """
        self.inbox: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self.epoch = 0
        self._address, self._register, self._memory = address, register, memory
        self._connector = Connector(address, credentials)
        self._adapters = AdapterMessages(adapters, self._wake)
        self._kept, self._tiers, self._fetcher = kept, tiers, fetcher
        self._is_suspended = False  # whether the worker does not register, because it changes its weights
        self.on_weights: Callable[[worker_pb2.SchedulerMessage, int], None] = lambda *_: None
        self.leave_blocks: Callable[[], bool] = lambda: False
        self.on_left: Callable[[], None] = lambda: None
        self._prepared: deque[worker_pb2.WeightsPrepared] = deque()
        self._has_hashed = False  # whether the weights were hashed after the registration
        self._unsent_hashes = set[int]()  # blocks in the tiers, for heartbeats after a registration
        self._images = None if images is None else ImageMessages(images, self._wake, metrics)
        self._outbox: deque[tuple[Step, StepOutput, float]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        if fetcher is not None:
            fetcher.on_report = self._wake
        self._lock = threading.Lock()
        self._dealer: zmq.Socket[bytes] | None = None
        self._is_drained = True  # whether the last iteration emptied the socket
        self._thread = threading.Thread(target=self._run, name="scheduler-link", daemon=True)
        self._leaving = self._has_failed = False
        self._leave_by = math.inf
        self._last_epoch = 0
        self._last_received = self._last_finished = 0
        self._heartbeat_s, self._timeout_s = 0.5, 2.0
        self._next_send = self._last_heard = 0.0
        self._dropped = metrics.counter("worker_messages_dropped", "Messages dropped, by reason.", ("reason",))
        self._registrations = metrics.counter("worker_registrations", "Epochs begun.")
        metrics.gauge("worker_steps_waiting", "Steps received and not finished.").set_function(self._num_waiting)

    def start(self) -> None:
        """Connect and start registering."""
        self._thread.start()

    def send_result(self, step: Step, output: StepOutput, waiting_s: float) -> None:
        """Send the result of `step`, or queue it for the link's thread; the result of a past epoch is dropped."""
        self._outbox.append((step, output, waiting_s))
        has_extras = output.tensors or output.log_probs or output.prompt_log_probs
        if has_extras or not self._lock.acquire(blocking=False):
            self._wake()
            return
        try:
            dealer = self._dealer
            if dealer is not None:
                self._send_results(dealer)
            # Wake the thread for remaining messages, including those that arrived during a send, which the descriptor
            # does not report.
            is_done = dealer is not None and self.epoch and not self._leaving and not _is_readable(dealer)
        finally:
            self._lock.release()
        if not is_done:
            self._wake()

    def abandon_epoch(self) -> None:
        """End the epoch from this side, because a step could not be executed.

        The worker then registers as if its process had been restarted, so that the scheduler counts a crash and can
        find the request that caused it.
        """
        self._has_failed = True
        self.epoch = 0
        self._wake()

    def answer_weights(self, answer: worker_pb2.WeightsPrepared) -> None:
        """Send an answer about weights, unless its epoch has ended. Any thread."""
        self._prepared.append(answer)
        self._wake()

    def interrupt(self, change: WeightsReady | SleepOrdered) -> None:
        """Let the compute loop change its state; until it has, a worker without an epoch does not register again. Any
        thread.
        """
        self._is_suspended = True
        self.inbox.put(change)

    def suspend(self, reason: str) -> None:
        """Leave, and stay connected without registering until `resume`; drop everything that belongs to the pool."""
        with self._lock:
            self._is_suspended = True
            if self.epoch and self._dealer is not None:
                self._send(
                    self._dealer, worker_pb2.WorkerMessage(leave=worker_pb2.Leave(epoch=self.epoch, reason=reason))
                )
                self._end_epoch(reason)
            self._connector.note_registered()  # the connection is not at fault
            self._adapters, self._kept = AdapterMessages(None, self._wake), KeptBlocks(np.empty(0, dtype=np.uint64))
            self._tiers = self._fetcher = None

    def resume(
        self,
        register: worker_pb2.Register,
        pool: Pool | None = None,
    ) -> None:
        """Register again, with what has replaced the objects given to the constructor; without a `pool`, the worker
        sleeps.
        """
        with self._lock:
            self._register = register
            if pool is not None:
                self._adapters = AdapterMessages(pool.adapters, self._wake)
                self._kept, self._tiers, self._fetcher = pool.kept, pool.tiers, pool.fetcher
            self._unsent_hashes.clear()
            self._has_hashed = self._is_suspended = False
            self._next_send = 0.0
            self._connector.note_lost()
            if self._fetcher is not None:
                self._fetcher.on_report = self._wake
        self._wake()

    def resume_unchanged(self) -> None:
        """Register again if there is no epoch; nothing has changed."""
        with self._lock:
            self._is_suspended = False
            self._next_send = min(self._next_send, time.monotonic())
        self._wake()

    def announce_weights(self, root: str, block_kind: str) -> None:
        """Tell the scheduler, now and in later registrations, the root of the tree over the weights. Any thread."""
        with self._lock:
            self._register.kind.weights_root, self._register.block_kind = root, block_kind
            self._has_hashed = True
        self._wake()

    def leave(self) -> None:
        """Stop accepting steps, give the current ones a moment to finish, send Leave, and then put Stopped into the
        inbox. Any thread.
        """
        self._leaving = True
        self._wake()

    @property
    def signal_descriptor(self) -> int:
        """Descriptor for signal.set_wakeup_fd: on SIGTERM and SIGINT the worker leaves, even while a step keeps the
        main thread from handling signals.
        """
        return self._wake_writer.fileno()

    def join(self) -> None:
        """Wait for the thread to end, after Stopped."""
        self._thread.join()
        if self._images is not None:
            self._images.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread will wake anyway; closed: the thread has ended
            self._wake_writer.send(b"\0")

    def _num_waiting(self) -> int:
        return self._last_received - self._last_finished if self.epoch else 0

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # Without its link the worker would hang, so the process exits and is restarted.
            logger.exception("the link to the scheduler failed")
            self.inbox.put(Stopped(_FAILED_EXIT_CODE, f"the link to the scheduler failed: {error!r}"))

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            self._connector.connect(dealer)
            # Poll the file descriptors: polling the socket itself would need the lock.
            poller = zmq.Poller()
            poller.register(dealer.fileno(), zmq.POLLIN)
            poller.register(self._wake_reader.fileno(), zmq.POLLIN)
            with dealer.get_monitor_socket(LINK_EVENTS) as monitor:
                poller.register(monitor.fileno(), zmq.POLLIN)
                # The descriptor reports events only after an attempt to receive has found none.
                self._connector.was_lost(monitor)
                self._dealer = dealer
                try:
                    while self._turn(dealer, monitor, poller):
                        pass
                finally:
                    with self._lock:
                        self._dealer = None
                dealer.disable_monitor()

    def _turn(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], poller: zmq.Poller) -> bool:
        """Wait for events and handle them; return False when the worker has left."""
        wait_s = self._wait_s() if self._is_drained else 0.0
        ready = {descriptor for descriptor, _ in poller.poll(int(wait_s * 1000) + self._is_drained)}
        if self._wake_reader.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                received = self._wake_reader.recv(4096)
                self._leaving = self._leaving or not _STOPPING.isdisjoint(received)
        with self._lock:
            return self._handle(dealer, monitor, was_signalled=monitor.fileno() in ready)

    def _handle(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, was_signalled: bool) -> bool:
        if was_signalled and self._connector.was_lost(monitor) and self.epoch:
            # Steps and results in transit are lost, so register again.
            self._end_epoch("the connection was lost")
        self._send_results(dealer)
        while _is_readable(dealer):
            stopped = self._receive(dealer.recv_multipart(zmq.NOBLOCK))
            if stopped is not None:
                self.inbox.put(stopped)
                return False
        if self._leaving and self._may_leave():
            if self.epoch:
                leave = worker_pb2.Leave(epoch=self.epoch, reason="drain", leaves_blocks=self.leave_blocks())
                self._send(dealer, worker_pb2.WorkerMessage(leave=leave))
                logger.info("left", extra={"epoch": self.epoch, "num_unfinished_steps": self._num_waiting()})
            self.on_left()
            self.inbox.put(Stopped(0, "drained"))
            return False
        self._connector.reconnect_when_due(dealer)
        self._send_when_due(dealer)
        self._is_drained = not _is_readable(dealer)
        return True

    def _wait_s(self) -> float:
        """Return the time until there is something to do without an event."""
        return max(0.0, min(self._next_send, self._leave_by) - time.monotonic())

    def _may_leave(self) -> bool:
        now = time.monotonic()
        self._leave_by = min(self._leave_by, now + _HAND_OVER_S)
        return now >= self._leave_by or not self._num_waiting()

    def _send_results(self, dealer: zmq.Socket[bytes]) -> None:
        self._send_answers(dealer)
        while self._outbox:
            step, output, waiting_s = self._outbox.popleft()
            if step.epoch != self.epoch:
                self._drop("stale")
                continue
            messages = encode_result(step.epoch, step.step_id, output, waiting_s)
            self._last_finished = step.step_id
            self._kept.finish(step.step_id, is_whole=output.is_whole)
            self._send_all(dealer, messages)
        while self._images is not None and self._images.answers:
            encoded = self._images.answers.popleft()
            if encoded.epoch == self.epoch:
                self._send_all(dealer, [worker_pb2.WorkerMessage(image_encoded=encoded)])
        for fetched in self._fetcher.reports() if self._fetcher is not None else ():
            if fetched.epoch == self.epoch:
                report = worker_pb2.BlocksFetched(
                    epoch=fetched.epoch, fetched_hashes=fetched.hashes, missing_hashes=fetched.missing
                )
                self._send_all(dealer, [worker_pb2.WorkerMessage(blocks_fetched=report)])

    def _send_answers(self, dealer: zmq.Socket[bytes]) -> None:
        """Send the answers about adapters and weights."""
        while self._adapters.answers:
            answer = self._adapters.answers.popleft()
            if answer.epoch == self.epoch:
                self._send_all(dealer, [worker_pb2.WorkerMessage(lora_result=answer)])
        while self._prepared:
            prepared = self._prepared.popleft()
            if prepared.epoch == self.epoch:
                self._send_all(dealer, [worker_pb2.WorkerMessage(weights_prepared=prepared)])
        if self._has_hashed and self.epoch:
            self._has_hashed = False
            root, block_kind = self._register.kind.weights_root, self._register.block_kind
            hashed = worker_pb2.WeightsHashed(epoch=self.epoch, weights_root=root, block_kind=block_kind)
            self._send_all(dealer, [worker_pb2.WorkerMessage(weights_hashed=hashed)])

    def _send_when_due(self, dealer: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        if self.epoch and now - self._last_heard > self._timeout_s:
            self._end_epoch("the scheduler sent no message in time")
        if now < self._next_send:
            return
        if self.epoch:
            heartbeat = worker_pb2.Heartbeat(
                epoch=self.epoch,
                last_step_id=self._last_finished,
                memory=self._memory(),
            )
            if self._tiers is not None:
                changes = self._tiers.changes()
                self._unsent_hashes.difference_update(changes.removed)
                heartbeat.stored_hashes.extend(changes.stored)
                heartbeat.stored_hashes.extend(self._take_unsent())
                heartbeat.removed_hashes.extend(changes.removed)
            self._next_send = now + self._heartbeat_s
            self._send_all(dealer, [worker_pb2.WorkerMessage(heartbeat=heartbeat)])
        elif self._is_suspended:
            self._next_send = now + _REGISTER_INTERVAL_S
        elif not self._leaving:
            if self._has_failed:
                self._has_failed = False
                self._connector.note_lost()
                self._register.incarnation = secrets.randbits(64)
                self._kept.clear()
            self._kept.write(self._register)
            if self._tiers is not None:
                self._register.ClearField("stored_hashes")
                self._unsent_hashes = self._tiers.hashes()
                self._register.stored_hashes.extend(self._take_unsent())
            is_sent = self._send(dealer, worker_pb2.WorkerMessage(register=self._register))
            self._next_send = now + (_REGISTER_INTERVAL_S if is_sent else _CONNECT_INTERVAL_S)

    def _take_unsent(self) -> list[int]:
        """Remove and return as many of the hashes left to send as fit into a message."""
        part = list(itertools.islice(self._unsent_hashes, MAX_HASHES_PER_MESSAGE))
        self._unsent_hashes.difference_update(part)
        return part

    def _send_all(self, dealer: zmq.Socket[bytes], messages: Iterable[worker_pb2.WorkerMessage]) -> None:
        """Send messages of the epoch; end it if one cannot be sent, since the scheduler would wait for it forever."""
        if not all(self._send(dealer, message) for message in messages):
            self._end_epoch("the connection is down")

    def _send(self, dealer: zmq.Socket[bytes], message: worker_pb2.WorkerMessage) -> bool:
        try:
            dealer.send(message.SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, frames: list[bytes]) -> Stopped | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames; must have 1")
            message = worker_pb2.SchedulerMessage.FromString(frames[0])
            kind = message.WhichOneof("message")
            if kind == "step_batch":
                self._accept_step(message.step_batch)
        except (DecodeError, ValueError) as error:
            logger.warning("dropped a malformed message: %s", error)
            self._drop("malformed")
            return None
        self._last_heard = time.monotonic()
        if kind == "registered":
            self._begin_epoch(message.registered)
        elif kind == "rejected":
            rejected = message.rejected
            field = f"{rejected.field}: " if rejected.field else ""
            return Stopped(_REJECTED_EXIT_CODE, f"rejected by the scheduler: {field}{rejected.reason}")
        elif kind == "epoch_ended" and message.epoch_ended.epoch == self.epoch:
            self._end_epoch("the scheduler ended the epoch")
        elif kind is None:
            self._drop("malformed")
        elif kind == "fetch_blocks":
            self._fetch(message.fetch_blocks)
        else:
            self._take_other(message)
        return None

    def _take_other(self, message: worker_pb2.SchedulerMessage) -> None:
        """Handle messages about images, adapters, weights and sleep."""
        if self._images is not None:
            self._images.take(message, self.epoch)
        self._adapters.take(message, self.epoch)
        self.on_weights(message, self.epoch)
        if message.HasField("set_sleep") and message.set_sleep.epoch == self.epoch:
            self.interrupt(SleepOrdered(message.set_sleep.level))

    def _fetch(self, message: worker_pb2.FetchBlocks) -> None:
        if message.epoch == self.epoch and self._fetcher is not None:
            self._fetcher.fetch(message.epoch, list(message.hashes), message.kv_store, message.kv_source)

    def _accept_step(self, message: worker_pb2.StepBatch) -> None:
        if message.epoch != self.epoch or not self.epoch:
            self._drop("stale")
        elif self._leaving:
            self._drop("leaving")
        elif message.step_id <= self._last_received:
            self._drop("repeated")
        elif message.step_id > self._last_received + 1:
            self._drop("gap")
            self._end_epoch(f"step {message.step_id} came after step {self._last_received}")
        else:
            step = self._adapters.complete(decode_step(message))
            if step is None:
                self._drop("gap")
                self._end_epoch("a table of virtual tokens is missing")
                return
            self._kept.receive(message)
            if self._tiers is not None:
                self._tiers.receive(message)
            self._last_received = message.step_id
            self.inbox.put(WaitingStep(step, time.perf_counter()))

    def _begin_epoch(self, registered: worker_pb2.Registered) -> None:
        if registered.epoch <= self._last_epoch:
            self._drop("stale")
            return
        self._last_received = self._last_finished = 0
        self._adapters.clear()
        self._last_epoch = self.epoch = registered.epoch
        self._heartbeat_s = max(registered.heartbeat_interval_ms, 10) / 1000
        self._timeout_s = max(registered.timeout_ms / 1000, 2 * self._heartbeat_s)
        self._next_send = time.monotonic() + self._heartbeat_s
        self._connector.note_registered()
        if self._fetcher is not None:
            self._fetcher.begin_epoch(self.epoch)
        self._registrations.inc()
        self.inbox.put(EpochStarted())
        logger.info("registered with epoch %d", self.epoch)

    def _end_epoch(self, reason: str) -> None:
        logger.warning("epoch %d ended: %s", self.epoch, reason)
        self.epoch = 0
        self._kept.end_epoch()
        self._connector.note_lost()
        self._next_send = 0.0

    def _drop(self, reason: str) -> None:
        self._dropped.labels(reason).inc()


def _is_readable(dealer: zmq.Socket[bytes]) -> bool:
    return bool(int(dealer.getsockopt(_EVENTS)) & _POLLIN)
