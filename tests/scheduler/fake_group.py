"""A worker group without sockets or a model."""

from __future__ import annotations

from collections import deque

from gpu_worker.kept_blocks import KeptBlocks
from protos import worker_pb2
from scheduler.effects import StepPlan
from scheduler.events import StepDone, WorkerRegistered
from scheduler.wire import decode_worker_message
from tests.fakes.model import FakeModel


class FakeGroup:
    """A worker group in memory: plans that wait to be run, results that wait to be delivered."""

    def __init__(self, name: str, registration: WorkerRegistered, model: FakeModel) -> None:
        self.name = name
        self.registration = registration
        self.model = model
        self.epoch = 0
        self.kept = KeptBlocks()
        self.plans: deque[StepPlan] = deque()
        self.batches: deque[worker_pb2.StepBatch] = deque()

    def run(self, time_ns: int) -> StepDone:
        """Runs the oldest step, through the wire format and back."""
        self.plans.popleft()
        result = self.model.step(self.batches.popleft())
        frame = worker_pb2.WorkerMessage(step_result=result).SerializeToString()
        event = decode_worker_message(frame, self.registration.connection, time_ns)
        assert isinstance(event, StepDone)
        self.kept.finish(event.step_id)
        return event

    def keep(self, batch: worker_pb2.StepBatch) -> None:
        """Receives a step."""
        self.kept.receive(batch)
        self.batches.append(batch)

    def begin_anew(self) -> worker_pb2.Register:
        """The epoch is over; the process and its blocks stay. What it says of them as it registers again."""
        self.kept.end_epoch()
        register = worker_pb2.Register()
        self.kept.write(register)
        return register
