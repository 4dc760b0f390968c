"""The journal's disk: what the scheduler's machine stores, and which output tokens are durable there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from protos import generation_pb2, journal_pb2
from scheduler.core.events import Recovered
from scheduler.journal.documents import Document, DocumentKey, Documents
from scheduler.journal.frames import Frame, frames
from scheduler.journal.log import LogStore
from scheduler.journal.store import unseal
from tests.simulation import threads
from tests.simulation.disk import Disk, File
from tests.simulation.network import Network, running

FOLDER = "/scheduler/journal"
_LOCK, _SUFFIX = "lock", ".log"
# Small, so that segments are begun, rewritten and deleted while requests run.
_SEGMENT_BYTES, _SLACK_BYTES = (1 << 10, 1 << 12, 1 << 15), 1 << 10
_HEADER_BYTES = 1 << 10
_WRITE_SHARE = 0.05
_SYNC_S = (0.0001, 0.002)
_LONGEST_SYNC_S = 0.5


class JournalDisk(Disk):
    """The disk of the machine on which the schedulers run.

    Attributes:
        make_store: Creates the store of a log.
        slow_share: Share of the syncs that take up to half a second.
        num_committed: The highest number of output tokens ever durable, per (request id, sequence).
        was_damaged: Whether anything but a power cut has changed the files.
        documents: The version of the weights.
    """

    def __init__(self, network: Network, dice: random.Random) -> None:
        """Create an empty disk; `dice` determines the size of the log's segments."""
        super().__init__(self._wait, running)
        self.make_store = partial(LogStore, segment_bytes=dice.choice(_SEGMENT_BYTES), slack_bytes=_SLACK_BYTES)
        self._network = network
        self.slow_share = 0.0
        self.num_committed: dict[tuple[str, int], int] = {}
        self._num_durable: dict[tuple[str, int], int] = {}
        self.was_damaged = False
        self.documents: dict[DocumentKey, Document] = {}
        self.dice = network.dice
        self.on_sync = self._observe
        self._ids: dict[int, str] = {}

    def _wait(self, operation: str) -> None:
        thread, dice = threads.current(), self._network.dice
        thread.check_alive()
        if operation == "sync":
            is_slow = self.slow_share and dice.random() < self.slow_share
            thread.wait(dice.uniform(*_SYNC_S) if not is_slow else dice.uniform(0, _LONGEST_SYNC_S))
        elif operation == "write" and dice.random() < _WRITE_SHARE:
            thread.wait(dice.uniform(*_SYNC_S))

    def damage(self, kind: str, dice: random.Random) -> bool:
        """Change a byte of a record, or of one with a new request; return False if there is none to damage."""
        found = [
            (file, item)
            for name, file in self.files(FOLDER).items()
            if name.endswith(_SUFFIX)
            for item in frames(bytes(file.content), len(file.content))
            if isinstance(item, Frame) and (kind == "corrupt" or _has_request(item))
        ]
        if not found:
            return False
        file, item = dice.choice(found)
        self.spoil(file, dice.randrange(item.start, item.end))
        self.was_damaged = True
        return True

    def recovered(self, events: Sequence[Recovered]) -> list[str]:
        """Record what a new scheduler has read; return what it should have read as well."""
        problems = []
        ids = {event.spec.request_id for event in events}
        if not self.was_damaged:
            missing = sorted(set(self._ids.values()) - ids)
            problems += [f"{request_id} was accepted durably, but not recovered" for request_id in missing]
        self._ids = {number: request_id for number, request_id in self._ids.items() if request_id in ids}
        for event in events:
            for index, tokens in enumerate(event.outputs):
                key = (event.spec.request_id, index)
                num_durable = self._num_durable.get(key, 0)
                if len(tokens) < num_durable and not self.was_damaged:
                    problems.append(f"of {num_durable} durable tokens of {key}, {len(tokens)} were recovered")
                self._num_durable[key] = len(tokens)
        return problems

    def _observe(self, file: File) -> None:
        try:
            self._note(file)
        except Exception as error:  # noqa: BLE001 (it must not look like an error of the disk)
            self._network.loop.failures.append(f"the journal has unexpected contents: {error!r}")

    def _note(self, file: File) -> None:
        """Read the records of a log that are durable now and count: those of the current writer, and those of the
        previous one up to the end at which the current one continues.
        """
        files = self.files(FOLDER)
        state: _Read = file.note or _Read()
        if state.epoch is None:
            header = next(frames(bytes(file.on_disk[:_HEADER_BYTES]), min(len(file.on_disk), _HEADER_BYTES)), None)
            if not isinstance(header, Frame):
                return  # it is the lock
            segment = journal_pb2.JournalSegment.FromString(header.payload)
            file.note = state = _Read(header.end, segment.scheduler_epoch)
            previous = files.get(f"{segment.number - 1:08d}{_SUFFIX}")
            if previous is not None and previous.note is not None:
                self._read(previous, segment.previous_bytes)
        if _LOCK not in files or state.epoch == int.from_bytes(files[_LOCK].content[:8], "little"):
            self._read(file, len(file.on_disk))

    def _read(self, file: File, end: int) -> None:
        state: _Read = file.note
        start = state.num_bytes
        data = bytes(file.on_disk[start:end])
        for item in frames(data, len(data)):
            if isinstance(item, Frame):
                state.num_bytes = start + item.end
                self._apply(item.payload)

    def _apply(self, payload: bytes) -> None:
        record = journal_pb2.JournalTransaction.FromString(payload)
        for row in (*record.accepted, *record.rewritten):
            payload = journal_pb2.JournalRequest.FromString(unseal(row.request) or b"").payload
            self._ids[row.number] = generation_pb2.GenerateRequest.FromString(payload).request_id
        for row in record.accepted:
            request_id = self._ids[row.number]
            self._num_durable = {key: count for key, count in self._num_durable.items() if key[0] != request_id}
        if record.commit:
            for number, index, count in _tokens(record.commit):
                key = (self._ids[number], index)
                self._set(key, self._num_durable.get(key, 0) + count)
        for row in record.rewritten:
            for number, index, count in _tokens(row.output):
                self._set((self._ids[number], index), count)
        for number in record.forgotten:
            self._ids.pop(number, None)

    def _set(self, key: tuple[str, int], count: int) -> None:
        self._num_durable[key] = count
        self.num_committed[key] = max(self.num_committed.get(key, 0), count)


@dataclass(slots=True)
class _Read:
    """How much of a segment was read, and the epoch of its writer."""

    num_bytes: int = 0
    epoch: int | None = None


def _has_request(item: Frame) -> bool:
    return item.start > 0 and bool(journal_pb2.JournalTransaction.FromString(item.payload).accepted)


def _tokens(sealed: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the number, sequence index and number of tokens of each run in a commit."""
    record = journal_pb2.JournalCommit.FromString(unseal(sealed) or b"")
    indices = record.sequence_indices[:] or [0] * len(record.requests)
    counts = record.num_tokens[:] or [1] * len(record.requests)
    return zip(record.requests, indices, counts, strict=True)


class WeightsDocuments(Documents):
    """A store of only the version of the weights, and without a thread, since the timing of a thread would not be
    simulated.
    """

    def __init__(self, disk: JournalDisk) -> None:
        self._disk = disk

    async def open(self, scheduler_epoch: int) -> None:
        pass

    async def close(self) -> None:
        pass

    async def get(self, key: DocumentKey) -> Document | None:
        return self._disk.documents.get(key)

    async def put(self, key: DocumentKey, data: bytes, **options: object) -> None:
        if key.kind == "weights":
            await asyncio.sleep(self._disk.dice.uniform(0, 0.05))
            self._disk.documents[key] = Document(key, data, 1, 0)
            await asyncio.sleep(self._disk.dice.uniform(0, 0.05))

    async def list(self, *arguments: object, **options: object) -> list[Document]:
        return []
