"""Membership of worker groups: registration, liveness, and requeueing the requests of groups that are lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from scheduler.core.config import PROTOCOL_VERSION
from scheduler.core.effects import EpochEnded, GroupJoined, GroupRefused, KindSet, KvChanged, WorkerWrong
from scheduler.core.events import (
    BlocksFetched,
    StepDone,
    WeightsChanged,
    WeightsHashed,
    WorkerBeat,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
    WorkerRegistered,
)
from scheduler.core.failure import INTERNAL, UNAVAILABLE, Failure
from scheduler.core.kind import Kind
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.prefix_cache import CacheCleared, KvChange
from scheduler.core.request import FinishReason, Request, RequestState
from scheduler.core.role import Role
from scheduler.core.shared import Shared
from scheduler.core.standing import Standings
from scheduler.core.worker_group import WorkerGroup, note_stored

# Epochs increase from one scheduler to the next: the high bits are the scheduler's epoch, the low bits count
# registrations.
_REGISTRATION_BITS = 20
# Each block costs about 50 bytes of bookkeeping, so limit the number of blocks that a worker can register.
# How long loading and changing weights may take at a worker.
_CHANGE_NS = 600 * 1_000_000_000
_MAX_NUM_BLOCKS = 1 << 22
_HOUR_NS = 3_600_000_000_000
_MAX_LOST = 256
# Heartbeats usually stop because the worker's machine or network stalls, so the first silence is not blamed on a
# request.
_MAX_SILENCES = 1
_NOT_REPEATABLE = "its output is computed again after a restart of the scheduler, and the weights have changed since"


class Membership:
    """All worker groups of this scheduler.

    Attributes:
        groups: Worker groups by epoch.
        on_change: Called when a request might find a group that it did not find before.
        on_join: Called with each group that has registered.
        on_loss: Called with the kind of a group whose epoch has ended.
        weights: The weights that all groups are to have; None if any of the served model will do, as long as no update
            has named them. A group with other weights gets nothing to run until it has changed them.
    """

    def __init__(self, shared: Shared, lifecycle: Lifecycle) -> None:
        self.groups: dict[int, WorkerGroup] = {}
        self._lifecycle, self._clients = lifecycle, shared.clients
        self._config, self._clock, self._effects = shared.config, shared.clock, shared.effects
        self._queue, self._timers, self._totals = shared.queue, shared.timers, shared.totals
        self._num_registrations = 0
        # By group id: the epoch whose connection was lost, and the requests blamed for the worker's death.
        self._lost: OrderedDict[str, tuple[int, list[str]]] = OrderedDict()
        self._stored: dict[str, set[int]] = {}  # hashes of the blocks in the tiers, by name of their store
        self._standings = Standings()
        self._no_worker_since_ns = 0
        self._changed_ns = -_CHANGE_NS  # when weights or sleep were last changed
        self._is_asleep = False
        self._cost, self._priced_ns = 0.0, shared.clock.now_ns
        self.on_change: Callable[[], None] = lambda: None
        self.on_join: Callable[[WorkerGroup], None] = lambda _: None
        self.on_loss: Callable[[Kind], None] = lambda _: None
        self.weights: WeightsChanged | None = None

    def register(self, event: WorkerRegistered) -> None:
        """Register a group under a new epoch, which replaces an older epoch of the same group, or reject it."""
        problem = self._problem(event)
        if problem is not None:
            field, reason = problem
            self._effects.append(GroupRefused(event.connection, reason, field))
            return
        for group in list(self.groups.values()):
            if group.connection == event.connection:
                self.end_epoch(group, "registered again", tell=False)
            elif group.group_id == event.group_id:
                # Only the connection shows whether the previous worker died: the new one may be another worker of the
                # same name.
                self.end_epoch(group, "another worker registered under its name")
        self._forgive(event)
        if self._config.verify_ppm:
            # Blocks are not passed on between groups, so that a wrong one cannot make another one wrong.
            event = replace(event, kv_store="", tier_store="", stored_hashes=(), kv_source="")
        event = replace(event, kind=self._named(event.kind))
        self._standings.of(event.group_id).note_process(event.incarnation)
        self._num_registrations += 1
        epoch = (self._config.scheduler_epoch << _REGISTRATION_BITS) + self._num_registrations
        standing, stored = self._standings.of(event.group_id), self._note_stored(event)
        group = WorkerGroup(event, epoch, self._config, self._clock, self._clients, standing, stored)
        group.note_outdated(is_outdated=self._is_outdated(group.kind))
        self._note_cost()
        self.groups[epoch] = group
        self._effects.append(GroupJoined(event.connection, event.group_id, epoch))
        kept = group.prefix_cache.contents(group.tokens_per_block)
        self._note_kv_changes(group, [CacheCleared(), *([kept] if kept.block_hashes else [])])
        self._timers.at(self._clock.now_ns + self._config.worker_timeout_ns, partial(self._check_alive, epoch))
        group.standing.last_seen_ns = self._clock.now_ns
        if group.is_held_off:
            self._timers.at(group.standing.held_until_ns, lambda _: self.on_change())
        self.on_join(group)
        self.on_change()

    @property
    def price_per_hour(self) -> float:
        """What the registered groups cost per hour, in the currency of their settings."""
        return sum(group.registration.price_per_hour for group in list(self.groups.values()))

    @property
    def cost(self) -> float:
        """What the groups have cost while they were registered, since the core's start."""
        return self._cost + self.price_per_hour * (self._clock.now_ns - self._priced_ns) / _HOUR_NS

    def _note_cost(self) -> None:
        """Add the cost up to now; to be called before the groups change."""
        self._cost, self._priced_ns = self.cost, self._clock.now_ns

    def _note_stored(self, event: WorkerRegistered) -> set[int]:
        """Record the blocks in a worker's tiers; return all blocks known to be there."""
        if not event.tier_store:
            return set()
        in_use = {group.registration.tier_store for group in self.groups.values()}
        self._stored = {name: hashes for name, hashes in self._stored.items() if name in in_use}
        stored = self._stored.setdefault(event.tier_store, set())
        note_stored(stored, event.stored_hashes)
        return stored

    def _problem(self, event: WorkerRegistered) -> tuple[str, str] | None:
        config, fingerprint = self._config, event.kind.model_fingerprint
        # Once weights have been changed, a worker may still have any earlier ones: it gets nothing to run until it has
        # changed them, which it refuses to do if its folder is that of another model.
        is_wanted = self.weights is not None
        wanted: tuple[tuple[str, object, object], ...] = (
            ("protocol_version", event.protocol_version, PROTOCOL_VERSION),
            ("vocab_size", event.vocab_size, config.vocab_size),
            ("model_fingerprint", fingerprint, fingerprint if is_wanted else config.model_fingerprint or fingerprint),
            ("max_attention_window", event.max_attention_window, config.max_attention_window),
            ("sink_token_length", event.sink_token_length, config.sink_token_length),
        )
        for field, given, needed in wanted:
            if given != needed:
                return field, f"{field} is {given}; this scheduler requires {needed}"
        size, unit = event.tokens_per_block, config.tokens_per_block
        if size < 1 or size % unit:
            return "tokens_per_block", f"tokens_per_block is {size}; this scheduler requires a multiple of {unit}"
        for field in ("num_blocks", "max_batch_size", "max_num_tokens", "max_sequence_length"):
            if getattr(event, field) < 1:
                return field, f"{field} is {getattr(event, field)}; must be at least 1"
        limit = config.max_attention_window
        if limit and not all(0 < window <= limit for window in event.attention_windows):
            return "attention_windows", f"a layer attends to more than max_attention_window ({limit} tokens)"
        if event.num_blocks > _MAX_NUM_BLOCKS:
            return "num_blocks", f"num_blocks is {event.num_blocks}; must be at most {_MAX_NUM_BLOCKS}"
        if event.role and event.role not in set(Role):
            return "role", f"role is {event.role!r}; must be one of {', '.join(Role)}"
        if not event.group_id:
            return "group_id", "group_id must not be empty"
        return _problem_of_kept(event)

    def prove_weights(self, event: WeightsHashed) -> None:
        """Record the complete identity of a group's weights, also for the requests that ran on the group before."""
        group = self.group_of(event)
        if group is None or (event.weights_root, event.block_kind) == (group.kind.weights_root, group.block_kind):
            return
        kind = self._named(replace(group.kind, weights_root=event.weights_root))
        group.note_weights(kind, event.block_kind)
        group.note_outdated(is_outdated=self._is_outdated(kind))
        self.on_join(group)
        for request in self._lifecycle.requests.values():
            if request.state is RequestState.FINISHED:
                continue
            num_before = request.counters.num_kind_changes
            if request.prove_weights(kind, group.registration.incarnation, is_here=request.group is group):
                self.note_kind(request, has_changed=request.counters.num_kind_changes > num_before)
        self.on_change()

    def change_weights(self, event: WeightsChanged) -> None:
        """Let all requests continue under these weights, and end the epochs of the groups that have others; they
        register again once they have changed them.

        Results that these groups have not delivered yet are dropped, so that all further tokens are of the new weights.
        """
        self.weights, self._changed_ns = event, self._clock.now_ns
        for request in list(self._lifecycle.requests.values()):
            if request.state is RequestState.FINISHED or request.kind is None or not self._is_outdated(request.kind):
                continue
            if request.is_repeated and request.is_bound:
                self._lifecycle.end(request, FinishReason.ERROR, Failure(UNAVAILABLE, _NOT_REPEATABLE))
            else:
                request.allow_change_of_kind()
        for group in list(self.groups.values()):
            if self._is_outdated(group.kind):
                self.end_epoch(group, "its weights are replaced")
            else:
                group.note_weights(self._named(group.kind), group.block_kind)
        self.on_change()

    def note_sleep(self, *, is_asleep: bool) -> None:
        """Record that groups are told to sleep or to wake up; `is_asleep` if an administrator lets all sleep."""
        self._is_asleep, self._changed_ns = is_asleep, self._clock.now_ns

    @property
    def is_changing(self) -> bool:
        """Whether groups that are missing are not lost, because they sleep, load, or change their weights."""
        is_recent = self._clock.now_ns - self._changed_ns < _CHANGE_NS
        return self._is_asleep or is_recent or any(group.is_changing for group in self.groups.values())

    def _named(self, kind: Kind) -> Kind:
        """Return the kind with the name of the version that all groups are to have, if it has these weights. The group
        may know them by another name, or by none if it was started with them.
        """
        weights = self.weights
        if weights is None or self._is_outdated(kind) or kind.weights_version == weights.weights_version:
            return kind
        return replace(kind, weights_version=weights.weights_version)

    def _is_outdated(self, kind: Kind) -> bool:
        return self.weights is not None and kind.weights_root != self.weights.weights_root

    def note_kind(self, request: Request, *, has_changed: bool) -> None:
        """Commit the kind of the groups that compute a request."""
        if has_changed:
            self._totals.num_kind_changes += 1
        changed_at, earlier = request.kind_changed_at, request.earlier_kinds
        self._effects.append(KindSet(request, request.known_kind, changed_at, has_changed, earlier))

    def suits(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether the group computes the same tokens as the groups on which the request ran, or may compute
        others.
        """
        kind = request.kind
        return kind is None or kind is group.kind or not request.is_bound or kind.agrees_with(group.kind)

    def beat(self, event: WorkerBeat) -> None:
        """Process a heartbeat."""
        group = self.group_of(event)
        if group is None:
            return
        has_all_results = group.note_beat(event)
        if event.removed_hashes and group.registration.tier_store:
            for other in self.groups.values():
                if other.stored is group.stored:
                    other.prefix_cache.note_gone_below(event.removed_hashes)
                    self.flush_kv_changes(other)
        if not has_all_results:
            self.end_at_fault(group, "a step's result is missing")

    def leave(self, event: WorkerLeft) -> None:
        """Remove a group that deregisters; its requests continue on other groups."""
        group = self.groups.get(event.epoch)
        if group is None or group.connection != event.connection:
            return
        if event.leaves_blocks:
            for request in group.active:
                request.lose_worker(group.registration.kv_store, may_fetch=True)
        self.end_epoch(group, event.reason or "it left", tell=False)

    def fail(self, event: WorkerFailed) -> None:
        """End the epoch of a worker that sent an invalid message or did not answer in time."""
        group = self._group_at(event.connection)
        if group is not None:
            self.end_at_fault(group, event.reason)

    def lose(self, event: WorkerLost) -> None:
        """End the epoch of a worker whose connection was lost; it counts as dead unless it reconnects."""
        group = self._group_at(event.connection)
        if group is None:
            return
        blamed = [request.request_id for request in _running(group)]
        self.end_by_death(group, "connection lost", tell=False)
        self._lost[group.group_id] = (group.registration.incarnation, blamed)
        if len(self._lost) > _MAX_LOST:
            self._lost.popitem(last=False)

    def _forgive(self, event: WorkerRegistered) -> None:
        """Withdraw the recorded death of a worker that reconnects, since it had only lost its connection."""
        incarnation, blamed = self._lost.pop(event.group_id, (0, []))
        if incarnation != event.incarnation:
            return
        self._standings.of(event.group_id).forgive_death()
        for request_id in blamed:
            request = self._lifecycle.requests.get(request_id)
            if request is not None and event.group_id in request.died_on:
                request.forget_death(event.group_id)

    def group_of(self, event: StepDone | WorkerBeat | WeightsHashed | BlocksFetched) -> WorkerGroup | None:
        """Return the group that sent a message; if the message is stale, count it, notify the sender and return None.

        An epoch is bound to the connection that it was assigned to: no worker can send messages for another one, and a
        worker whose connection was lost registers again.
        """
        group = self.groups.get(event.epoch)
        if group is None or group.connection != event.connection:
            self.reject_stale(event.connection, event.epoch)
            return None
        return group

    def _group_at(self, connection: bytes) -> WorkerGroup | None:
        return next((group for group in self.groups.values() if group.connection == connection), None)

    def reject_stale(self, connection: bytes, epoch: int) -> None:
        """Count a message of a past epoch, and notify its sender."""
        self._totals.num_stale_messages += 1
        self._effects.append(EpochEnded(connection, epoch))

    def end_at_fault(self, group: WorkerGroup, reason: str) -> None:
        """End a group's epoch because of the group's own fault, and hold the group off; none of its requests is
        blamed.
        """
        self._totals.num_worker_faults += 1
        group.standing.note_fault(self._clock.now_ns, reason)
        self.end_epoch(group, reason)

    def condemn(self, group: WorkerGroup, reason: str) -> None:
        """Hold a group off until its process restarts, because its results differ from those of other groups. What it
        gave and is not committed is computed again elsewhere.
        """
        incarnation = group.registration.incarnation
        if group.standing.wrong_incarnation == incarnation:
            return
        group.standing.note_wrong(incarnation, self._clock.now_ns, reason)
        self._totals.num_wrong_workers += 1
        self._totals.num_unproved_tokens += group.num_unproved_tokens
        self._effects.append(WorkerWrong(group.group_id, reason, group.num_unproved_tokens, tuple(group.unproved)))
        for other in list(self.groups.values()):
            if (other.group_id, other.registration.incarnation) == (group.group_id, incarnation):
                self.end_epoch(other, reason)

    def end_by_death(self, group: WorkerGroup, reason: str, *, tell: bool = True, is_silent: bool = False) -> None:
        """End the epoch of a group that died, hangs or is silent; a request that it was running may be the cause."""
        self._totals.num_worker_deaths += 1
        group.standing.note_death(self._clock.now_ns, reason)
        culprit = self._blame(group, is_silent)
        # Looking up lost blocks may have caused the death, so it is tried only once.
        adopting = group.adopting_requests
        for request in group.active:
            is_cause = request in adopting
            request.lose_worker("" if is_cause else group.registration.kv_store, may_fetch=not is_cause)
        self.end_epoch(group, reason, tell=tell, culprit=culprit)

    def end_epoch(self, group: WorkerGroup, reason: str, *, tell: bool = True, culprit: Request | None = None) -> None:
        """End a group's epoch: its requests are queued again with their tokens, and its later messages count as stale.

        Args:
            group: A current group.
            reason: Reason for the log.
            tell: Notify the worker, in case it is still connected.
            culprit: A request to end instead of queueing it again.
        """
        self._note_cost()
        del self.groups[group.epoch]
        self.on_loss(group.kind)
        if tell:
            self._effects.append(EpochEnded(group.connection, group.epoch, reason))
        for request in list(group.active):
            group.release(request)
            if request is not culprit:
                request.count_recovery()
                self._totals.num_recoveries += 1
                self.requeue(request)
        if culprit is not None:
            self._quarantine(culprit)
        self._note_kv_changes(group, [CacheCleared()])
        if not self.has_usable_group:
            self.wait_for_workers()

    def requeue(self, request: Request, delay_ns: int = 0) -> None:
        """Queue a request again after it was released from a group; it may start again after `delay_ns`."""
        request.wait_again(self._clock.now_ns)
        if not delay_ns:
            self._queue.put_back(request)
            return
        due_ns = self._clock.now_ns + delay_ns
        self._queue.hold(request, due_ns)
        self._timers.at(due_ns, self._queue.release_due)

    def is_suspect(self, request: Request) -> bool:
        """Return whether several workers in a row died while running the request. Such a request runs without other
        suspects.
        """
        return len(request.died_on) >= self._config.max_worker_deaths

    @property
    def has_usable_group(self) -> bool:
        """Return whether any group is not held off."""
        return any(not group.is_held_off for group in self.groups.values())

    @property
    def has_several_kinds(self) -> bool:
        """Whether groups of different kinds are registered."""
        return len(self.groups) > 1 and len({group.kind for group in self.groups.values()}) > 1

    def should_avoid(self, request: Request, group: WorkerGroup) -> bool:
        """Return whether this group died while running the request and another group could try it, which shows whether
        the request or the group is at fault.
        """
        return group.group_id in request.died_on and self._has_other(request)

    def _has_other(self, request: Request) -> bool:
        return any(
            group.group_id not in request.died_on
            and not group.is_held_off
            and group.is_large_enough(request)
            and self.suits(request, group)
            for group in self.groups.values()
        )

    def _blame(self, group: WorkerGroup, is_silent: bool) -> Request | None:
        """Count the death against all requests in flight; return the request to end if it is certainly the cause."""
        running = _running(group)
        if is_silent:
            running = {request for request in running if request.note_silence(group.group_id) > _MAX_SILENCES}
        for request in running:
            request.note_death(group.group_id)
        suspects = [request for request in running if self.is_suspect(request)]
        if len(suspects) != 1:
            return None
        (suspect,) = suspects
        group.standing.lone_victims.add(suspect.request_id)
        return suspect if self._is_certain(suspect, group) else None

    def _is_certain(self, suspect: Request, group: WorkerGroup) -> bool:
        """Return whether it is certain that the request crashes workers.

        It is certain after several groups died while running it. If there is only one group to try, a few more deaths
        suffice, unless that group also died while running other lone suspects: then the group is to blame.
        """
        if len(set(suspect.died_on)) > 1:
            # The first group that fell silent is not in `died_on`, but it is not at fault either.
            for group_id in {*suspect.died_on, *suspect.silent_on}:
                self._standings.of(group_id).forgive_death()
            return True
        if len(group.standing.lone_victims) > 1 or self._has_other(suspect):
            return False
        needed = self._config.max_worker_deaths
        return len(suspect.died_on) >= (needed if self._standings.num_recent(self._clock.now_ns) < 2 else 2 * needed)

    def _quarantine(self, request: Request) -> None:
        self._totals.num_quarantined += 1
        message = f"{len(request.died_on)} workers in a row died while running this request"
        self._lifecycle.end(request, FinishReason.ERROR, Failure(INTERNAL, message))

    def _check_alive(self, epoch: int, now_ns: int) -> None:
        # Keyed by epoch, because a timer that referred to the group would keep its block bookkeeping alive after its
        # end.
        group = self.groups.get(epoch)
        if group is None:
            return
        due_ns = group.last_heard_ns + self._config.worker_timeout_ns
        if now_ns >= due_ns:
            self.end_by_death(group, "no heartbeat within the timeout", is_silent=True)
            return
        since_ns = group.awaited_since_ns
        if since_ns is not None:
            if now_ns >= since_ns + self._config.progress_timeout_ns:
                self.end_by_death(group, "no progress within the timeout")
                return
            due_ns = min(due_ns, since_ns + self._config.progress_timeout_ns)
        self._timers.at(due_ns, partial(self._check_alive, epoch))

    def wait_for_workers(self) -> None:
        """Start the no-worker timeout, which applies to waiting requests without a deadline."""
        self._no_worker_since_ns = self._clock.now_ns
        self.watch_lack_of_workers()

    def watch_lack_of_workers(self) -> None:
        """Schedule a check for when the currently waiting requests reach the timeout."""
        self._timers.at(self._clock.now_ns + self._config.no_worker_timeout_ns, self._give_up_waiting)

    def _give_up_waiting(self, now_ns: int) -> None:
        if self.has_usable_group:
            return
        patience_ns = self._config.no_worker_timeout_ns
        if self._is_asleep:
            self.watch_lack_of_workers()
            return
        if self.is_changing:
            patience_ns += _CHANGE_NS
            self.watch_lack_of_workers()
        for request in list(self._queue):
            since_ns = max(request.waiting_since_ns, self._no_worker_since_ns)
            if request.spec.deadline_ns is None and now_ns - since_ns >= patience_ns:
                failure = Failure(
                    UNAVAILABLE,
                    "no worker connected in time; see `midstream status`"
                    if not self.groups
                    else "all workers are held off",
                )
                self._lifecycle.end(request, FinishReason.ERROR, failure)

    def flush_kv_changes(self, group: WorkerGroup) -> None:
        """Report blocks stored in and removed from a group's prefix cache."""
        if changes := group.prefix_cache.take_changes():
            self._note_kv_changes(group, changes)

    def _note_kv_changes(self, group: WorkerGroup, changes: list[KvChange]) -> None:
        self._effects.append(KvChanged(group.group_id, changes))


def _running(group: WorkerGroup) -> set[Request]:
    """Return the requests that the group is computing."""
    return {request for step in group.in_flight for request in step.requests() if request.group is group}


def _problem_of_kept(event: WorkerRegistered) -> tuple[str, str] | None:
    """Return the invalid field and the problem with the blocks that a worker reports as kept; None if there is no
    problem.
    """
    kept = set(event.kept_blocks)
    if not len(event.kept_blocks) == len(kept) == len(event.kept_hashes):
        return "kept_blocks", "kept_blocks must name each block once, and kept_hashes must have one hash for each"
    if kept and max(kept) >= event.num_blocks:
        return "kept_blocks", f"kept_blocks names block {max(kept)}; there are only {event.num_blocks} blocks"
    return None
