"""No journal: accepted requests are lost when the process ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from midstream.clock import SteadyClock
from scheduler.journal import Journal, JournalContents, JournalEntry, JournalError
from scheduler.journal.documents import Documents
from scheduler.journal.sqlite_documents import SqliteDocuments


class NoJournal(Journal):
    """A journal that stores nothing, and treats everything as committed immediately."""

    def __init__(self, clock: SteadyClock) -> None:
        """Keep documents in memory; `clock` determines when they expire."""
        self.documents = Documents(SqliteDocuments(None), clock)

    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        """Start empty; the epoch is the current time in milliseconds."""
        epoch = time.time_ns() // 1_000_000
        await self.documents.open(epoch)
        return JournalContents(scheduler_epoch=epoch, requests=[])

    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Call back immediately."""
        then()
        self.after_commits()

    async def close(self) -> None:
        """Drop the documents."""
        await self.documents.close()
