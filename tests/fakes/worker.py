"""A worker without a model: it uses real ZeroMQ and protobuf, and its tokens can be computed by hand. Runs in a thread
or as a process:

python -m tests.fakes.worker --scheduler tcp://127.0.0.1:50053 --model-fingerprint abc --step-ms 5
"""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from midstream.security.curve import WorkerCredentials, read_key_pair, read_public_key
from protos import kind_pb2, worker_pb2
from tests.fakes.model import FakeModel

PROTOCOL_VERSION = 1
HELD_STEP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class FakeWorkerConfig:
    """The behavior and faults of the fake worker.

    Attributes:
        step_ms: Duration of a step.
        end_after: Number of output tokens, including the end id, after which a row ends; 0 means that there is no end
            id.
        fail_token: A row whose prompt contains this token fails.
        die_token: A step that adds a row whose prompt contains this token kills the worker.
        hang_at_step: Step at which the worker stops computing but continues to send heartbeats; 0 means never.
        hold: File; while it exists, the worker computes `hold_after` more steps at its own rate and then one step in
            HELD_STEP_S, so that a request that comes late on a busy machine gets its tokens, too.
        hold_after: Number of steps at the worker's own rate after the file appears.
        wrong_shape_at_step: Step whose result has one token too many; 0 means never.
        repeat_results: Whether to send each result twice.
        checks: Whether to verify the KV cache in each step, which is slow.
        circle: Comma-separated token ids: each is followed by the next one, and the last by the first.
        curve_secret_key: File with the worker's key pair; plain text if empty.
        curve_server_key: File with the scheduler's public key.
    """

    scheduler: str = "tcp://127.0.0.1:50053"
    group_id: str = "fake"
    model_fingerprint: str = ""
    weights_root: str = ""
    arithmetic: str = ""
    vocab_size: int = 1000
    tokens_per_block: int = 16
    num_blocks: int = 1024
    max_sequence_length: int = 8192
    max_batch_size: int = 256
    max_num_tokens: int = 2048
    protocol_version: int = PROTOCOL_VERSION
    step_ms: float = 0.0
    end_after: int = 0
    fail_token: int = -1
    die_token: int = -1
    hang_at_step: int = 0
    hold: str = ""
    hold_after: int = 60
    wrong_shape_at_step: int = 0
    repeat_results: bool = False
    checks: bool = False
    attention_window: int = 0
    circle: str = ""
    curve_secret_key: str = ""
    curve_server_key: str = ""


class FakeWorker:
    """One worker group.

    Attributes:
        epoch: Epoch of the current registration; 0 if not registered.
        rejected: The reason why the scheduler rejected the worker.
        error: Exception raised in the worker's thread.
    """

    def __init__(self, config: FakeWorkerConfig) -> None:
        self.config = config
        self.epoch = 0
        self.num_registrations = 0
        self.rejected: worker_pb2.Rejected | None = None
        self.error: BaseException | None = None
        self.registered = threading.Event()
        self.model = self._new_model()
        self._incarnation = random.getrandbits(63)
        self._stop = threading.Event()
        self._freeze = threading.Event()
        self._num_held_steps = 0
        self._says_goodbye = True
        self._next_beat = 0.0
        self._beat_interval = 0.2
        self._thread = threading.Thread(target=self._run, name=f"fake-worker-{config.group_id}", daemon=True)

    def _new_model(self) -> FakeModel:
        config = self.config
        model = FakeModel(
            vocab_size=config.vocab_size,
            tokens_per_block=config.tokens_per_block,
            num_blocks=config.num_blocks,
            end_after=config.end_after,
            fail_token=config.fail_token if config.fail_token >= 0 else None,
            checks=config.checks,
            attention_window=config.attention_window,
        )
        circle = [int(token) for token in config.circle.split(",") if token]
        model.followers = dict(zip(circle, circle[1:] + circle[:1], strict=True))
        return model

    def start(self) -> FakeWorker:
        """Run the worker in a thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the worker as SIGTERM would."""
        self._stop.set()
        self._freeze.clear()
        self._thread.join(5)

    def leave(self) -> None:
        """Finish the current step, send Leave and exit."""
        self._stop.set()

    def kill(self) -> None:
        """Stop the worker without a message, as SIGKILL would."""
        self._says_goodbye = False
        self.stop()

    def freeze(self) -> None:
        """Pause the worker, as SIGSTOP would."""
        self._freeze.set()

    def thaw(self) -> None:
        """Continue the worker, as SIGCONT would."""
        self._freeze.clear()

    def is_alive(self) -> bool:
        """Return whether the worker's thread is running."""
        return self._thread.is_alive()

    def run(self) -> None:
        """Run the worker in this thread until it is stopped."""
        self._run()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 500)
        if self.config.curve_secret_key:
            own = read_key_pair(self.config.curve_secret_key, "")
            WorkerCredentials(own, read_public_key(self.config.curve_server_key, "")).secure(socket)
        socket.connect(self.config.scheduler)
        try:
            self._loop(socket)
        except BaseException as error:
            self.error = error
            raise
        finally:
            if not self._says_goodbye:
                socket.setsockopt(zmq.LINGER, 0)
            socket.close()
            context.term()

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            while self._freeze.is_set() and not self._stop.is_set():
                time.sleep(0.01)
            self._beat(socket)
            if socket.poll(20):
                self._obey(socket, socket.recv())
            if self.rejected is not None:
                return
        if self._says_goodbye and self.epoch:
            self._send(socket, leave=worker_pb2.Leave(epoch=self.epoch, reason="stopped"))

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._beat_interval
        if self.epoch:
            beat = worker_pb2.Heartbeat(epoch=self.epoch, last_step_id=self.model.num_steps)
            self._send(socket, heartbeat=beat)
        else:
            self._send(socket, register=self._registration())

    def _registration(self) -> worker_pb2.Register:
        config = self.config
        return worker_pb2.Register(
            group_id=config.group_id,
            incarnation=self._incarnation,
            kind=kind_pb2.WorkerKind(
                model_fingerprint=config.model_fingerprint,
                weights_root=config.weights_root,
                arithmetic=config.arithmetic,
            ),
            tokens_per_block=config.tokens_per_block,
            num_blocks=config.num_blocks,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_sequence_length,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            world_size=1,
            device="fake",
            protocol_version=config.protocol_version,
            attention_windows=[config.attention_window],
        )

    def _obey(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        message = worker_pb2.SchedulerMessage.FromString(frame)
        kind = message.WhichOneof("message")
        if kind == "registered":
            self.epoch = message.registered.epoch
            self.num_registrations += 1
            self.model = self._new_model()
            self._beat_interval = message.registered.heartbeat_interval_ms / 1e3
            self.registered.set()
        elif kind == "rejected":
            self.rejected = message.rejected
        elif kind == "epoch_ended" and message.epoch_ended.epoch == self.epoch:
            self.epoch = 0
            self._next_beat = 0.0
        elif kind == "step_batch" and message.step_batch.epoch == self.epoch:
            self._step(socket, message.step_batch)

    def _step(self, socket: zmq.Socket[bytes], batch: worker_pb2.StepBatch) -> None:
        config = self.config
        if config.die_token >= 0 and any(config.die_token in added.token_ids for added in batch.add_sequences):
            self._says_goodbye = False
            self._stop.set()
            return
        if config.hang_at_step and batch.step_id >= config.hang_at_step:
            return
        if config.step_ms:
            time.sleep(config.step_ms / 1e3)
        if config.hold:
            self._hold(socket)
        result = self.model.step(batch)
        if batch.step_id == config.wrong_shape_at_step:
            result.token_ids.append(0)
        self._send(socket, step_result=result)
        if config.repeat_results:
            self._send(socket, step_result=result)

    def _hold(self, socket: zmq.Socket[bytes]) -> None:
        file, until = Path(self.config.hold), time.monotonic() + HELD_STEP_S
        self._num_held_steps = self._num_held_steps + 1 if file.exists() else 0
        if self._num_held_steps <= self.config.hold_after:
            return
        while time.monotonic() < until and file.exists() and not self._stop.is_set():
            self._beat(socket)
            time.sleep(0.01)

    def _send(
        self,
        socket: zmq.Socket[bytes],
        *,
        register: worker_pb2.Register | None = None,
        heartbeat: worker_pb2.Heartbeat | None = None,
        step_result: worker_pb2.StepResult | None = None,
        leave: worker_pb2.Leave | None = None,
    ) -> None:
        message = worker_pb2.WorkerMessage(register=register, heartbeat=heartbeat, step_result=step_result, leave=leave)
        socket.send(message.SerializeToString())


def main() -> None:
    """Run the worker as a process until it is killed."""
    parser = argparse.ArgumentParser(description="Run a worker without a model.")
    for name, item in FakeWorkerConfig.__dataclass_fields__.items():
        if isinstance(item.default, bool):
            parser.add_argument("--" + name.replace("_", "-"), action="store_true")
        else:
            parser.add_argument("--" + name.replace("_", "-"), type=type(item.default), default=item.default)
    worker = FakeWorker(FakeWorkerConfig(**vars(parser.parse_args())))
    signal.signal(signal.SIGTERM, lambda *_: worker.leave())
    worker.run()


if __name__ == "__main__":
    main()
