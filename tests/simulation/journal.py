"""The journal on a simulated disk, which survives the processes that write to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from midstream.clock import SteadyClock
from protos import generation_pb2, journal_pb2
from scheduler.journal import DeposedError, JournalContents, JournalEntry, JournalError
from scheduler.journal.documents import Document, DocumentKey, Documents
from scheduler.journal.sqlite_documents import SqliteDocuments
from scheduler.journal.store import Store, StoredJournal, Transaction, unseal
from scheduler.journal.threaded import ThreadedJournal
from scheduler.journal.writer import RowWriter
from scheduler.wire.requests import ModelLimits
from tests.simulation.loop import Flag, Process
from tests.simulation.network import Network

_CHECK_INTERVAL_S = 0.5


class Disk:
    """The journal's current and past contents.

    Attributes:
        epoch: Epoch of the scheduler that may write.
        is_full: Whether writes fail.
        num_committed: The highest number of output tokens ever committed, per (request id, sequence).
        num_deposed: Number of writes rejected because another scheduler has taken over.
        num_full: Number of writes rejected because the disk was full.
        was_damaged: Whether a record was torn or damaged.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.requests: dict[int, tuple[bytes, bytes]] = {}
        self.commits: list[tuple[int, bytes]] = []
        self.is_full = False
        self.num_torn = 0
        self.num_committed: dict[tuple[str, int], int] = {}
        self.num_deposed = self.num_full = 0
        self.was_damaged = False
        self._num_commits = 0
        self._ids: dict[int, str] = {}
        self._lengths: dict[tuple[int, int], int] = {}

    def write(self, transaction: Transaction) -> None:
        """Write all entries atomically."""
        for number, sealed in transaction.accepted:
            self.requests[number] = (sealed, b"")
            payload = journal_pb2.JournalRequest.FromString(unseal(sealed) or b"").payload
            self._ids[number] = generation_pb2.GenerateRequest.FromString(payload).request_id
        if transaction.compacted is not None:
            for number, output in transaction.compacted:
                self.requests[number] = (self.requests[number][0], output)
            self.commits.clear()
        if transaction.commit:
            if transaction.compacted is None:
                self._num_commits += 1
                self.commits.append((self._num_commits, transaction.commit))
            self._note_committed(transaction.commit)
        for number in transaction.forgotten:
            self.requests.pop(number, None)

    def _note_committed(self, sealed: bytes) -> None:
        record = journal_pb2.JournalCommit.FromString(unseal(sealed) or b"")
        indices = record.sequence_indices[:] or [0] * len(record.requests)
        counts = record.num_tokens[:] or [1] * len(record.requests)
        for number, index, count in zip(record.requests, indices, counts, strict=True):
            key = (self._ids[number], index)
            stored = self._lengths[number, index] = self._lengths.get((number, index), 0) + count
            self.num_committed[key] = max(self.num_committed.get(key, 0), stored)

    def damage(self, kind: str, dice: random.Random) -> bool:
        """Tear the end of the journal or damage a record; return False if there is no record to damage."""
        if kind == "torn":
            self.num_torn += 1
        elif kind == "corrupt" and self.commits:
            position = dice.randrange(len(self.commits))
            number, sealed = self.commits[position]
            self.commits[position] = (number, _spoil(sealed, dice))
        elif kind == "corrupt request" and self.requests:
            number = dice.choice(sorted(self.requests))
            sealed, output = self.requests[number]
            self.requests[number] = (_spoil(sealed, dice), output)
        else:
            return False
        self.was_damaged = True
        return True

    def reset_lengths(self, lengths: dict[tuple[int, int], int]) -> None:
        """Set the numbers of output tokens that a scheduler has read, from which it continues."""
        self._lengths = lengths


def _spoil(sealed: bytes, dice: random.Random) -> bytes:
    position = dice.randrange(len(sealed))
    return sealed[:position] + bytes([sealed[position] ^ 0x55]) + sealed[position + 1 :]


class DiskStore(Store):
    """The disk as seen by one scheduler."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._epoch = 0

    def take_over(self, least_epoch: int) -> int:
        self._disk.epoch = self._epoch = max(self._disk.epoch + 1, least_epoch)
        return self._epoch

    def read(self) -> StoredJournal:
        disk = self._disk
        torn, disk.num_torn = disk.num_torn, 0
        requests = [(number, *row) for number, row in sorted(disk.requests.items())]
        return StoredJournal(requests=requests, commits=list(disk.commits), num_damaged=torn)

    def write(self, transaction: Transaction) -> None:
        self.check()
        if self._disk.is_full:
            self._disk.num_full += 1
            raise JournalError("the disk is full")
        self._disk.write(transaction)

    def check(self) -> None:
        if self._disk.epoch != self._epoch:
            self._disk.num_deposed += 1
            raise DeposedError(f"epoch {self._epoch} was superseded")

    def close(self) -> None:
        pass


class NoDocuments(Documents):
    """A store without documents and without a thread, since the timing of a thread would not be simulated."""

    async def get(self, key: DocumentKey) -> None:
        return None

    async def put(self, *arguments: object, **options: object) -> None:
        return None

    async def list(self, *arguments: object, **options: object) -> list[Document]:
        return []


class SimulatedJournal(ThreadedJournal):
    """Does the work of the journal's thread in a task, with the real rows, order and group commit."""

    def __init__(
        self,
        network: Network,
        disk: Disk,
        process: Process,
        limits: ModelLimits,
        fingerprint: str,
        clock: SteadyClock,
    ) -> None:
        super().__init__(DiskStore(disk), limits, fingerprint, clock)
        self.documents = NoDocuments(SqliteDocuments(None), clock)
        self._network, self._disk, self._process = network, disk, process
        self._waiting: list[tuple[list[JournalEntry], Callable[[], None]]] = []
        self._changed = Flag()
        self._is_closing = False
        self._writing: asyncio.Task[None] | None = None

    async def open(self, on_failure: Callable[[JournalError], None]) -> JournalContents:
        await asyncio.sleep(self._sync_s())
        contents, writer = self._open()
        kept = writer._kept.values()
        self._disk.reset_lengths({(item.number, i): n for item in kept for i, n in enumerate(item.lengths)})
        self._writing = asyncio.create_task(self._write(writer, on_failure), name="journal")
        return contents

    def commit(self, entries: list[JournalEntry], then: Callable[[], None]) -> None:
        self._waiting.append((entries, then))
        self._changed.set()

    async def close(self) -> None:
        self._is_closing = True
        self._changed.set()
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def _sync_s(self) -> float:
        return self._network.dice.uniform(0.0001, 0.002)

    async def _write(self, writer: RowWriter, on_failure: Callable[[JournalError], None]) -> None:
        while self._waiting or not self._is_closing:
            if not self._waiting:
                await self._changed.wait(_CHECK_INTERVAL_S)
            group, self._waiting = self._waiting, []
            try:
                if not group:
                    self._store.check()
                    continue
                transaction = writer.transaction(entry for entries, _ in group for entry in entries)
                await asyncio.sleep(self._sync_s())
                if self._process.is_dead:
                    return
                self._store.write(transaction)
            except JournalError as error:
                on_failure(error)
                return
            self.num_commits += 1
            self._network.arrive(self._process, "committed", len(transaction.commit))
            for _, then in group:
                then()
            self.after_commits()
