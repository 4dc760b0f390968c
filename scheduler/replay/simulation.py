"""Runs the real core with simulated workers, in virtual time.

A request's Submitted event waits in a heap of events sorted by time, and the core plans. A simulated worker runs each
plan immediately, and the result waits in the heap until the completion time that the cost model predicts. All events
with the same time are followed by one Turn, as in a running scheduler.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

from scheduler.core.beams import Candidate
from scheduler.core.core import SchedulerCore
from scheduler.core.cost_model import CostModel, StepExtent
from scheduler.core.effects import Effect, Emitted, EpochEnded, FetchBlocks, GroupJoined, StepPlan
from scheduler.core.events import (
    AbortRequested,
    BlocksFetched,
    Event,
    StepDone,
    StopWordFound,
    Submitted,
    Turn,
    WorkerBeat,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.request import Sequence
from scheduler.replay.measures import Measures

_BEAT_NS = 500_000_000
_NS_PER_US = 1_000
# Gap between log probabilities that exceeds any difference between beams.
_UNLIKELY = 1e6


@dataclass(frozen=True, slots=True)
class Script:
    """The scripted output of a sequence: these tokens, then filler; a stop word is found after `stop_after` tokens."""

    tokens: array[int]
    stop_after: int | None = None


class _Row:
    """The state of a row. A beam's row reports `num_candidates` candidates instead of a token; the number is 0 for
    other rows.
    """

    __slots__ = ("fillers", "num_candidates", "num_known", "num_output", "script", "stop_after", "stop_token_ids")

    def __init__(self, sequence: Sequence, num_output: int, script: Script | None, vocab_size: int) -> None:
        request = sequence.request
        self.num_output = num_output
        self.num_known = len(request.spec.prompt) + num_output
        self.script = script.tokens if script else array("I")
        self.stop_after = script.stop_after if script and request.spec.stop_words else None
        self.stop_token_ids = request.spec.stop_token_ids
        self.num_candidates = request.beams.search.num_candidates if request.beams is not None else 0
        ordinary = (token for token in range(3, vocab_size) if token not in self.stop_token_ids)
        self.fillers = list(islice(ordinary, max(self.num_candidates, 1)))

    def sample(self) -> int:
        position = self.num_output
        self.num_output += 1
        self.num_known += 1
        return self.script[position] if position < len(self.script) else self.fillers[0]

    def candidates(self) -> tuple[list[Candidate], list[int]]:
        """Return distinct tokens, the scripted one first, with decreasing log probabilities, and their stop words."""
        first = self.sample()
        others = [token for token in self.fillers if token != first]
        # A scripted stop token must end all beams, so that the search is over as in the recording.
        gap = _UNLIKELY if first in self.stop_token_ids else 1.0
        found = [(token, -gap * rank) for rank, token in enumerate([first, *others][: self.num_candidates])]
        return found, [int(self.num_output == self.stop_after)] * len(found)


class SimulatedWorker:
    """A simulated worker group: it runs its steps in order, and fetches blocks concurrently."""

    def __init__(
        self,
        registration: WorkerRegistered,
        cost: CostModel,
        scripts: Mapping[tuple[str, int], Script],
        extent: StepExtent | None = None,
    ) -> None:
        """Create a worker that adds its steps to `extent`."""
        self.registration = registration
        self._cost = cost
        self._extent = extent or StepExtent()
        self._scripts = scripts
        self.join(0)

    def join(self, epoch: int) -> None:
        """Start an epoch with no occupied rows."""
        self.epoch = epoch
        self._rows: dict[int, _Row] = {}
        self._generating: list[int] = []
        self._free_ns = self._fetched_ns = 0
        self._fetched: set[int] = set()

    def fetch(self, effect: FetchBlocks, now_ns: int) -> BlocksFetched:
        """Fetch the blocks requested at `now_ns`; return the report, which contains its time."""
        duration_ns = int(self._cost.block_us * _NS_PER_US) * len(effect.hashes)
        self._fetched_ns = max(self._fetched_ns, now_ns) + duration_ns
        self._fetched.update(effect.hashes)
        return BlocksFetched(self._fetched_ns, effect.connection, effect.epoch, effect.hashes)

    def run(self, plan: StepPlan, now_ns: int) -> StepDone:
        """Run a plan that was sent at `now_ns`; return the result, which contains its completion time."""
        self._update_rows(plan)
        rows = self._rows
        chunks = zip(plan.context_rows, plan.context_starts, plan.context_lengths, strict=True)
        sampled = [rows[number] for number, start, length in chunks if start + length == rows[number].num_known]
        sampled += [rows[number] for number in self._generating]
        tokens: list[int] = []
        num_tokens: list[int] = []
        log_probs: list[float] = []
        stop_words: list[int] = []
        for row in sampled:
            if row.num_candidates:
                found, words = row.candidates()
                stop_words += words
                tokens += [token for token, _ in found]
                log_probs += [log_prob for _, log_prob in found]
                num_tokens.append(len(found))
            else:
                tokens.append(row.sample())
                num_tokens.append(1)
        asked = zip(plan.adopted_blocks, plan.adopted_hashes, strict=True)
        missing = frozenset(block for block, value in asked if value not in self._fetched)
        self._fetched.difference_update(plan.adopted_hashes)
        wire_ns = int(self._cost.wire_us * _NS_PER_US)
        num_context_tokens, num_rows = sum(plan.context_lengths), len(self._generating)
        self._extent.add(num_context_tokens, num_rows)
        duration_ns = self._cost.step_ns(num_context_tokens, num_rows)
        self._free_ns = max(self._free_ns, now_ns + wire_ns // 2) + duration_ns
        return StepDone(
            self._free_ns + wire_ns // 2,
            plan.connection,
            plan.epoch,
            plan.step_id,
            tokens,
            num_tokens if log_probs else [],
            forward_us=duration_ns // _NS_PER_US,
            candidate_log_probs=log_probs,
            candidate_stop_words=stop_words,
            missing_blocks=missing,
        )

    def _update_rows(self, plan: StepPlan) -> None:
        for number in plan.released_rows:
            del self._rows[number]
        for added in plan.added:
            script = self._script_of(added.sequence)
            vocab_size = self.registration.vocab_size
            self._rows[added.row] = _Row(added.sequence, added.num_output_tokens, script, vocab_size)
        for fork in plan.forks:
            self._rows[fork.to_row] = copy(self._rows[fork.from_row])
        if not plan.repeats_generation:
            self._generating = sorted(plan.generation_rows)
        elif plan.generation_rows or plan.idle_rows or plan.released_rows:
            gone = {*plan.released_rows, *plan.idle_rows}
            rows = [number for number in self._generating if number not in gone]
            self._generating = sorted([*rows, *plan.generation_rows])

    def _script_of(self, sequence: Sequence) -> Script | None:
        request = sequence.request
        if request.beams is None:
            return self._scripts.get((request.request_id, sequence.index))
        # All beams follow the longest output, so that the search takes about as many steps as recorded.
        found = (self._scripts.get((request.request_id, output.index)) for output in request.sequences)
        return max((script for script in found if script), key=lambda script: len(script.tokens), default=None)


class Simulation:
    """One core in virtual time.

    Attributes:
        measures: Measurements of the run.
        planning_ns: Processor time of the core's turns. num_plans: Number of steps that they planned.
    """

    def __init__(
        self,
        core: SchedulerCore,
        events: Iterable[Event],
        *,
        cost: CostModel,
        scripts: Mapping[tuple[str, int], Script] | None = None,
    ) -> None:
        """Start with external events in order of their times. The simulation generates results and heartbeats."""
        self.core = core
        self.measures = Measures()
        self.planning_ns = 0
        self.num_plans = 0
        self.now_ns = 0
        self.extent = StepExtent()  # of all workers
        self._cost = cost
        self._scripts = scripts or {}
        self._has_stops = any(script.stop_after is not None for script in self._scripts.values())
        self._outside = iter(events)
        self._next = next(self._outside, None)
        self._heap: list[tuple[int, int, Event]] = []
        self._num_pushed = 0
        self._workers: dict[bytes, SimulatedWorker] = {}

    def run(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Run until every request has ended and there are no more external events.

        Args:
            on_progress: Called about every 1,000 turns with the virtual time and the number of requests that have
                ended.
        """
        num_turns = 0
        while self._next is not None or self.core.lifecycle.num_unfinished:
            at_ns = min(
                (self._heap[0][0] if self._heap else 1 << 62),
                (self._next.time_ns if self._next is not None else 1 << 62),
                self.core.next_turn_ns or 1 << 62,
            )
            if at_ns == 1 << 62:
                raise RuntimeError("the simulation is stuck: requests are waiting, but no events are left")
            self.now_ns = max(self.now_ns, at_ns)
            while self._heap and self._heap[0][0] <= self.now_ns:
                self._handle(heapq.heappop(self._heap)[2])
            while self._next is not None and self._next.time_ns <= self.now_ns:
                event, self._next = self._next, next(self._outside, None)
                self._handle(event)
            begin = time.thread_time_ns()
            effects = self.core.handle(Turn(self.now_ns))
            self.planning_ns += time.thread_time_ns() - begin
            self._carry_out(effects)
            num_turns += 1
            if on_progress is not None and num_turns % 1_000 == 0:
                on_progress(self.now_ns, self.core.totals.num_completed)

    def _push(self, event: Event) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (event.time_ns, self._num_pushed, event))

    def _handle(self, event: Event) -> None:
        if isinstance(event, WorkerRegistered):
            for connection, worker in list(self._workers.items()):
                if worker.registration.group_id == event.group_id:
                    del self._workers[connection]
            self._workers[event.connection] = SimulatedWorker(event, self._cost, self._scripts, self.extent)
        elif isinstance(event, WorkerLost):
            self._workers.pop(event.connection, None)
        elif isinstance(event, WorkerLeft):
            left = self._workers.pop(event.connection, None)
            event = replace(event, epoch=left.epoch if left else 0)
        elif isinstance(event, WorkerBeat):
            beating = self._workers.get(event.connection)
            if beating is None or beating.epoch != event.epoch:
                return
            self._push(replace(event, time_ns=event.time_ns + _BEAT_NS))
        self._carry_out(self.core.handle(event))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StepPlan):
                self.num_plans += 1
                self._push(self._workers[effect.connection].run(effect, self.now_ns))
            elif isinstance(effect, FetchBlocks):
                self._push(self._workers[effect.connection].fetch(effect, self.now_ns))
            elif isinstance(effect, GroupJoined):
                self._workers[effect.connection].join(effect.epoch)
                self._push(WorkerBeat(self.now_ns + _BEAT_NS, effect.connection, effect.epoch, 0))
            elif isinstance(effect, EpochEnded) and effect.connection in self._workers:
                self._register_again(self._workers[effect.connection], effect.epoch)
            elif isinstance(effect, Emitted) and self._has_stops:
                self._find_stop_words(effect)
        self.measures.note(effects)

    def _register_again(self, worker: SimulatedWorker, epoch: int) -> None:
        if worker.epoch == epoch:
            worker.join(0)
            self._push(replace(worker.registration, time_ns=self.now_ns + 1_000_000))

    def _find_stop_words(self, effect: Emitted) -> None:
        for sequence, length in zip(effect.sequences, effect.lengths, strict=True):
            request_id = sequence.request.request_id
            script = self._scripts.get((request_id, sequence.index))
            if script is not None and script.stop_after is not None and length >= script.stop_after:
                self._push(StopWordFound(self.now_ns, request_id, sequence.index, script.stop_after, "stop"))


def from_outside(event: Event) -> Event | None:
    """Return the event if it is external input to a simulation; None if it depends on plans or reports the death of a
    worker.
    """
    if isinstance(event, Submitted):
        return replace(event, spec=replace(event.spec, is_detached=True))
    return event if isinstance(event, AbortRequested | WorkerRegistered | WorkerLeft) else None
