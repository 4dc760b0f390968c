"""Drives the pure core: passes it timestamped events, carries out its effects, and runs its timers.

All events of one event-loop iteration are followed by one Turn, so a burst of submissions is planned together. Events
of workers are followed by a Turn in the same iteration: each further iteration costs as much CPU time as the Turn. A
Turn's entries go to the journal after everything else, so that the journal's thread and the loop do not compete for the
interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from midstream.clock import SteadyClock
from midstream.errors import OverloadedError, from_status
from scheduler.core.core import SchedulerCore
from scheduler.core.effects import (
    Accepted,
    BeamsAdvanced,
    Effect,
    Emitted,
    EpochEnded,
    FetchBlocks,
    GroupJoined,
    GroupRefused,
    IterationDone,
    KvChanged,
    PolicyFailed,
    Refused,
    RequestEnded,
    RequestForgotten,
    SequenceEnded,
    SleepOrdered,
    StepPlan,
    WorkerWrong,
)
from scheduler.core.events import Attached, Detached, Event, Recovered, Submitted, Turn, WorkerBeat, WorkerFailed
from scheduler.core.prefix_cache import KvChange
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec
from scheduler.core.stats import IterationStats
from scheduler.core.worker_group import WorkerGroup
from scheduler.edge.beam_outputs import report_beams
from scheduler.edge.broadcast import Broadcast
from scheduler.edge.dispatch import Dispatcher
from scheduler.edge.feed import FeedHub
from scheduler.journal import ENTRY_CLASSES, Journal, JournalEntry, is_entry
from scheduler.wire.worker_messages import WorkerEvent

logger = logging.getLogger(__name__)

Observer = Callable[[Event, list[Effect]], None]

# Number of requests that a log line names.
_MAX_NAMED = 20
_MAX_ITERATIONS = 1_000
_MAX_KV_EVENTS = 10_000
# The events of an epoch are numbered from the epoch, shifted by this number of bits. An epoch is at least the number of
# milliseconds since 1970, so numbers of different epochs do not overlap.
_KV_EVENT_BITS = 20


class Engine:
    """One running scheduler.

    Attributes:
        core: The core; its state may be read, but changes only through events.
        carry_out: What is done for an effect, by its class.
        kv_events: The latest KV events, as (group id, change), by sequence number.
        num_failed_events: Number of worker messages on which the core raised an exception.
        on_joined: Called with each worker's connection and epoch, after the worker was notified.
        on_ended: Called with each request whose end is committed, and again with True if that end is amended.
    """

    def __init__(
        self,
        core: SchedulerCore,
        *,
        journal: Journal,
        dispatcher: Dispatcher,
        observers: Sequence[Observer] = (),
        on_failure: Callable[[Exception], None] | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        """Create an engine that runs `core`.

        Args:
            observers: Called with each event and its effects.
            on_failure: Called when planning has failed, after which no request would progress.
        """
        self.clock = clock or SteadyClock()
        self.num_failed_events = 0
        self._on_failure = on_failure
        self.core = core
        self.hub = FeedHub(core.config.scheduler_epoch, self._on_attach, self._on_detach, self.clock)
        self._iterations: Broadcast[IterationStats] = Broadcast(_MAX_ITERATIONS)
        self._num_watchers = 0
        core.report_iterations(enabled=False)
        # The numbers exceed those of earlier schedulers, so that a reader that continues from such a number is told
        # that it has missed events.
        first_number = core.config.scheduler_epoch << _KV_EVENT_BITS
        self.kv_events: Broadcast[tuple[str, KvChange]] = Broadcast(_MAX_KV_EVENTS, first_number)
        self._journal = journal
        journal.after_commits = self.hub.flush
        self._dispatcher = dispatcher
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._is_turn_due = self._is_turn_scheduled = False
        self._entries: list[JournalEntry] = []  # entries of this turn, to be committed
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._uncommitted: dict[str, list[Callable[[], None]]] = {}
        self.carry_out: dict[type[Any], Callable[[Any], object]] = {
            **dict.fromkeys(ENTRY_CLASSES, self._entries.append),
            Accepted: self._write_accepted,
            BeamsAdvanced: self._write_beams,
            StepPlan: dispatcher.send_step,
            FetchBlocks: dispatcher.send_fetch,
            SleepOrdered: dispatcher.send_sleep,
            IterationDone: self._report_iteration,
            GroupJoined: self._join,
            GroupRefused: dispatcher.send_refused,
            EpochEnded: dispatcher.send_epoch_ended,
            KvChanged: self._report_kv_changes,
            Refused: _ignore,
            WorkerWrong: log_wrong_worker,
            PolicyFailed: _log_policy_fault,
        }
        self.on_joined: Callable[[bytes, int], None] = lambda *_: None
        self.on_ended: list[Callable[[Request, bool], None]] = []

    def now_ns(self) -> int:
        """Return the time to use for a new event."""
        return self.clock.now_ns()

    def handle(self, event: Event) -> list[Effect]:
        """Pass an event to the core and carry out its effects; a Turn follows soon."""
        effects = self._apply(event)
        self._turn_soon()
        return effects

    def _apply(self, event: Event) -> list[Effect]:
        effects: list[Effect] = []
        try:
            effects = self.core.handle(event)
        finally:  # record the event even if the core fails on it: that is when a recording is most useful
            for observe in self._observers:
                observe(event, effects)
        for effect in effects:
            self.carry_out[type(effect)](effect)
        return effects

    def recover(self, requests: list[Recovered]) -> None:
        """Restore the requests read from the journal."""
        for event in requests:
            self.handle(event)
            request = self.core.lifecycle.requests.get(event.spec.request_id)
            if request is not None:
                self.hub.restore(request)
        self._journal.know(list(self.core.lifecycle.requests.values()))

    def handle_worker_event(self, event: WorkerEvent) -> None:
        """Handle a worker's event; if the core fails on it, end the worker's epoch. Call `take_turn` after the last
        event.
        """
        self._is_turn_due = True
        try:
            self._apply(event)
        except Exception:
            logger.exception("failed to process a worker's message")
            self.num_failed_events += 1
            lost = WorkerFailed(event.time_ns, event.connection, f"its {type(event).__name__} could not be processed")
            self._apply(lost)
            return
        if isinstance(event, WorkerBeat) and event.epoch in self.core.membership.groups:
            self._dispatcher.send_heartbeat_ack(event.connection, event.epoch)

    def submit(self, spec: RequestSpec, on_committed: Callable[[Accepted], None]) -> None:
        """Submit a request; `on_committed` is called once the journal has it. Raises MidstreamError if rejected."""
        answer: Accepted | None = None
        for effect in self.handle(Submitted(self.now_ns(), spec)):
            if isinstance(effect, Refused):
                failure = effect.failure
                error = from_status(failure.code, failure.message, failure.field)
                if isinstance(error, OverloadedError):
                    error.retry_after_ms = effect.retry_after_ms
                raise error
            if isinstance(effect, Accepted):
                answer = effect
        assert answer is not None
        log = self.hub.logs.get(spec.request_id)
        # The log of an earlier request with this id remains until the journal has forgotten that request.
        if log is not None and log.request is answer.request:
            on_committed(answer)
        else:
            self._uncommitted.setdefault(spec.request_id, []).append(partial(on_committed, answer))

    def has_reader_left(self, request_id: str) -> bool:
        """Return whether a client remains after one has left: a reader (see FeedHub), or another submission that has
        not been committed yet.
        """
        return self.hub.has_reader_left(request_id) or len(self._uncommitted.get(request_id, ())) > 1

    @contextlib.contextmanager
    def watch_iterations(self) -> Iterator[Broadcast[IterationStats]]:
        """Collect statistics of each iteration as long as someone reads them."""
        self._num_watchers += 1
        self.core.report_iterations(enabled=True)
        try:
            yield self._iterations
        finally:
            self._num_watchers -= 1
            self.core.report_iterations(enabled=self._num_watchers > 0)

    async def wait_until_idle(self) -> None:
        """Return once every request has ended and its readers have received its end."""
        self._idle.clear()
        self._turn_soon()
        await self._idle.wait()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once a condition on the core's state holds, which is checked after each Turn."""
        if holds():
            return
        entry = holds, self._loop.create_future()
        self._awaited.append(entry)
        self._turn_soon()
        try:
            await entry[1]
        finally:
            self._awaited.remove(entry)

    def close(self) -> None:
        """Commit the remaining entries and cancel the timer."""
        self._commit()
        if self._timer is not None:
            self._timer.cancel()

    def _write_accepted(self, effect: Accepted) -> None:
        if is_entry(effect):
            self._entries.append(effect)

    def _write_beams(self, effect: BeamsAdvanced) -> None:
        report_beams(effect.request, effect.num_reported)
        self._entries.append(effect)

    def _report_iteration(self, effect: IterationDone) -> None:
        self._iterations.append(effect.stats)

    def _report_kv_changes(self, effect: KvChanged) -> None:
        for change in effect.changes:
            self.kv_events.append((effect.group_id, change))

    def _join(self, effect: GroupJoined) -> None:
        self._dispatcher.send_joined(effect)
        group = self.core.membership.groups[effect.epoch]
        if self.core.config.verify_ppm and (text := what_is_verified(group, self.core.groups)):
            logger.warning("%s", text)
        self.on_joined(effect.connection, effect.epoch)

    def _commit(self) -> None:
        if self._entries:
            entries = self._entries[:]
            self._entries.clear()
            self._journal.commit(entries, lambda: self._on_committed(entries))

    def _on_committed(self, entries: list[JournalEntry]) -> None:
        """Publish entries, then run the actions that had to wait for that."""
        ended: list[tuple[Request, bool]] = []
        others = [entry for entry in entries if type(entry) is not Emitted]
        for entry in others:
            if isinstance(entry, SequenceEnded) and self.hub.is_over(entry.sequence.request.request_id):
                ended.append((entry.sequence.request, True))
            elif isinstance(entry, RequestEnded):
                ended.append((entry.request, False))
        self.hub.publish(entries)
        for tell in self.on_ended:
            for request, is_amended in ended:
                tell(request, is_amended)
        for entry in others:
            if isinstance(entry, Accepted):
                for on_committed in self._uncommitted.pop(entry.request.request_id, ()):
                    on_committed()
            elif isinstance(entry, RequestForgotten) and not entry.request.num_attached:
                entry.request.release_sequences()

    def _on_attach(self, request_id: str) -> None:
        self._apply(Attached(self.now_ns(), request_id))  # needs no turn

    def _on_detach(self, request: Request) -> None:
        # The reader may outlast its request, whose id may be in use by another request now.
        if self.core.lifecycle.requests.get(request.request_id) is request:
            self._apply(Detached(self.now_ns(), request.request_id))  # may start a timer, but needs no turn
        self._check_idle()
        self._arm()

    def _turn_soon(self) -> None:
        self._is_turn_due = True
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self._loop.call_soon(self._take_scheduled_turn)

    def _take_scheduled_turn(self) -> None:
        self._is_turn_scheduled = False
        self.take_turn()

    def take_turn(self) -> None:
        """Plan now if there were events since the last Turn."""
        if not self._is_turn_due:
            return
        self._is_turn_due = False
        try:
            self._apply(Turn(self.now_ns()))
        except Exception as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)
            return
        finally:
            self._commit()
        self._check_idle()
        self._arm()

    def _check_idle(self) -> None:
        for holds, future in self._awaited:
            if not future.done() and holds():
                future.set_result(None)
        if not self.core.lifecycle.num_unfinished and not any(feed.num_attached for feed in self.hub.feeds):
            self._idle.set()

    def _arm(self) -> None:
        """Set the timer for the next turn. A timer that is already set for an earlier time is kept, and is set again
        when it fires.
        """
        next_ns = self.core.next_turn_ns
        if next_ns is None:
            return
        when = self._loop.time() + max(0, next_ns - self.now_ns()) / 1e9
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        next_ns = self.core.next_turn_ns
        if next_ns is not None and next_ns <= self.now_ns():
            self._turn_soon()
        else:
            self._arm()


def what_is_verified(group: WorkerGroup, groups: Sequence[WorkerGroup]) -> str | None:
    """Return why the setting `verify` cannot find wrong results of a group that has joined; None if it can."""
    if not group.can_verify:
        return f"results of worker {group.group_id} are not verified: only those of CPUs without pipeline stages are"
    others = sum(other.can_verify and other.kind.agrees_with(group.kind) for other in groups) - 1
    if others == 0:
        return f"nothing can be verified: {group.group_id} is the only worker of its kind"
    if others == 1:
        return "two workers verify each other: if they differ, both are held off; a third one would decide"
    return None


def _ignore(_: Refused) -> None:
    """Whoever submitted the request finds the refusal among the effects."""


def log_wrong_worker(effect: WorkerWrong) -> None:
    logger.error(
        "worker %s is held off until its process restarts: %s; %d tokens that it gave since its last verified step "
        "were delivered, of the requests %s",
        effect.group_id,
        effect.reason,
        effect.num_unproved_tokens,
        ", ".join(effect.unproved_requests[:_MAX_NAMED]) or "(none)",
    )


def _log_policy_fault(effect: PolicyFailed) -> None:
    logger.error(
        "the scheduler plugin failed in %s; the built-in policy takes its turn", effect.method, exc_info=effect.error
    )
