"""The scheduler's core and a model runner, joined by the wire's messages, in one process and without time."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Sequence

from gpu_worker.lora.messages import AdapterMessages
from gpu_worker.model_runner import ModelRunner
from gpu_worker.wire import decode_step, encode_result
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core import SchedulerCore
from scheduler.core_config import PROTOCOL_VERSION, CoreConfig
from scheduler.effects import Effect, IterationDone, StepPlan
from scheduler.events import Event, Recovered, StepDone, Submitted, Turn, WorkerLeft, WorkerRegistered
from scheduler.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.request import Request
from scheduler.request_codec import ModelLimits, spec_from_proto
from scheduler.request_scheduler import SimpleScheduler
from scheduler.stats import IterationStats
from scheduler.tables import table_parts
from scheduler.wire import decode_worker_message, encode_step


class Whole:
    """One core over one runner.

    Attributes:
        stats: Of every iteration.
    """

    def __init__(self, runner: ModelRunner, end_ids: tuple[int, ...], *, num_blocks: int = 0) -> None:
        self.runner = runner
        description = runner.model.description
        self.limits = ModelLimits(max_sequence_length=runner.max_sequence_length, end_ids=end_ids)
        config = CoreConfig(
            scheduler_epoch=1, vocab_size=description.vocab_size, max_sequence_length=runner.max_sequence_length
        )
        policy = SimpleScheduler(CAPACITY_SCHEDULERS["max_utilization"](), MICRO_BATCH_SCHEDULERS["inflight_fused"]())
        self.core = SchedulerCore(config, policy)
        self.stats: list[IterationStats] = []
        self._num_blocks = num_blocks or runner.kv.num_blocks
        self._names = itertools.count()
        self._plans: deque[StepPlan] = deque()
        self._adapters = AdapterMessages(runner.adapters, lambda: None)
        self._join()

    def _join(self) -> None:
        self.runner.clear()
        self._plans.clear()
        self._connection = f"{next(self._names)}".encode()
        self.handle(
            WorkerRegistered(
                time_ns=1,
                connection=self._connection,
                group_id=self._connection.decode(),
                incarnation=1,
                model_fingerprint="",
                tokens_per_block=16,
                num_blocks=self._num_blocks,
                vocab_size=self.core.config.vocab_size,
                max_sequence_length=self.limits.max_sequence_length,
                max_batch_size=64,
                max_num_tokens=self.runner.max_num_tokens,
                protocol_version=PROTOCOL_VERSION,
                lora_cache_bytes=self.runner.adapters.device_bytes,
            )
        )

    def handle(self, event: Event) -> list[Effect]:
        """Hands an event in and keeps the plans that follow."""
        effects = self.core.handle(event)
        for effect in effects:
            if isinstance(effect, StepPlan):
                self._plans.append(effect)
            elif isinstance(effect, IterationDone):
                self.stats.append(effect.stats)
        return effects

    def step(self) -> bool:
        """Takes a turn and runs the oldest step; False when there is none."""
        self.handle(Turn(1))
        if not self._plans:
            return False
        plan = self._plans.popleft()
        message = worker_pb2.SchedulerMessage.FromString(encode_step(plan, self.limits))
        for part in table_parts(plan):
            self._adapters.keep(worker_pb2.SchedulerMessage.FromString(part).prompt_table)
        step = self._adapters.complete(decode_step(message.step_batch))
        assert step is not None
        *_, result = encode_result(step.epoch, step.step_id, self.runner.run_step(step), 0.0)
        event = decode_worker_message(result.SerializeToString(), self._connection, 1)
        assert isinstance(event, StepDone)
        self.handle(event)
        return True

    def lose_worker(self) -> None:
        """The worker goes, and comes back empty."""
        group = self.core.groups[0]
        self._plans.clear()
        self.handle(WorkerLeft(1, self._connection, group.epoch))
        self._join()

    def submit(self, request: pb.GenerateRequest) -> Request:
        """Submits a request."""
        self.handle(Submitted(1, spec_from_proto(request, self.limits, 1)))
        return self.core.lifecycle.requests[request.request_id]

    def recover(self, request: Request) -> None:
        """Takes in what a journal would hold of a request of another core."""
        outputs = tuple(array("I", sequence.output) for sequence in request.sequences)
        steps = tuple(request.beams.search.steps) if request.beams is not None else ()
        ends = tuple((s.index, s.end) for s in request.sequences if s.end is not None)
        self.handle(Recovered(1, request.spec, outputs, ends, beam_steps=steps))

    def run(self, requests: Sequence[pb.GenerateRequest]) -> list[Request]:
        """Runs requests together to their ends."""
        made = [self.submit(request) for request in requests]
        while self.step():
            pass
        group = self.core.groups[0]
        assert group.blocks.num_held == 0
        assert self.core.totals.num_conservation_violations == 0
        return made


def outputs(request: Request) -> list[list[int]]:
    """The output of each sequence."""
    ends = [sequence.end for sequence in request.sequences]
    assert all(ends), "a sequence has not ended"
    return [s.output[: s.end.num_tokens].tolist() for s in request.sequences if s.end is not None]
