"""Runs a store in a dedicated thread, so that the scheduler's loop never waits for a disk.

The steps of a commit:

1. The loop queues the core's entries (`commit`) and continues; the next step is planned meanwhile.
2. The thread takes all entries since its last transaction (group commit), so a slow disk leads to larger commits.
3. Once they are durable, it calls back on the loop, which publishes the tokens to the feeds.
4. When a transaction fails, the thread reports it once and ends. Nothing more is published; the process exits, and its
   successor continues from the last commit.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from midstream.clock import SteadyClock
from midstream.record import record
from scheduler.core.request import Request
from scheduler.journal import Journal, JournalContents, JournalEntry, JournalError, LostError
from scheduler.journal.adapters import encode_adapter, read_adapters
from scheduler.journal.documents import Documents, DocumentStore
from scheduler.journal.records import Replayed, StoredRequest, replay
from scheduler.journal.sqlite_documents import SqliteDocuments
from scheduler.journal.store import Store, StoredJournal, Transaction, seal
from scheduler.journal.writer import RowWriter, kept_of
from scheduler.wire.requests import ModelLimits

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHECK_INTERVAL_S = 0.5


@record
class _Commit:
    entries: list[JournalEntry]
    then: Callable[[], None]


@record
class _Known:
    requests: list[Request]


class ThreadedJournal(Journal):
    """A journal whose store runs in a thread."""

    def __init__(
        self,
        store: Store,
        limits: ModelLimits,
        model_fingerprint: str,
        clock: SteadyClock,
        documents: DocumentStore | None = None,
    ) -> None:
        """Prepare the journal; `open` opens it.

        Args:
            store: The store to write to; its methods are called by one thread.
            model_fingerprint: Fingerprint of the served model; requests of another model are dropped.
            documents: Where documents are stored; None means in memory.
        """
        self._clock = clock
        self.documents = Documents(documents or SqliteDocuments(None), clock)
        self._store = store
        self._limits = limits
        self._model_fingerprint = model_fingerprint
        self._queue: queue.SimpleQueue[_Commit | _Known | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        """Take over the store, read it, and start the thread."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[JournalContents] = loop.create_future()
        arguments = (loop, opened, on_failure)
        self._thread = threading.Thread(target=self._run, args=arguments, name="journal", daemon=True)
        self._thread.start()
        contents = await opened
        await self.documents.open(contents.scheduler_epoch)
        return contents

    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        """Queue entries for the thread."""
        self._queue.put(_Commit(entries, then))

    def know(self, requests: list[Request]) -> None:
        """Pass the requests to the thread."""
        self._queue.put(_Known(requests))

    async def close(self) -> None:
        """Return once the thread has finished its queue."""
        await self.documents.close()
        self._queue.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        opened: asyncio.Future[JournalContents],
        on_failure: Callable[[JournalError], None],
    ) -> None:
        try:
            contents, writer = self._open()
        except Exception as error:  # noqa: BLE001 (passed to the waiting caller)
            self._store.close()
            _call(loop, opened.set_exception, error)
            return
        _call(loop, opened.set_result, contents)
        try:
            self._write_all(loop, writer)
        except Exception as error:  # noqa: BLE001 (on any error the entries are not durable and must not be published)
            failure = (
                error if isinstance(error, JournalError) else JournalError(f"the journal cannot be written: {error}")
            )
            _call(loop, on_failure, failure)
        finally:
            self._store.close()

    def _open(self) -> tuple[JournalContents, RowWriter]:
        started = time.monotonic()
        epoch = self._store.take_over(least_epoch=time.time_ns() // 1_000_000)
        stored = self._store.read()
        replayed = replay(stored, self._limits, self._model_fingerprint, self._clock)
        self._report(replayed)
        known = replayed.requests
        gone = [number for number, _, _ in stored.requests if number not in known]
        tidying = self._tidying(stored, known, gone)
        if tidying is not None:
            self._store.write(tidying)
        now_ns = self._clock.now_ns()
        requests = [item.event(now_ns) for item in known.values()]
        # Ended requests are forgotten in the order of their ends; the others continue in order of arrival.
        requests.sort(key=lambda request: (request.finish is None, request.finish and request.finish.times.finished_ns))
        logger.info(
            "opened the journal",
            extra={
                "scheduler_epoch": epoch,
                "num_requests": len(requests),
                "num_unfinished": sum(request.finish is None for request in requests),
                "seconds": round(time.monotonic() - started, 3),
            },
        )
        kept = {item.recovered.spec.request_id: kept_of(item) for item in known.values()}
        adapters = read_adapters(stored, self._model_fingerprint)
        held = [(adapter.name, seal(encode_adapter(adapter, self._model_fingerprint))) for adapter in adapters]
        folds = self._store.folds_commits
        writer = RowWriter(kept, self._model_fingerprint, self._clock, held, folds_commits=folds)
        return JournalContents(epoch, requests, adapters), writer

    def _tidying(self, stored: StoredJournal, known: dict[int, StoredRequest], gone: list[int]) -> Transaction | None:
        """Return a transaction that removes requests that could not be restored, and stores the other ones as restored;
        None if the journal needs no change.
        """
        if self._store.folds_commits:
            if not (gone or stored.commits):
                return None
            changed = [item for item in known.values() if item.is_changed]
            folded = [(item.number, seal(item.output_record(self._clock))) for item in changed]
            return Transaction(forgotten=gone, compacted=folded)
        if self.num_damaged:
            sealed = {number: request for number, request, _ in stored.requests}
            rows = [(number, sealed[number], seal(item.output_record(self._clock))) for number, item in known.items()]
            return Transaction(forgotten=gone, rewritten=rows)
        return Transaction(forgotten=gone) if gone else None

    def _report(self, replayed: Replayed) -> None:
        self.num_damaged = replayed.num_damaged
        if replayed.num_damaged:
            logger.error(
                "the journal is damaged; continuing from its last valid record",
                extra={"num_damaged": replayed.num_damaged},
            )
        if replayed.num_foreign:
            logger.warning("dropped requests of another model", extra={"num_requests": replayed.num_foreign})

    def _write_all(self, loop: asyncio.AbstractEventLoop, writer: RowWriter) -> None:
        while True:
            try:
                commits = [self._queue.get(timeout=_CHECK_INTERVAL_S)]
            except queue.Empty:
                self._or_anew(self._store.check, writer)
                continue
            while not self._queue.empty():
                commits.append(self._queue.get())
            for item in commits:
                if isinstance(item, _Known):
                    writer.know(item.requests)
            group = [commit for commit in commits if isinstance(commit, _Commit)]
            if group:
                transaction = writer.transaction(entry for commit in group for entry in commit.entries)
                transaction.rewritten = writer.rows(self._store.stale(writer.live_bytes))
                self._or_anew(lambda: self._store.write(transaction), writer)  # noqa: B023 (called at once)
                self.num_commits += 1
                _call(loop, self._report_commits, group)
            if None in commits:
                return

    def _report_commits(self, group: list[_Commit]) -> None:
        for commit in group:
            commit.then()
        self.after_commits()

    def _or_anew(self, action: Callable[[], None], writer: RowWriter) -> None:
        """Run an action on the store; if the store's data was lost, write everything to a new store."""
        try:
            action()
        except LostError as error:
            self.num_lost += 1
            logger.critical("the journal was lost: %s", error)
            self._store.begin_anew()
            everything = writer.everything()
            self._store.write(everything)
            logger.warning(
                "began a new journal with the contents in memory", extra={"num_requests": len(everything.rewritten)}
            )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], object], argument: T) -> None:
    """Call a function on the loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        logger.debug("the loop was closed before the journal")
