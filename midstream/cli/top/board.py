"""State of `midstream top`: the latest status, the samples of the last few minutes, and the connection's health."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from protos import status_pb2

_MAX_SAMPLES = 300
_SILENT_S = 3.0


class Board:
    """Collects status updates.

    Attributes:
        status: The latest status; None before the first update.
        samples: One sample per second, oldest first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.status: status_pb2.SystemStatus | None = None
        self.samples: deque[status_pb2.StatusSample] = deque(maxlen=_MAX_SAMPLES)
        self._clock = clock
        self._heard_s = 0.0
        self._loss = ""

    def take(self, status: status_pb2.SystemStatus, *, is_first: bool) -> None:
        """Add a status update; the first one on a connection contains the samples of the last few minutes."""
        if is_first:
            self.samples.clear()
        self.samples.extend(status.samples)
        self.status = status
        self._heard_s = self._clock()
        self._loss = ""

    def lose(self, reason: str) -> None:
        """Record that the connection was lost; the next router is tried."""
        self._loss = reason

    @property
    def problem(self) -> str:
        """Why the displayed data are stale; empty if they are current."""
        if self._loss:
            return f"No router answers ({self._loss}); trying again"
        if self.status is None:
            return "Connecting"
        silent_s = self._clock() - self._heard_s
        return f"No update for {silent_s:.0f} s" if silent_s > _SILENT_S else ""
