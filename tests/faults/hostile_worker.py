"""A worker that sends arbitrary messages and a healthy worker, connected to a real scheduler.

python -m tests.faults.hostile_worker --messages 20000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import zmq

from protos import generation_pb2, kind_pb2, worker_pb2
from scheduler.core import standing
from tests.fakes.model import FakeModel, ProtocolError
from tests.faults.mutation import Mutator
from tests.scheduler.running_scheduler import MODEL, RunningScheduler, run_scheduler
from tests.scheduler.test_service import Feed

_NUM_STREAMS = 8
_MAX_TOKENS = 24
_END_WITHIN_S = 60.0
_KINDS = [field.name for field in worker_pb2.WorkerMessage.DESCRIPTOR.fields]
# With the default hold-off, most of the worker's messages would have no effect.
_SHORT_PAUSE_NS = 1_000_000


class HostileWorker:
    """A worker that mutates most of the messages that it sends.

    Attributes:
        num_mutated: Number of mutated messages.
        paths: Paths of the mutated fields.
        seen: Requests that this worker ran; their output may be wrong.
    """

    def __init__(self, address: str, seed: int, scheduler: RunningScheduler) -> None:
        self.num_mutated = 0
        self.paths: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._address = address
        self._cell = scheduler
        self._dice = random.Random(seed)
        self._mutator = Mutator(self._dice, self._numbers, lambda: ("healthy", "hostile"))
        self._epoch = 0
        self._is_waiting = False
        self._model = self._new_model()
        self._last = b""
        self.thread = threading.Thread(target=self._run, name="hostile-worker", daemon=True)

    def _new_model(self) -> FakeModel:
        return FakeModel(vocab_size=MODEL.vocab_size, tokens_per_block=16, num_blocks=256)

    def _numbers(self) -> list[int]:
        """Return the epochs of all workers, and an epoch that no worker has."""
        epochs = [group.epoch for group in self._cell.service.engine.core.groups]
        return [*epochs, self._epoch, self._epoch - 1]

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._address)
            try:
                while not self.stop.is_set():
                    if not self._epoch and not self._is_waiting:
                        self._is_waiting = True
                        self._say(socket, worker_pb2.WorkerMessage(register=self._registration()), 0.3)
                    if socket.poll(2):
                        self._obey(socket, worker_pb2.SchedulerMessage.FromString(socket.recv()))
                    else:
                        self._is_waiting = False  # no answer, so register again later
                        self._say(socket, self._unasked(), 0.9)
            except BaseException as error:
                self.error = error
                raise

    def _registration(self) -> worker_pb2.Register:
        return worker_pb2.Register(
            group_id="hostile", incarnation=self._dice.getrandbits(60),
            kind=kind_pb2.WorkerKind(model_fingerprint="print"),
            tokens_per_block=16, num_blocks=256, vocab_size=MODEL.vocab_size, max_sequence_length=4096,
            max_batch_size=64, max_num_tokens=512, world_size=1, device="fake", protocol_version=1,
        )  # fmt: skip

    def _obey(self, socket: zmq.Socket[bytes], message: worker_pb2.SchedulerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "registered":
            self._epoch, self._model = message.registered.epoch, self._new_model()
        elif kind in ("rejected", "epoch_ended"):
            self._epoch, self._is_waiting = 0, False
        elif kind == "step_batch":
            self.seen |= {added.request_id for added in message.step_batch.add_sequences}
            try:
                result = self._model.step(message.step_batch)
            except (ProtocolError, KeyError):
                return  # the mutated messages have corrupted this worker's state
            self._say(socket, worker_pb2.WorkerMessage(step_result=result), 0.5)

    def _unasked(self) -> worker_pb2.WorkerMessage:
        """Return a random message of any kind."""
        message = worker_pb2.WorkerMessage()
        kind = self._dice.choice(_KINDS)
        part = getattr(message, kind)
        part.SetInParent()
        if kind == "register":
            part.CopyFrom(self._registration())
        else:
            part.epoch = self._epoch
        for _ in range(self._dice.randint(0, 3)):
            self._mutator.mutate(part)
        return message

    def _say(self, socket: zmq.Socket[bytes], message: worker_pb2.WorkerMessage, share: float) -> None:
        """Send a message. With the probability `share` it is mutated in its fields, repeated, delayed, damaged or
        dropped.
        """
        dice = self._dice
        if dice.random() >= share:
            socket.send(message.SerializeToString())
            return
        self.num_mutated += 1
        how = dice.choice(
            ("field", "field", "field", "field", "fields", "twice", "again", "never", "bytes", "cut", "parts")
        )
        if how in ("field", "fields"):
            for _ in range(1 if how == "field" else 4):
                self.paths[self._mutator.mutate(message)] += 1
        frame = message.SerializeToString()
        if how == "twice":
            socket.send(frame)
        elif how == "again":
            frame = self._last
        elif how == "bytes" and frame:
            place = dice.randrange(len(frame))
            frame = frame[:place] + dice.randbytes(1) + frame[place + 1 :]
        elif how == "cut":
            frame = frame[: dice.randrange(len(frame) + 1)]
        self._last = frame
        if how == "parts":
            socket.send_multipart([frame, frame])
        elif how != "never":
            socket.send(frame)


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        problems: Violations that were found.
        num_own: Number of requests that only the healthy worker ran; all of them must complete correctly.
    """

    num_mutated: int = 0
    num_requests: int = 0
    num_own: int = 0
    num_faults: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def run(num_messages: int, seed: int) -> Outcome:
    """Send requests until the given number of messages has been mutated."""
    outcome = Outcome()
    with mock.patch.multiple(standing, FIRST_PAUSE_NS=_SHORT_PAUSE_NS, MAX_PAUSE_NS=_SHORT_PAUSE_NS):
        # A changed registration may have another kind; the requests that ran there wait for it this long.
        patience = {"worker_timeout_ms": 5_000, "heartbeat_interval_ms": 50, "no_worker_timeout_s": 1.0}
        async with run_scheduler(**patience) as scheduler:
            healthy = await scheduler.worker(group_id="healthy")
            worker = HostileWorker(f"tcp://127.0.0.1:{scheduler.service.worker_port}", seed, scheduler)
            worker.thread.start()
            try:
                feed = await Feed.open(scheduler.stub)
                number = 0
                while worker.num_mutated < num_messages and not outcome.problems and worker.error is None:
                    await _round(scheduler, feed, range(number, number + _NUM_STREAMS), worker, outcome)
                    number += _NUM_STREAMS
            finally:
                worker.stop.set()
                await asyncio.to_thread(worker.thread.join, 10)
            core = scheduler.service.engine.core
            outcome.num_mutated, outcome.paths = worker.num_mutated, worker.paths
            outcome.num_faults = core.totals.num_worker_faults
            _judge(scheduler, worker, outcome)
            if not healthy.is_alive():
                outcome.problems.append("the healthy worker has ended")
    return outcome


async def _round(
    scheduler: RunningScheduler, feed: Feed, numbers: range, worker: HostileWorker, outcome: Outcome
) -> None:
    for number in numbers:
        fields = {"output": generation_pb2.OutputConfig(), "client_id": f"client {number % 2}"}
        await scheduler.submit(f"r{number}", [number % 900, 3], _MAX_TOKENS, **fields)
        feed.reader.attach(number, f"r{number}")
    try:
        async with asyncio.timeout(_END_WITHIN_S):
            await feed.read_until(*numbers)
    except TimeoutError:
        outcome.problems.append(f"some of {numbers} have not ended: {sorted(set(numbers) - set(feed.ended))}")
        return
    expected = list(range(4, 4 + _MAX_TOKENS))
    for number in numbers:
        outcome.num_requests += 1
        if f"r{number}" in worker.seen:
            continue
        outcome.num_own += 1
        if feed.tokens[number] != expected or feed.ends[number].finish_reason != generation_pb2.FINISH_REASON_LENGTH:
            outcome.problems.append(f"r{number} of the healthy worker returned {feed.tokens[number]}")


def _judge(scheduler: RunningScheduler, worker: HostileWorker, outcome: Outcome) -> None:
    core, problems = scheduler.service.engine.core, scheduler.service.progress.problems()
    outcome.problems += problems
    if scheduler.service.engine.num_failed_events:
        outcome.problems.append(f"the core failed to handle {scheduler.service.engine.num_failed_events} messages")
    if core.totals.num_quarantined:
        outcome.problems.append("a request was ended because of a worker's faults")
    if core.totals.num_conservation_violations:
        outcome.problems.append("blocks were lost")
    if worker.error is not None:
        outcome.problems.append(f"the hostile worker itself failed: {worker.error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcome = asyncio.run(run(arguments.messages, arguments.seed))
    print(
        f"{outcome.num_mutated} messages were changed in {len(outcome.paths)} fields, {outcome.num_faults} faults "
        f"were counted; {outcome.num_requests} requests ended, {outcome.num_own} of which only the healthy worker "
        "ran"
    )
    print("\n".join(outcome.problems) or "no request of the healthy worker was affected")
    return bool(outcome.problems)


if __name__ == "__main__":
    raise SystemExit(main())
