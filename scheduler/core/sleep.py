"""Sleep: worker groups give their memory back, and get nothing to run until they have taken it again.

There are two reasons. An administrator lets all groups sleep until they are woken; or no request has come for
`unload_after_ns`, and the next one wakes them. What groups are to do is state of the core, and what they do is part of
their registration: a group that registers in another state, for example because its process was restarted, is told
which one it is to have.
"""

from __future__ import annotations

from scheduler.core.effects import SleepOrdered
from scheduler.core.events import SleepSet
from scheduler.core.lifecycle import Lifecycle
from scheduler.core.membership import Membership
from scheduler.core.shared import Shared
from scheduler.core.worker_group import WorkerGroup

_IDLE_LEVEL = 1
# The feature of groups that can sleep.
FEATURE = "sleep"


class Sleep:
    """Which groups of one core sleep.

    Attributes:
        level: Level at which an administrator lets all groups sleep; 0 if they are awake.
        is_held: Whether no step may run because of an administrator, also while groups are awake again.
    """

    def __init__(self, shared: Shared, membership: Membership, lifecycle: Lifecycle) -> None:
        self._config, self._clock, self._timers = shared.config, shared.clock, shared.timers
        self._effects, self._membership, self._lifecycle = shared.effects, membership, lifecycle
        self.level, self.is_held = 0, False
        self._is_unloaded = False
        self._idle_since_ns: int | None = None
        self._ordered: dict[int, int] = {}  # by epoch: the level that a group was told to have
        membership.on_join = self._order

    def set(self, event: SleepSet) -> None:
        """Let all groups sleep, or wake them."""
        self.level, self.is_held, self._is_unloaded, self._idle_since_ns = event.level, event.is_held, False, None
        self._order_all()

    def advance(self) -> None:
        """Let groups sleep that have been idle for long enough, and wake them if there are requests again."""
        if not self._config.unload_after_ns or self.level:
            return
        now_ns = self._clock.now_ns
        if self._lifecycle.num_unfinished:
            self._idle_since_ns = None
            if self._is_unloaded:
                self._is_unloaded = False
                self._order_all()
            return
        if self._idle_since_ns is None:
            self._idle_since_ns = now_ns
            self._timers.turn_at(now_ns + self._config.unload_after_ns)
        if not self._is_unloaded and now_ns >= self._idle_since_ns + self._config.unload_after_ns:
            self._is_unloaded = True
            self._order_all()

    @property
    def _wanted(self) -> int:
        return self.level or (_IDLE_LEVEL if self._is_unloaded else 0)

    def _order_all(self) -> None:
        self._membership.note_sleep(is_asleep=bool(self.level or self.is_held))
        groups = self._membership.groups
        self._ordered = {epoch: level for epoch, level in self._ordered.items() if epoch in groups}
        for group in list(groups.values()):
            self._order(group)

    def _order(self, group: WorkerGroup) -> None:
        """Tell a group the level that it is to have, unless it has it, or was told."""
        wanted, has = self._wanted, self._ordered.get(group.epoch, group.registration.sleep_level)
        if wanted == has or group.is_outdated or FEATURE not in group.registration.features:
            return
        self._ordered[group.epoch] = wanted
        self._effects.append(SleepOrdered(group.connection, group.epoch, wanted))
        group.note_asleep()
        if group.active or group.in_flight:
            self._membership.end_epoch(group, "it goes to sleep")
