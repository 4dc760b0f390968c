"""No journal: what was accepted lives as long as the process."""

from __future__ import annotations

import time
from collections.abc import Callable

from scheduler.journal import Journal, JournalContents, JournalEntry, JournalError


class NoJournal(Journal):
    """Keeps nothing beside what is in memory anyhow, so everything is committed at once."""

    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        """Starts empty; the epoch is the time, in milliseconds."""
        return JournalContents(scheduler_epoch=time.time_ns() // 1_000_000, requests=[])

    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Calls back at once."""
        then()

    async def close(self) -> None:
        """Does nothing."""
