"""The scheduler's core and a model runner in one process, connected by wire messages, without real time."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_worker.lora.messages import AdapterMessages
from gpu_worker.model_runner import ModelRunner
from gpu_worker.scheduler_link.messages import decode_step, encode_result
from midstream.clock import SteadyClock
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import PROTOCOL_VERSION, CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import BeamsAdvanced, Effect, IterationDone, StepPlan
from scheduler.core.events import Event, Recovered, StepDone, Submitted, Turn, WorkerLeft, WorkerRegistered
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request import FinishReason, Request, Sequence
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.core.stats import IterationStats
from scheduler.edge.beam_outputs import report_beams
from scheduler.journal import is_entry
from scheduler.journal.records import replay
from scheduler.journal.sqlite import SqliteStore
from scheduler.journal.store import Store
from scheduler.journal.writer import RowWriter, kept_of
from scheduler.wire.prompt_tables import table_parts
from scheduler.wire.requests import ModelLimits, spec_from_proto
from scheduler.wire.worker_messages import decode_worker_message, encode_step

FINGERPRINT = "a model's"


class Whole:
    """One core over one runner.

    Attributes:
        stats: Of every iteration.
    """

    def __init__(
        self,
        runner: ModelRunner,
        end_ids: tuple[int, ...],
        *,
        num_blocks: int = 0,
        max_batch_size: int = 64,
        max_num_tokens: int = 0,
        journal: Path | None = None,
        capacity: str = "max_utilization",
        batching: str = "inflight_fused",
        **config: Any,
    ) -> None:
        """Keeps a journal where it is told to; `config` are settings of the core."""
        self.runner = runner
        description = runner.model.description
        self.limits = ModelLimits(max_sequence_length=runner.max_sequence_length, end_ids=end_ids)
        self._config = CoreConfig(
            scheduler_epoch=1,
            vocab_size=description.vocab_size,
            max_sequence_length=runner.max_sequence_length,
            tokens_per_block=runner.kv.tokens_per_block,
            **config,
        )
        self._policies = capacity, batching
        self._journal = journal
        self.stats: list[IterationStats] = []
        self._num_blocks = num_blocks or runner.kv.num_blocks
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens or runner.max_num_tokens
        self._names = itertools.count()
        self._plans: deque[StepPlan] = deque()
        self._adapters = AdapterMessages(runner.adapters, lambda: None)
        self._start()

    def _start(self) -> None:
        capacity, batching = self._policies
        policy = SimpleScheduler(CAPACITY_SCHEDULERS[capacity](), MICRO_BATCH_SCHEDULERS[batching]())
        self.core = SchedulerCore(self._config, policy)
        self._store: Store | None = None
        if self._journal is not None:
            self._store, clock = SqliteStore(self._journal), SteadyClock()
            self._config = replace(self._config, scheduler_epoch=self._store.take_over(least_epoch=1))
            stored = replay(self._store.read(), self.limits, FINGERPRINT, clock).requests.values()
            known = {item.recovered.spec.request_id: kept_of(item) for item in stored}
            self._writer = RowWriter(known, FINGERPRINT, clock)
            for item in stored:
                self.handle(item.event(1))
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
                tokens_per_block=self.core.config.tokens_per_block,
                num_blocks=self._num_blocks,
                vocab_size=self.core.config.vocab_size,
                max_sequence_length=self.limits.max_sequence_length,
                max_batch_size=self._max_batch_size,
                max_num_tokens=self._max_num_tokens,
                protocol_version=PROTOCOL_VERSION,
                lora_cache_bytes=self.runner.adapters.device_bytes,
                attention_windows=self.runner.model.description.reaches,
                features=("recurrent_state",) if self.runner.model.description.state_size else (),
                max_attention_window=self.core.config.max_attention_window,
                sink_token_length=self.core.config.sink_token_length,
            )
        )

    def handle(self, event: Event) -> list[Effect]:
        """Pass an event to the core and keep the resulting plans."""
        effects = self.core.handle(event)
        for effect in effects:
            if isinstance(effect, BeamsAdvanced):
                report_beams(effect.request)
        if self._store is not None:
            entries = [effect for effect in effects if is_entry(effect)]
            self._store.write(self._writer.transaction(entries))  # type: ignore[arg-type]
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
        *tensors, result = encode_result(step.epoch, step.step_id, self.runner.run_step(step), 0.0)
        event = decode_worker_message(result.SerializeToString(), self._connection, 1)
        assert isinstance(event, StepDone)
        outputs = [(item.row, item.SerializeToString()) for part in tensors for item in part.step_outputs.outputs]
        self.handle(replace(event, outputs=(*outputs, *event.outputs)))
        return True

    def lose_worker(self) -> None:
        """Lose the worker and register it again, empty."""
        group = self.core.groups[0]
        self._plans.clear()
        self.handle(WorkerLeft(1, self._connection, group.epoch))
        self._join()

    def lose_scheduler(self) -> None:
        """Replace the scheduler by a new one that starts from its journal."""
        assert self._store is not None
        self._store.close()
        self._start()

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

    def run(self, requests: ListOf[pb.GenerateRequest]) -> list[Request]:
        """Run requests together to completion."""
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


class LogProb(NamedTuple):
    """Of one token; `top` are the likeliest ones."""

    log_prob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Contents:
    """Everything that a client receives for one sequence.

    Attributes:
        log_probs: Of each token: its own, and (token, log probability) of the likeliest.
        prompt_log_probs: The same of the prompt's tokens from the second on.
        tensors: Whole ones, as one row of numbers each.
    """

    tokens: list[int]
    reason: FinishReason
    stop_token_id: int | None
    cumulative_log_prob: float | None
    log_probs: list[LogProb] = field(default_factory=list)
    prompt_log_probs: list[LogProb] = field(default_factory=list)
    tensors: dict[str, bytes] = field(default_factory=dict)

    def array(self, name: str, width: int) -> NDArray[np.float32]:
        """A tensor of floats with rows of `width`."""
        return np.frombuffer(self.tensors[name], dtype=np.float32).reshape(-1, width)


def contents(request: Request) -> list[Contents]:
    """Of each sequence of a request that has ended without an error."""
    assert request.failure is None, request.failure
    return [_contents(sequence) for sequence in request.sequences]


def _contents(sequence: Sequence) -> Contents:
    end = sequence.end
    assert end is not None
    tokens = sequence.output[: end.num_tokens].tolist()
    made = Contents(tokens, end.reason, end.stop_token_id, end.cumulative_log_prob)
    own: dict[int, LogProb] = {}
    pieces: dict[str, dict[int, bytes]] = {}
    for item in sequence.outputs:
        row = worker_pb2.RowOutputs.FromString(item.data)
        for tensor in row.tensors:
            pieces.setdefault(tensor.name, {})[tensor.data_offset] = tensor.data
        made.prompt_log_probs += _log_probs(row.prompt_log_probs)
        own |= dict(enumerate(_log_probs(row.log_probs), item.token_offset))
    made.log_probs = [own[place] for place in range(len(tokens))] if own else []
    made.tensors = {name: b"".join(parts[at] for at in sorted(parts)) for name, parts in sorted(pieces.items())}
    return made


def _log_probs(message: pb.LogProbs) -> list[LogProb]:
    top = list(zip(message.top_token_ids, message.top_log_probs, strict=True))
    count = message.top_k
    rows = zip(message.token_log_probs, message.token_ranks, strict=True)
    return [LogProb(value, rank, top[i * count : (i + 1) * count]) for i, (value, rank) in enumerate(rows)]
