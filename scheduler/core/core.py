"""The core: it turns events into effects. It uses no sockets, clock, randomness or threads, so it can be simulated and
replayed.

The steps of a request:

1. `Submitted` puts it into the queue (lifecycle, queue), or rejects it.
2. A `Turn` starts it on the worker group with the longest cached prefix and the least work, once the capacity policy
   allows it (placement); it gets rows and blocks there (worker_group).
3. The same turn plans steps for every group with room in its pipeline (`_plan`): the micro-batch policy fills a step
   (steps), and the StepPlan goes out. Two steps are in flight, so the next one waits at the worker when one
   ends. A group with several pipeline stages has one additional step in flight for each stage after the first, with
   other sequences.
4. `StepDone` carries tokens: they are appended, and sequences that are complete are ended (steps). Their rows and
   blocks are free at once, because steps run strictly in order.
   A share of the steps is computed again by another group before (verification).
5. If it is paused, or its worker is lost, it is queued again with its tokens (membership), and continues at 2. Where
   groups have roles, it moves from a prefill group to a decode group once its context is computed (handover).
6. It ends once, is kept for a while for clients that resume it, and is then forgotten (lifecycle).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler.core.capacity_scheduler import next_to_pause
from scheduler.core.config import CoreConfig
from scheduler.core.effects import Effect, PolicyFailed
from scheduler.core.events import (
    AbortRequested,
    Attached,
    BlocksFetched,
    Detached,
    DrainStarted,
    Event,
    GenerationPaused,
    GenerationResumed,
    Recovered,
    SleepSet,
    StepDone,
    StopWordFound,
    Submitted,
    Turn,
    WeightsChanged,
    WeightsHashed,
    WorkerBeat,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.failure import INTERNAL, Failure
from scheduler.core.handover import Handovers
from scheduler.core.in_flight import InFlightStep
from scheduler.core.kind_waits import KindWaits
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.membership import Membership
from scheduler.core.pauses import Pauses
from scheduler.core.placement import Placement
from scheduler.core.request import FinishReason, Request
from scheduler.core.request_scheduler import RequestScheduler
from scheduler.core.shared import Shared
from scheduler.core.sleep import Sleep
from scheduler.core.stats import IterationStats
from scheduler.core.steps import Results, StepBuilder
from scheduler.core.verification import Verifier
from scheduler.core.worker_group import WorkerGroup

# Faults of a policy are reported once per text, and up to this number of texts.
_MAX_FAULT_TEXT, _MAX_KNOWN_FAULTS = 300, 100


class SchedulerCore:
    """All requests and worker groups of one scheduler.

    Attributes:
        queue: Requests waiting for a group.
        lifecycle: All requests by id.
        membership: The worker groups.
        kind_waits: Requests that wait for a group of their kind.
        pauses: Whether generation is paused.
        sleep: Whether groups sleep.
        totals: Totals since the start.
    """

    def __init__(self, config: CoreConfig, scheduler: RequestScheduler) -> None:
        self.config = config
        self.scheduler = scheduler
        shared = Shared(config)
        self.queue, self.totals = shared.queue, shared.totals
        self._clock, self._effects = shared.clock, shared.effects
        self._timers, self._clients = shared.timers, shared.clients
        self._known_faults: set[tuple[str, str]] = set()
        self.lifecycle = Lifecycle(shared)
        self.membership = Membership(shared, self.lifecycle)
        self._results = Results(shared, self.lifecycle, self._postpone)
        self._verifier = Verifier(shared, self.membership, self._pause)
        self.kind_waits = KindWaits(shared, self.membership, self.lifecycle)
        self._placement = Placement(shared, scheduler, self.membership, self.lifecycle, self.kind_waits)
        self.pauses = Pauses(shared, self.membership, self.lifecycle, self._pause)
        self.sleep = Sleep(shared, self.membership, self.lifecycle)
        self._handovers = Handovers(shared, self.membership, self._placement)
        self._handlers: dict[type[Any], Callable[[Any], object]] = {
            Submitted: self._submit,
            Recovered: self._recover,
            AbortRequested: self.lifecycle.abort,
            Attached: self.lifecycle.attach,
            Detached: self.lifecycle.detach,
            StopWordFound: self.lifecycle.stop_word,
            WorkerRegistered: self.membership.register,
            WeightsHashed: self.membership.prove_weights,
            WorkerBeat: self.membership.beat,
            WorkerLeft: self.membership.leave,
            WorkerLost: self.membership.lose,
            WorkerFailed: self.membership.fail,
            StepDone: self._take_result,
            BlocksFetched: self._handovers.take_fetched,
            WeightsChanged: self.membership.change_weights,
            GenerationPaused: self.pauses.pause,
            GenerationResumed: self.pauses.resume,
            SleepSet: self.sleep.set,
            Turn: self._turn,
            DrainStarted: self._start_drain,
        }

    def handle(self, event: Event) -> list[Effect]:
        """Apply an event.

        Events update the state; the `Turn` that follows plans from it. Time never goes backwards: an event with an
        earlier time than its predecessor is processed at the predecessor's time.

        Returns:
            The effects to carry out, in order.
        """
        if event.time_ns < self._clock.now_ns:
            event = replace(event, time_ns=self._clock.now_ns)
        self._clock.now_ns = event.time_ns
        self._handlers[type(event)](event)
        effects = self._effects[:]
        self._effects.clear()
        return effects

    @property
    def next_turn_ns(self) -> int | None:
        """Return the time at which a Turn is due even if nothing else happens."""
        return self._timers.next_ns

    @property
    def groups(self) -> list[WorkerGroup]:
        """The worker groups, oldest epoch first."""
        return list(self.membership.groups.values())

    def current_stats(self, time_ns: int) -> IterationStats:
        """Return the state of all groups together, with the counts of the last step."""
        return self._results.statistics(self.groups, time_ns, "")

    def report_iterations(self, *, enabled: bool) -> None:
        """Turn IterationDone effects on (the default), or off if nothing reads them."""
        self._results.reports_iterations = enabled

    @property
    def first_token_wait_ns(self) -> int:
        """How long the request that has waited longest for its first token has waited, in nanoseconds; 0 if none
        waits.
        """
        waiting = [*self.queue, *(request for group in self.groups for request in list(group.active))]
        since_ns = (request.times.queued_ns for request in waiting if not request.times.first_token_ns)
        return self._clock.now_ns - min(since_ns, default=self._clock.now_ns)

    @property
    def num_active_requests(self) -> int:
        """Number of requests that hold blocks."""
        return sum(len(group.active) for group in self.membership.groups.values())

    def _submit(self, event: Submitted) -> None:
        request = self.lifecycle.submit(event)
        if request is None or self._placement.refuse_impossible(request):
            return
        self.pauses.note_submitted(request)
        self._clients.note(event.spec.client_id)
        if not self.membership.has_usable_group:
            self.membership.watch_lack_of_workers()

    def _recover(self, event: Recovered) -> None:
        self.lifecycle.recover(event)
        self._clients.note(event.spec.client_id)
        if not self.membership.has_usable_group:
            self.membership.watch_lack_of_workers()

    def _start_drain(self, _: DrainStarted) -> None:
        self.lifecycle.is_draining = True

    def _take_result(self, event: StepDone) -> None:
        group = self.membership.group_of(event)
        if group is None:
            return
        check = group.take_check(event)
        if check is not None:
            self._take_check(group, check, event)
            return
        problem = group.deliver(event)
        if problem is None:
            self.totals.num_stale_messages += 1  # duplicate
            return
        if problem:
            self.membership.end_at_fault(group, problem)
            return
        self._commit_results(group)

    def _commit_results(self, group: WorkerGroup) -> None:
        """Apply the results of the group's oldest steps, up to one that is missing or is being verified."""
        while (result := group.next_result()) is not None:
            step = group.in_flight[0]
            problem = self._results.problem(group, step, result, self.config.vocab_size)
            if problem:
                self.membership.end_at_fault(group, f"wrong result: {problem}")
                return
            if step.is_verified and self._verifier.holds_back(group, step, result):
                break
            self._results.commit(group, group.finish_step(result), result)
        self.membership.flush_kv_changes(group)

    def _take_check(self, group: WorkerGroup, step: InFlightStep, event: StepDone) -> None:
        problem = self._results.problem(group, step, event, self.config.vocab_size)
        if problem:
            self.membership.end_at_fault(group, f"wrong result: {problem}")
            return
        self._verifier.take(group, step, event)
        self._commit_verified()

    def _commit_verified(self) -> bool:
        """Apply results that need not wait any longer; return whether there were any."""
        groups = self._verifier.settled_groups()
        for group in groups:
            self._commit_results(group)
        return bool(groups)

    def _turn(self, event: Turn) -> None:
        self._timers.run_due(self._clock.now_ns)
        self.sleep.advance()
        self._handovers.advance()
        while self._verifier.is_busy:
            self._verifier.advance()
            if not self._commit_verified():
                break
        if self.pauses.may_plan and not self.sleep.is_held:
            self._start_queued()
            while self._plan_round():
                self._start_queued()
        for group in self.membership.groups.values():
            self.membership.flush_kv_changes(group)
        rows = (group.max_batch_size for group in self.membership.groups.values())
        self.totals.max_num_active_requests = sum(rows)

    def _start_queued(self) -> None:
        while len(self.queue):
            self._placement.start_queued()
            if not self._settle_faults():
                break

    def _settle_faults(self) -> bool:
        """Count the faults of the policy, and end the requests on which it fails; return whether there were any."""
        has_ended = False
        for fault in self.scheduler.take_faults():
            self.totals.num_policy_faults += 1
            text = f"{type(fault.error).__name__}: {fault.error}"[:_MAX_FAULT_TEXT]
            if (fault.method, text) not in self._known_faults and len(self._known_faults) < _MAX_KNOWN_FAULTS:
                self._known_faults.add((fault.method, text))
                self._effects.append(PolicyFailed(fault.method, fault.error))
            for request in fault.requests:
                if request.live_sequences:
                    failure = Failure(INTERNAL, f"the scheduler plugin failed on this request ({text})")
                    self.lifecycle.end(request, FinishReason.ERROR, failure)
                    has_ended = True
        return has_ended

    def _plan_round(self) -> bool:
        """Plan a step for each group with room in its pipeline; return False if there was nothing to plan."""
        has_planned = False
        for group in [group for group in self.membership.groups.values() if self._is_due(group)]:
            has_planned |= self._plan(group)
        return has_planned

    def _is_due(self, group: WorkerGroup) -> bool:
        """Return whether it is time for the group's next step."""
        if len(group.in_flight) < group.num_micro_batches:
            return True
        if len(group.in_flight) >= group.max_in_flight:
            return False
        due_ns = group.pace.next_plan_ns(group.in_flight[0])
        if due_ns > self._clock.now_ns:
            self._timers.turn_at(due_ns)
            return False
        return True

    def _plan(self, group: WorkerGroup) -> bool:
        """Plan the group's next step and send it; return False if there is nothing to run."""
        paused = self.scheduler.requests_to_pause(group)
        self._settle_faults()
        self._pause(group, paused)
        self._handovers.prepare_plan(group)
        while (step := self._fill(group, paused)).is_empty:
            if group.lift_context_limits():
                continue
            if not step.num_stalled or group.in_flight or len(group.active) < 2:
                return False
            # A policy has admitted more requests than fit: pause one, since otherwise no request would progress.
            request = next_to_pause(list(group.active), group)
            assert request is not None
            self._pause(group, [request])
            paused = [*paused, request]
        self._effects.append(step.finish())
        self._clock.num_steps += 1
        self._handovers.note_plan(group)
        return True

    def _fill(self, group: WorkerGroup, paused: list[Request]) -> StepBuilder:
        step = StepBuilder(group, self._clock, paused)
        self.scheduler.schedule(group, step)
        self._settle_faults()
        return step

    def _pause(self, group: WorkerGroup, requests: list[Request]) -> None:
        """Release active requests and queue them again."""
        for request in requests:
            request.count_preemption()
            self.totals.num_preemptions += 1
            self._requeue(group, request, 0)

    def _postpone(self, group: WorkerGroup, request: Request, delay_ns: int) -> None:
        """Queue an active request again that cannot run yet, for example because its grammar is being compiled."""
        self.totals.num_postponements += 1
        self._requeue(group, request, delay_ns)

    def _requeue(self, group: WorkerGroup, request: Request, delay_ns: int) -> None:
        """Release an active request and queue it again; it may start again after `delay_ns`."""
        group.release(request)
        self.membership.requeue(request, delay_ns)
