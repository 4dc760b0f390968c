"""Fault record of a worker group, kept across epochs, to tell faulty workers from requests that crash workers.

A *fault* is the worker's own: an invalid result, a message that cannot be processed, a missing result. It is not
evidence against any request. A *death* (the process is gone or silent, or makes no progress) may be caused by a
request, but several deaths in a row without a successful step in between also count against the worker.

After either, a group is held off: it stays registered but gets nothing to run for a period that doubles each time. It
is then on trial with one request at a time until it has completed a few steps.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

FIRST_PAUSE_NS = 1_000_000_000
MAX_PAUSE_NS = 60_000_000_000
NUM_STEPS_ON_TRIAL = 8
# A correct worker has no faults, so they are remembered for a long time.
NUM_STEPS_TO_FORGET = 256
_RECENT_NS = 60_000_000_000
_MAX_KNOWN = 1024


@dataclass(slots=True)
class Standing:
    """One group's record.

    Attributes:
        num_faults: Number of faults since it last completed NUM_STEPS_TO_FORGET steps without one.
        num_deaths: Number of consecutive deaths, without a successful step in between.
        num_good_steps: Number of successful steps since the last fault or death.
        held_until_ns: The group gets nothing to run before this time.
        last_seen_ns: When it last registered or its epoch was ended.
        reason: Reason of the last fault or death; empty if there was none.
        wrong_incarnation: The process whose results differed from those of other groups; it gets nothing to run again.
        lone_victims: Requests that were the only suspect when it died, since its last successful step.
    """

    num_faults: int = 0
    num_deaths: int = 0
    num_good_steps: int = 0
    held_until_ns: int = 0
    last_seen_ns: int = 0
    reason: str = ""
    wrong_incarnation: int | None = None
    lone_victims: set[str] = field(default_factory=set)

    @property
    def is_on_trial(self) -> bool:
        """Whether the group is limited to one request at a time."""
        has_failed = self.num_faults > 0 or self.num_deaths > 1
        return has_failed and self.num_good_steps < NUM_STEPS_ON_TRIAL

    def is_held(self, now_ns: int) -> bool:
        """Return whether the group must not run anything now."""
        return self.is_wrong or now_ns < self.held_until_ns

    @property
    def is_wrong(self) -> bool:
        """Whether the process is held off for wrong results."""
        return self.wrong_incarnation is not None

    def note_wrong(self, incarnation: int, now_ns: int, reason: str) -> None:
        """Record that the process's results differ from those of other groups. Nothing that it says about itself could
        show that it is right again, so only another process ends this.
        """
        self.note_fault(now_ns, reason)
        self.wrong_incarnation = incarnation

    def note_process(self, incarnation: int) -> None:
        """Record which process registers."""
        if self.wrong_incarnation != incarnation:
            self.wrong_incarnation = None

    def note_fault(self, now_ns: int, reason: str) -> None:
        """Record a fault of the worker itself."""
        self.num_faults += 1
        self._hold(now_ns, reason, self.num_faults)

    def note_death(self, now_ns: int, reason: str) -> None:
        """Record a death from any cause. After its first death, a group may run again as soon as it has reconnected."""
        self.num_deaths += 1
        self._hold(now_ns, reason, self.num_deaths - 1 + self.num_faults)

    def note_good_step(self) -> None:
        """Record a successful step."""
        self.num_good_steps += 1
        if self.num_deaths:
            self.num_deaths = 0
            self.lone_victims.clear()
        if self.num_good_steps >= NUM_STEPS_TO_FORGET:
            self.num_faults, self.reason = 0, ""

    def forgive_death(self) -> None:
        """Withdraw a recorded death, either because the worker had not died or because a request caused its death."""
        self.num_deaths = max(0, self.num_deaths - 1)
        if not self.num_faults and self.num_deaths < 2:
            self.held_until_ns = 0

    def _hold(self, now_ns: int, reason: str, count: int) -> None:
        self.reason = reason
        self.last_seen_ns = now_ns
        self.num_good_steps = 0
        if count > 0:
            pause_ns = min(FIRST_PAUSE_NS << min(count - 1, 16), MAX_PAUSE_NS)
            self.held_until_ns = max(self.held_until_ns, now_ns + pause_ns)


class Standings:
    """The records of all recent groups, by group id."""

    def __init__(self) -> None:
        self._by_group: OrderedDict[str, Standing] = OrderedDict()

    def num_recent(self, now_ns: int) -> int:
        """Return the number of groups that registered or whose epoch was ended recently."""
        return sum(now_ns - standing.last_seen_ns < _RECENT_NS for standing in self._by_group.values())

    def of(self, group_id: str) -> Standing:
        """Return the group's record; create it if the group is unknown."""
        standing = self._by_group.setdefault(group_id, Standing())
        self._by_group.move_to_end(group_id)
        if len(self._by_group) > _MAX_KNOWN:
            self._by_group.popitem(last=False)
        return standing
