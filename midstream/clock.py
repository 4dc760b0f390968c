"""A monotonic clock for use within a process. Times are converted to wall-clock time only for messages and files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

# Reading two clocks takes time, and the wall clock is slewed, so smaller differences do not count as jumps.
_TOLERANCE_NS = 1_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SteadyClock:
    """A clock that starts at Unix time and advances with the monotonic clock. It differs from the wall clock by the
    jumps that the wall clock has made since then. Thread-safe.
    """

    def __init__(
        self, wall_ns: Callable[[], int] | None = None, monotonic_ns: Callable[[], int] | None = None, boot_id: str = ""
    ) -> None:
        """Start at the current time.

        Args:
            wall_ns: Returns Unix nanoseconds; by default, the system's.
            monotonic_ns: Returns nanoseconds since an arbitrary time; by default, the system's.
            boot_id: Identifies the machine and boot for which `monotonic_ns` is valid; by default, the system's.
        """
        self._wall_ns = wall_ns or time.time_ns
        self._monotonic_ns = monotonic_ns or time.monotonic_ns
        self.boot_id = boot_id or _boot_id()
        self._offset_ns = self._wall_ns() - self._monotonic_ns()
        self._jumped_ns = 0

    def now_ns(self) -> int:
        """Return nanoseconds since the Unix epoch by this clock, which never jumps."""
        return self._monotonic_ns() + self._offset_ns

    def to_unix_ns(self, time_ns: int) -> int:
        """Convert a time to Unix time using the current wall clock; 0 (the event has not happened) stays 0."""
        return time_ns + self._jump_ns() if time_ns else 0

    def to_unix_each(self, times_ns: Iterable[int]) -> list[int]:
        """Return `to_unix_ns` of each time, by one reading of the wall clock."""
        jumped_ns = self._jump_ns()
        return [time_ns + jumped_ns if time_ns else 0 for time_ns in times_ns]

    def from_unix_ns(self, unix_ns: int) -> int:
        """Convert Unix time to this clock's time using the current wall clock; 0 stays 0."""
        return unix_ns - self._jump_ns() if unix_ns else 0

    def to_monotonic_ns(self, time_ns: int) -> int:
        """Convert a time to monotonic-clock time, which all processes with the same `boot_id` share."""
        return time_ns - self._offset_ns

    def from_monotonic_ns(self, monotonic_ns: int) -> int:
        """Convert monotonic-clock time to this clock's time; the inverse of `to_monotonic_ns`."""
        return monotonic_ns + self._offset_ns

    def _jump_ns(self) -> int:
        jumped_ns = self._wall_ns() - self._monotonic_ns() - self._offset_ns
        if abs(jumped_ns - self._jumped_ns) > _TOLERANCE_NS:
            self._jumped_ns = jumped_ns
        return self._jumped_ns


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not on Linux, so no other process is known to share the monotonic clock
