"""The journal as a log: a folder of append-only segments, for a scheduler on one machine.

A commit is one write and one fdatasync. For the cost see docs/decisions/journal.md.

- **Power cuts.** A record is valid once it is synced. Only one write is in progress at a time, so a power cut can tear
  only the last record; none of its tokens were sent, and it is dropped. A segment gets its name once its first record
  is durable.
- **A killed process** may leave a last record that is complete but not synced, and so may one whose sync failed. The
  next process writes it again and syncs it first.
- **Damage.** An incomplete record followed by complete ones was synced, and has been damaged since. Its contents are
  lost. The next scheduler continues after it (see `replay`), logs its position, and keeps the file. After half a second
  without a commit an empty record is written, so that later damage to the last record can be distinguished from a torn
  write.
- **Size.** A segment is deleted when no request's latest row is in it. While the log is larger than twice the live
  data, the rows of its oldest segment are rewritten, a few with each commit.
- **One writer.** See LogFolder. A successor raises the epoch, then reads the log, and starts a new segment. A writer
  checks the epoch after each record, and reports the record as written only if no successor had raised it. A successor
  has therefore read everything that was reported, and records that a deposed writer still appends are beyond the end
  that the next segment's header records. Files are created, renamed and deleted under the lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from midstream.errors import ConfigError
from protos import journal_pb2 as pb
from scheduler.journal import DeposedError, JournalError, LostError, superseded
from scheduler.journal.frames import FRAME_BYTES, Frame, frame, frames
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.store import Store, StoredJournal, Transaction

logger = logging.getLogger(__name__)

VERSION = 1
SEGMENT_BYTES = 4 << 20
# Size that the log may have in addition to twice the live bytes.
SLACK_BYTES = 16 << 20
_MAX_REWRITTEN = 32
# Before a write, the open files are checked if the first interval has passed since their last check. The names in the
# folder, which cost more to check, are checked after the second interval.
_CHECK_INTERVAL_S, _NAMES_INTERVAL_S = 0.05, 0.5
_SUFFIX = ".log"
_NEW = "new"
_DAMAGED = ".damaged"


@dataclass(slots=True)
class _Segment:
    """A segment file of `num_bytes` on disk; `numbers` are the requests whose latest full records are in it."""

    number: int
    num_bytes: int
    numbers: set[int] = field(default_factory=set)
    is_damaged: bool = False

    @property
    def name(self) -> str:
        return f"{self.number:08d}{_SUFFIX}"


class LogStore(Store):
    """A journal stored as a log in a folder."""

    folds_commits = False

    def __init__(
        self,
        folder: LogFolder,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        slack_bytes: int = SLACK_BYTES,
    ) -> None:
        """Prepare the store; `take_over` opens it.

        Args:
            segment_bytes: Size of a segment; one record may exceed it.
            slack_bytes: Bytes that the log may have in addition to twice the live bytes.
        """
        self._folder = folder
        self._segment_bytes, self._slack_bytes = segment_bytes, slack_bytes
        self._epoch = 0
        self._begin()

    def _begin(self) -> None:
        self._sequence = 0
        self._offset = 0
        self._is_marked = True
        self._checked_at = self._names_checked_at = -math.inf
        self._segments: list[_Segment] = []
        self._homes: dict[int, _Segment] = {}
        self._adapters: dict[str, bytes] = {}
        self._stored = StoredJournal()
        self._rows: dict[int, tuple[bytes, bytes, int]] = {}
        self._is_behind_damage = False
        # Those of a previous writer that may not be durable, because it was killed or could not sync them: its last
        # record, and an empty one before that. None once they are.
        self._last_records: bytes | None = None

    @property
    def _current(self) -> _Segment:
        return self._segments[-1]

    def take_over(self, least_epoch: int) -> int:
        """Read the log, become its only writer, and start a segment."""
        try:
            self._folder.close()
            self._folder.open()
            with self._folder:
                self._begin()
                former_epoch = self._raise_epoch(least_epoch)
                self._read_all(was_used=former_epoch > 0)
                self._begin_segment()
        except OSError as error:
            raise self._failure("opened", error) from None
        return self._epoch

    def _raise_epoch(self, least_epoch: int) -> int:
        """Become the only writer whose records count; return the previous epoch, 0 after a reboot.

        The log is read after this, so it contains everything that the former writer has reported as written.
        """
        former = self._folder.epoch()
        headers = [_read_header(name, self._folder.read(name), self._folder.path) for name in self._log_names()]
        self._epoch = max(former, least_epoch - 1, *(item.scheduler_epoch for item in headers if item is not None)) + 1
        self._folder.set_epoch(self._epoch)
        return former

    def read(self) -> StoredJournal:
        """Return the data that `take_over` has read."""
        stored, rows = self._stored, sorted(self._rows.items())
        stored.requests = [(number, request, output) for number, (request, output, _) in rows]
        stored.first_commits = {number: first for number, (_, _, first) in rows}
        stored.adapters = sorted(self._adapters.items())
        self._stored, self._rows = StoredJournal(), {}
        return stored

    def write(self, transaction: Transaction) -> None:
        """Append one record and sync it."""
        data = _encode(transaction)
        try:
            if self._is_check_due(len(data)):
                with self._folder:
                    self._check_is_writer()
                    self._make_room(len(data))
            self._append(data)
            self._folder.sync(self._current.name)
            self._check_epoch()
            self._is_marked = False
            self._note(transaction)
            if self._has_dead_segment:
                with self._folder:
                    self._check_epoch()
                    self._drop_dead_segments()
        except OSError as error:
            raise self._failure("written", error) from None

    def check(self) -> None:
        """Check the files and the epoch; mark the last record as synced."""
        try:
            with self._folder:
                self._names_checked_at = -math.inf
                self._check_is_writer()
                if not self._is_marked:
                    self._append(b"")
                    self._is_marked = True
        except OSError as error:
            raise self._failure("written", error) from None

    def stale(self, live_bytes: int) -> Sequence[int]:
        """If the log is larger than twice `live_bytes`, return some requests of the oldest segment."""
        if sum(segment.num_bytes for segment in self._segments) <= 2 * live_bytes + self._slack_bytes:
            return ()
        oldest = self._segments[0]
        return () if oldest is self._current else sorted(oldest.numbers)[:_MAX_REWRITTEN]

    def begin_anew(self) -> None:
        """Set existing files aside, unless another scheduler has started a journal there, and start an empty log."""
        epoch = self._epoch
        self._begin()
        try:
            self._folder.close()
            self._folder.open()
            with self._folder:
                if (other := self._folder.epoch()) > epoch:
                    raise DeposedError(superseded(epoch, other, self._folder.path))
                for name in self._folder.names():
                    if name.endswith(_SUFFIX):
                        self._folder.rename(name, name + _DAMAGED)
                self._folder.set_epoch(epoch)
                self._begin_segment()
        except OSError as error:
            raise self._failure("begun anew", error) from None

    def close(self) -> None:
        if self._segments and not self._is_marked:
            with contextlib.suppress(JournalError):
                self.check()
        self._folder.close()

    def _is_check_due(self, num_bytes: int) -> bool:
        """Return whether the files must be checked before a record is appended.

        This is always the case for a file that is not preallocated: writing more data to it would hide that it was
        truncated.
        """
        end = self._offset + num_bytes
        has_room = end + FRAME_BYTES <= self._current.num_bytes and end <= self._segment_bytes
        return not has_room or time.monotonic() - self._checked_at > _CHECK_INTERVAL_S

    def _check_is_writer(self) -> None:
        """Check the epoch, the open files, and the names in the folder if that is due."""
        now = time.monotonic()
        self._check_epoch()  # first, because a successor deletes files
        self._folder.check(self._current.name, self._current.num_bytes)
        if now - self._names_checked_at > _NAMES_INTERVAL_S:
            self._folder.check_names([segment.name for segment in self._segments])
            self._names_checked_at = now
        self._checked_at = now

    def _check_epoch(self) -> None:
        if (epoch := self._folder.epoch()) != self._epoch:
            raise DeposedError(superseded(self._epoch, epoch, self._folder.path))

    def _failure(self, what: str, error: OSError) -> JournalError:
        is_lost = isinstance(error, FileNotFoundError)  # something else deletes the files
        return (LostError if is_lost else JournalError)(f"{self._folder.path} cannot be {what}: {error}")

    def _make_room(self, num_bytes: int) -> None:
        if self._offset + num_bytes > self._segment_bytes:
            self._begin_segment()

    def _append(self, payload: bytes) -> None:
        data = frame(self._sequence + 1, payload)
        self._folder.write(self._current.name, data, self._offset)
        self._sequence += 1
        self._offset += len(data)
        self._current.num_bytes = max(self._current.num_bytes, self._offset)

    def _begin_segment(self) -> None:
        """Create a segment; its first record becomes durable before the segment gets its final name."""
        previous = self._segments[-1] if self._segments else None
        if previous is not None and self._last_records is not None:
            self._folder.write_again(previous.name, self._last_records, self._offset - len(self._last_records))
            self._last_records = None
        elif previous is not None:
            self._folder.sync(previous.name)  # because of an empty record
        number = 1 if previous is None else previous.number + 1
        num_bytes = self._folder.create(_NEW, self._segment_bytes)
        record = pb.JournalSegment(
            num_bytes=num_bytes,
            version=VERSION,
            number=number,
            scheduler_epoch=self._epoch,
            previous_bytes=self._offset,
            adapters=[pb.JournalAdapterRow(name=name, record=data) for name, data in self._adapters.items()],
        )
        data = frame(self._sequence + 1, record.SerializeToString())
        segment = _Segment(number, max(num_bytes, len(data)))
        self._folder.write(_NEW, data, 0)
        self._folder.sync(_NEW)
        self._folder.rename(_NEW, segment.name)
        self._folder.sync_names()
        if previous is not None:
            self._folder.release(previous.name)
        self._segments.append(segment)
        self._sequence += 1
        self._offset = len(data)
        self._is_marked = True

    def _note(self, transaction: Transaction) -> None:
        for number, _ in transaction.accepted:
            self._set_home(number, self._current)
        for number, _, _ in transaction.rewritten:
            self._set_home(number, self._current)
        for number in transaction.forgotten:
            self._set_home(number, None)
        for name, record in transaction.adapters:
            if record:
                self._adapters[name] = record
            else:
                self._adapters.pop(name, None)

    def _set_home(self, number: int, segment: _Segment | None) -> None:
        before = self._homes.pop(number, None)
        if before is not None:
            before.numbers.discard(number)
        if segment is not None:
            segment.numbers.add(number)
            self._homes[number] = segment

    @property
    def _has_dead_segment(self) -> bool:
        return not self._segments[0].numbers and len(self._segments) > 1

    def _drop_dead_segments(self) -> None:
        """Delete the oldest segments that are no longer needed; each deletion becomes durable before the next one."""
        while self._has_dead_segment:
            segment = self._segments.pop(0)
            if segment.is_damaged:
                self._folder.rename(segment.name, segment.name + _DAMAGED)
            else:
                self._folder.unlink(segment.name)
            self._folder.sync_names()

    def _log_names(self) -> list[str]:
        return [name for name in self._folder.names() if name.endswith(_SUFFIX)]

    def _read_all(self, *, was_used: bool) -> None:
        names = self._log_names()
        if not names and was_used:
            logger.error("the journal %s was emptied; its contents are lost", self._folder.path)
            self._stored.num_damaged += 1
        files = [(name, self._folder.read(name)) for name in names]
        headers = [_read_header(name, data, self._folder.path) for name, data in files]
        for position, (name, data) in enumerate(files):
            is_last = position + 1 == len(files)
            following = None if is_last else headers[position + 1]
            end = following.previous_bytes if following is not None else len(data)
            self._read_segment(name, data, end, is_last)
            header = headers[position]
            if not self._is_behind_damage and (header is None or len(data) < header.num_bytes):
                self._note_damage(self._current, len(data))

    def _read_segment(self, name: str, data: bytes, end: int, is_last: bool) -> None:
        segment = _Segment(int(name.removesuffix(_SUFFIX)), len(data))
        self._segments.append(segment)
        self._last_records = b""
        self._offset = start = 0
        for item in frames(data, min(end, len(data))):
            if isinstance(item, Frame):
                self._read_frame(item, segment)
                self._last_records = data[start : item.end]
                start, self._offset = item.start, item.end
            elif item.is_tail and is_last:
                logger.warning("the journal's last transaction was cut off", extra={"file": name, "offset": item.start})
                self._stored.num_damaged += 1
            else:
                self._note_damage(segment, item.start)
        if not is_last and self._offset < end and not segment.is_damaged:
            self._note_damage(segment, self._offset)

    def _read_frame(self, item: Frame, segment: _Segment) -> None:
        if self._sequence and item.sequence != self._sequence + 1 and not self._is_behind_damage:
            self._note_damage(segment, self._offset)
        self._sequence = item.sequence
        self._is_behind_damage = False
        try:
            if item.start == 0:
                header = pb.JournalSegment.FromString(item.payload)
                self._adapters = {row.name: row.record for row in header.adapters}
            elif item.payload:
                self._apply(_decode(item.payload), item.sequence)
        except DecodeError:
            self._note_damage(segment, item.start)

    def _note_damage(self, segment: _Segment, offset: int) -> None:
        """Record that records are missing after the last one read, so that their effects are unknown."""
        logger.error(
            "the journal file %s is damaged at byte %d; continuing after the damage. The file is kept as *%s; check "
            "its disk",
            self._folder.path / segment.name,
            offset,
            _DAMAGED,
        )
        segment.is_damaged = self._is_behind_damage = True
        self._stored.commits.append((self._sequence + 1, b""))

    def _apply(self, transaction: Transaction, sequence: int) -> None:
        for number, request in transaction.accepted:
            self._rows[number] = (request, b"", sequence)
        if transaction.commit:
            self._stored.commits.append((sequence, transaction.commit))
        for number, request, output in transaction.rewritten:
            self._rows[number] = (request, output, sequence + 1)
        for number in transaction.forgotten:
            self._rows.pop(number, None)
        self._note(transaction)


def _read_header(name: str, data: bytes, folder: Path) -> pb.JournalSegment | None:
    first = next(frames(data, len(data)), None)
    if not isinstance(first, Frame) or first.start != 0:
        return None
    with contextlib.suppress(DecodeError):
        header = pb.JournalSegment.FromString(first.payload)
        if header.version > VERSION:
            raise ConfigError(
                f"{folder / name} was written by a newer version (format {header.version}; this version supports "
                f"{VERSION}); use that version, or another folder",
                field="journal_path",
            )
        return header
    return None


def _encode(transaction: Transaction) -> bytes:
    """Return a transaction's record, without compaction."""
    assert transaction.compacted is None
    record = pb.JournalTransaction(commit=transaction.commit)
    record.forgotten.extend(transaction.forgotten)
    for number, request in transaction.accepted:
        record.accepted.add(number=number, request=request)
    for number, request, output in transaction.rewritten:
        record.rewritten.add(number=number, request=request, output=output)
    for name, data in transaction.adapters:
        record.adapters.add(name=name, record=data)
    return record.SerializeToString()


def _decode(payload: bytes) -> Transaction:
    record = pb.JournalTransaction.FromString(payload)
    return Transaction(
        accepted=[(row.number, row.request) for row in record.accepted],
        commit=record.commit,
        forgotten=list(record.forgotten),
        rewritten=[(row.number, row.request, row.output) for row in record.rewritten],
        adapters=[(row.name, row.record) for row in record.adapters],
    )
