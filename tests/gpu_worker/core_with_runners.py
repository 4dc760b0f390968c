"""The scheduler's core and model runners in one process, connected by wire messages, independent of real time."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_worker.batch.step import Step
from gpu_worker.kv.kept_blocks import KeptBlocks
from gpu_worker.lora.messages import AdapterMessages
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.scheduler_link.messages import decode_step, encode_result
from midstream.clock import SteadyClock
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS
from scheduler.core.config import PROTOCOL_VERSION, CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import BeamsAdvanced, Effect, FetchBlocks, GroupJoined, IterationDone, StepPlan
from scheduler.core.events import (
    BlocksFetched,
    Event,
    Recovered,
    StepDone,
    Submitted,
    Turn,
    WorkerBeat,
    WorkerLeft,
    WorkerRegistered,
)
from scheduler.core.kind import Kind
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS
from scheduler.core.request import FinishReason, Request, Sequence
from scheduler.core.request_scheduler import SimpleScheduler
from scheduler.core.stats import IterationStats
from scheduler.edge.beam_outputs import report_beams
from scheduler.journal import is_entry
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.records import replay
from scheduler.journal.writer import RowWriter, kept_of
from scheduler.wire.prompt_tables import table_parts
from scheduler.wire.requests import ModelLimits, spec_from_proto
from scheduler.wire.worker_messages import decode_worker_message, encode_step

FINGERPRINT = "a model's"


class Member:
    """A runner that serves the core as a worker, with the tiers and role that its settings specify."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.adapters = AdapterMessages(runner.adapters, lambda: None)
        self.connection, self.epoch = b"", 0
        tiers = runner.kv.tiers
        self._kept = KeptBlocks(runner.kv.block_hashes, None if tiers is None else tiers.offer)
        self._in_flight: deque[tuple[Step, Launched]] = deque()

    def begin(self, connection: bytes) -> dict[str, Any]:
        """Start with an empty pool; return the fields of the registration that describe the pool and the tiers."""
        self.runner.clear()
        self._in_flight.clear()
        self._kept.clear()
        self.connection = connection
        kv = self.runner.kv
        role = "prefill" if kv.server is not None else "decode" if kv.fetcher is not None else "both"
        return {
            "kv_store": kv.store_name,
            "kv_source": "" if kv.server is None else str(kv.server.source),
            "role": role,
            "block_kind": kv.transfer_kind,
            "tier_store": "" if kv.tiers is None else kv.tiers.name,
            "stored_hashes": () if kv.tiers is None else tuple(kv.tiers.hashes()),
        }

    def join(self, epoch: int) -> None:
        """Start an epoch."""
        self.epoch = epoch
        if self.runner.kv.fetcher is not None:
            self.runner.kv.fetcher.begin_epoch(epoch)

    def run(self, plan: StepPlan) -> Iterator[Event]:
        """Launch a step, after finishing the steps that it depends on; then finish steps until the number in flight is
        below the number of pipeline stages. Yield the events.
        """
        batch = worker_pb2.SchedulerMessage.FromString(encode_step(plan)).step_batch
        for part in table_parts(plan):
            self.adapters.keep(worker_pb2.SchedulerMessage.FromString(part).prompt_table)
        step = self.adapters.complete(decode_step(batch))
        assert step is not None
        self._kept.receive(batch)
        if self.runner.kv.tiers is not None:
            self.runner.kv.tiers.receive(batch)
        while self._in_flight and self.runner.must_finish_before(step):
            yield from self.finish()
        self._in_flight.append((step, self.runner.launch(step)))
        while len(self._in_flight) >= self.runner.num_micro_batches:
            yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Finish the oldest step, if any; yield its result, and a heartbeat if blocks were stored."""
        if not self._in_flight:
            return
        step, launched = self._in_flight.popleft()
        output = self.runner.finish(launched)
        self._kept.finish(step.step_id, is_whole=output.is_whole)
        *tensors, result = encode_result(step.epoch, step.step_id, output, 0.0)
        event = decode_worker_message(result.SerializeToString(), self.connection, 1)
        assert isinstance(event, StepDone)
        outputs = [(item.row, item.SerializeToString()) for part in tensors for item in part.step_outputs.outputs]
        yield replace(event, outputs=(*outputs, *event.outputs))
        tiers = self.runner.kv.tiers
        if tiers is not None:
            assert tiers.wait_until_stored(30)
            changes = tiers.changes()
            yield WorkerBeat(1, self.connection, self.epoch, 0, (0, 0, 0), changes.stored, changes.removed)

    def fetch(self, effect: FetchBlocks) -> BlocksFetched:
        """Fetch blocks from another member."""
        fetcher = self.runner.kv.fetcher
        assert fetcher is not None
        fetcher.fetch(effect.epoch, effect.hashes, effect.kv_store, effect.kv_source)
        found = fetcher._reports.get(timeout=240)
        return BlocksFetched(1, self.connection, found.epoch, found.hashes, found.missing)


class CoreWithRunners:
    """A core with one or more runners.

    Attributes:
        stats: Statistics of every iteration.
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
        others: ListOf[ModelRunner] = (),
        capacity: str = "max_utilization",
        batching: str = "inflight_fused",
        **config: Any,
    ) -> None:
        """Create the core, with a log at `journal` if set.

        `others` are additional runners; `config` has settings of the core.
        """
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
        self._work: deque[StepPlan | FetchBlocks] = deque()
        self._members = [Member(item) for item in (runner, *others)]
        self._start()

    def _start(self) -> None:
        capacity, batching = self._policies
        policy = SimpleScheduler(CAPACITY_SCHEDULERS[capacity](), MICRO_BATCH_SCHEDULERS[batching]())
        self.core = SchedulerCore(self._config, policy)
        self._store: LogStore | None = None
        if self._journal is not None:
            clock = SteadyClock()
            self._store = LogStore(LogFolder(self._journal))
            self._config = replace(self._config, scheduler_epoch=self._store.take_over(least_epoch=1))
            stored = replay(self._store.read(), self.limits, FINGERPRINT, clock).requests.values()
            known = {item.recovered.spec.request_id: kept_of(item) for item in stored}
            self._writer = RowWriter(known, FINGERPRINT, clock, folds_commits=False)
            for item in stored:
                self.handle(item.event(1))
        self._work.clear()
        for member in self._members:
            self._join(member)

    def _join(self, member: Member) -> None:
        name = str(next(self._names))
        self.handle(
            WorkerRegistered(
                **member.begin(name.encode()),
                time_ns=1,
                connection=member.connection,
                group_id=name,
                incarnation=1,
                kind=Kind(),
                tokens_per_block=self.core.config.tokens_per_block,
                num_blocks=self._num_blocks,
                vocab_size=self.core.config.vocab_size,
                max_sequence_length=self.limits.max_sequence_length,
                max_batch_size=self._max_batch_size,
                max_num_tokens=self._max_num_tokens,
                protocol_version=PROTOCOL_VERSION,
                lora_cache_bytes=self.runner.adapters.device_bytes,
                attention_windows=() if self.runner.model.is_encoder else self.runner.model.description.reaches,
                num_micro_batches=member.runner.num_micro_batches,
                features=("recurrent_state",) * bool(self.runner.model.description.state_size)
                + ("whole_prompts",) * self.runner.model.is_encoder,
                max_attention_window=self.core.config.max_attention_window,
                sink_token_length=self.core.config.sink_token_length,
            )
        )

    def handle(self, event: Event) -> list[Effect]:
        """Pass an event to the core and keep the resulting plans."""
        effects = self.core.handle(event)
        for effect in effects:
            if isinstance(effect, BeamsAdvanced):
                report_beams(effect.request, effect.num_reported)
        if self._store is not None:
            entries = [effect for effect in effects if is_entry(effect)]
            self._store.write(self._writer.transaction(entries))
        for effect in effects:
            if isinstance(effect, StepPlan | FetchBlocks):
                self._work.append(effect)
            elif isinstance(effect, GroupJoined):
                self._member(effect.connection).join(effect.epoch)
            elif isinstance(effect, IterationDone):
                self.stats.append(effect.stats)
        return effects

    def _member(self, connection: bytes) -> Member:
        return next(member for member in self._members if member.connection == connection)

    def step(self) -> bool:
        """Run the oldest planned step or fetch; if there is none, finish the oldest launched step of each runner.
        Return False if nothing is left to do.
        """
        self.handle(Turn(1))
        if not self._work:
            events = [event for member in self._members for event in member.finish()]
            for event in events:
                self.handle(event)
            return bool(events) or self._end_delays()
        work = self._work.popleft()
        member = self._member(work.connection)
        for event in [member.fetch(work)] if isinstance(work, FetchBlocks) else member.run(work):
            self.handle(event)
        return True

    def _end_delays(self) -> bool:
        """End the delays of requests whose worker was not ready, since the clock does not advance.

        Returns:
            False if no request was delayed.
        """
        is_any_held = any(self.core.queue.is_held(request) for request in self.core.queue)
        self.core.queue.release_due(1 << 62)
        return is_any_held

    def lose_worker(self, number: int = 0) -> None:
        """Simulate the loss of a worker that then registers again with an empty pool."""
        member = self._members[number]
        self._work = deque(work for work in self._work if work.connection != member.connection)
        self.handle(WorkerLeft(1, member.connection, member.epoch))
        self._join(member)

    def lose_scheduler(self) -> None:
        """Replace the scheduler with one that recovers from its journal."""
        assert self._store is not None
        self._store.close()
        self._start()

    def submit(self, request: pb.GenerateRequest) -> Request:
        """Submit a request."""
        self.handle(Submitted(1, spec_from_proto(request, self.limits, 1)))
        return self.core.lifecycle.requests[request.request_id]

    def recover(self, request: Request) -> None:
        """Restore a request of another core from the data that a journal would contain."""
        outputs = tuple(array("I", sequence.output) for sequence in request.sequences)
        steps = tuple(request.beams.search.steps) if request.beams is not None else ()
        ends = tuple((s.index, s.end) for s in request.sequences if s.end is not None)
        self.handle(Recovered(1, request.spec, outputs, ends, beam_steps=steps))

    def run(self, requests: ListOf[pb.GenerateRequest]) -> list[Request]:
        """Run requests concurrently until all have ended."""
        made = [self.submit(request) for request in requests]
        while self.step():
            pass
        assert not any(group.blocks.num_held for group in self.core.groups)
        assert self.core.totals.num_conservation_violations == 0
        return made


def outputs(request: Request) -> list[list[int]]:
    """Return the output of each sequence."""
    ends = [sequence.end for sequence in request.sequences]
    assert all(ends), "a sequence has not ended"
    return [s.output[: s.end.num_tokens].tolist() for s in request.sequences if s.end is not None]


class LogProb(NamedTuple):
    """A token's log probability; `top` are the most likely tokens."""

    log_prob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Contents:
    """Everything that a client receives for one sequence.

    Attributes:
        log_probs: For each token, its log probability and the (token, log probability) pairs of the most likely tokens.
        prompt_log_probs: The same for the tokens of the prompt, starting with the second.
        tensors: Complete tensors, flattened.
    """

    tokens: list[int]
    reason: FinishReason
    stop_token_id: int | None
    cumulative_log_prob: float | None
    log_probs: list[LogProb] = field(default_factory=list)
    prompt_log_probs: list[LogProb] = field(default_factory=list)
    tensors: dict[str, bytes] = field(default_factory=dict)

    def array(self, name: str, width: int) -> NDArray[np.float32]:
        """Return a float tensor with rows of `width`."""
        return np.frombuffer(self.tensors[name], dtype=np.float32).reshape(-1, width)


def contents(request: Request) -> list[Contents]:
    """Return the contents of each sequence of a request that ended without an error."""
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
