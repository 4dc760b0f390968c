"""The scheduler's side of the worker protocol, driven by tests, and a real worker process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq

from protos import worker_pb2

PROMPT = [5, 17, 200, 33, 8, 90, 1]

TIMEOUT_MS = 150_000


class ScriptedScheduler:
    """A ROUTER socket that keeps the identity of the worker that sent the last message."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://{host}:{port or '*'}")
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        self.address = address.decode().rstrip("\0")
        self.identity = b""
        self.epoch = 0

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def receive(self, kind: str, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of this kind that `accept` matches; skip other messages."""
        while True:
            if not self._socket.poll(TIMEOUT_MS):
                raise TimeoutError(f"no {kind} came")
            self.identity, frame = self._socket.recv_multipart()
            message = worker_pb2.WorkerMessage.FromString(frame)
            if message.WhichOneof("message") == kind and accept(getattr(message, kind)):
                return getattr(message, kind)

    def send(self, **message: Any) -> None:
        self.send_raw(worker_pb2.SchedulerMessage(**message).SerializeToString())

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self.identity, *frames])

    def register(self, epoch: int) -> worker_pb2.Register:
        """Receive the worker's next Register message and answer it."""
        register: worker_pb2.Register = self.receive("register")
        self.epoch = epoch
        self.send(registered=worker_pb2.Registered(epoch=epoch, heartbeat_interval_ms=50, timeout_ms=1_000_000))
        return register

    def send_step(self, step_id: int, **fields: Any) -> None:
        self.send(step_batch=worker_pb2.StepBatch(**{"epoch": self.epoch, "step_id": step_id, **fields}))

    def run_step(self, step_id: int, **fields: Any) -> worker_pb2.StepResult:
        self.send_step(step_id, **fields)
        result: worker_pb2.StepResult = self.receive("step_result")
        assert (result.epoch, result.step_id) == (self.epoch, step_id)
        return result

    def close(self) -> None:
        self._context.destroy(linger=0)


def rank_environment(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the environment variables for the process of a rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


@contextmanager
def worker_process(
    scheduler: str,
    folder: Path,
    *flags: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    on: Sequence[str] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Run a worker that connects to `scheduler`; kill it on exit. `on` is a command that starts it."""
    command = [sys.executable, "-m", "gpu_worker", "--scheduler", scheduler, "--model", str(folder), "--device", "cpu"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MIDSTREAM_")}
    process = subprocess.Popen(
        [*on, *command, "--max-kv-tokens", "4096", "--max-batch-size", "8", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | dict(variables),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def greedy(row: int, tokens: Sequence[int], **fields: Any) -> worker_pb2.AddSequence:
    """Return a greedy sequence whose blocks start at 8 * row."""
    add = worker_pb2.AddSequence(
        row=row,
        request_id=f"r{row}",
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_ids=range(8 * row, 8 * row + 8),
    )
    add.sampling.temperature = 0.0
    add.MergeFrom(worker_pb2.AddSequence(**fields))
    return add


def run_prompt(scheduler: ScriptedScheduler, num_tokens: int) -> list[int]:
    """Run PROMPT, starting with step 1, with two steps in flight."""
    scheduler.send_step(1, add_sequences=[greedy(0, PROMPT)], context_rows=[0], context_starts=[0], context_lengths=[7])
    scheduler.send_step(2, generation_rows=[0])
    tokens = []
    for step_id in range(1, num_tokens + 1):
        if 2 <= step_id < num_tokens:
            scheduler.send_step(step_id + 1, repeat_generation=True)
        result = scheduler.receive("step_result")
        assert (result.epoch, result.step_id) == (scheduler.epoch, step_id)
        tokens += result.token_ids
    return tokens
