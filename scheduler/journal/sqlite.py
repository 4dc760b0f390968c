"""The journal in a SQLite file, for a scheduler on one machine.

The write-ahead log is synced at each transaction (synchronous=FULL), so commits survive a power cut. The files are
accessible only to their owner, because they hold prompts and outputs. Each commit first checks that they are still the
files that were opened and have not shrunk: otherwise committed data would be lost. SQLite drops an incomplete
transaction (torn tail) when it opens the file; nothing of it was sent to clients.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

from midstream.errors import ConfigError
from scheduler.journal import DeposedError, JournalError, LostError, superseded
from scheduler.journal.store import SCHEMA_VERSION, Store, StoredJournal, Transaction

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, request BLOB NOT NULL, output BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS commits (number INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, record BLOB NOT NULL);
"""
_SUFFIXES = ("", "-wal", "-shm")
_MAGIC = b"SQLite format 3\0"
_WAL_HEADER_BYTES, _WAL_FRAME_HEADER_BYTES = 32, 24


class SqliteStore(Store):
    """A journal in one SQLite file, with its `-wal` and `-shm` files."""

    def __init__(self, path: Path) -> None:
        """Prepare the store; `take_over` opens it."""
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._epoch = 0
        self._num_damaged = 0
        # Device, inode and largest size so far of each file, by suffix.
        self._files: dict[str, tuple[int, int, int]] = {}

    def take_over(self, least_epoch: int) -> int:
        """Open or create the file; set aside a file that SQLite cannot read at all."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._look_for_truncation()
            try:
                self._open(least_epoch)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._set_aside(error)
                self._open(least_epoch)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path} cannot be opened: {error}") from None
        return self._epoch

    def _look_for_truncation(self) -> None:
        """Log and count the truncation of a journal, which SQLite would treat as a new, empty database."""
        if self.path.exists() and self.path.stat().st_size == 0:
            logger.error("the journal %s was truncated; its contents are lost", self.path)
            self._num_damaged += 1

    def _open(self, least_epoch: int) -> None:
        self.close()
        torn = torn_tail_bytes(self.path)
        self._make_private()
        connection = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        self._connection = connection
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self.path} was written by a newer version (schema {version}; this version supports "
                f"{SCHEMA_VERSION}); use that version, or another file",
                field="journal_path",
            )
        if torn:
            logger.warning("the journal's last transaction was cut off", extra={"num_bytes": torn})
            self._num_damaged += 1
        connection.execute("PRAGMA journal_mode=WAL").fetchone()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        connection.execute("INSERT OR IGNORE INTO writer VALUES (1, 0)")
        connection.execute("UPDATE writer SET epoch = max(epoch + 1, ?)", (least_epoch,))
        self._epoch = connection.execute("SELECT epoch FROM writer").fetchone()[0]
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
        self._files = self._stat_files()

    def _make_private(self) -> None:
        self.path.touch(mode=0o600)  # SQLite creates -wal and -shm with the mode of this file
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self._file(suffix).chmod(0o600)

    def _file(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _stat_files(self) -> dict[str, tuple[int, int, int]]:
        files = {}
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                status = self._file(suffix).stat()
                files[suffix] = status.st_dev, status.st_ino, status.st_size
        return files

    def _check_files(self) -> None:
        """Raise LostError if the files were replaced or have shrunk."""
        files = self._stat_files()
        for suffix, (device, inode, size) in self._files.items():
            found = files.get(suffix)
            if found is None:
                raise LostError(f"{self.path}{suffix} was deleted while it was in use")
            if found[:2] != (device, inode):
                raise LostError(f"{self.path}{suffix} was replaced while it was in use")
            if found[2] < size:
                raise LostError(f"{self.path}{suffix} was truncated while it was in use")
        self._files = files

    def begin_anew(self) -> None:
        """Set existing files aside, unless another scheduler has started a journal there, and open a new file."""
        epoch, self._epoch = self._epoch, 0
        self.close()
        try:
            if (other := self._epoch_there()) > epoch:
                raise DeposedError(superseded(epoch, other, self.path))
            self._set_aside(LostError("it was deleted or truncated while it was in use"))
            self._open(least_epoch=epoch)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path} cannot be recreated: {error}") from None

    def _epoch_there(self) -> int:
        """Return the epoch of the journal on disk; 0 if there is none or it cannot be read."""
        if not self.path.exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as connection:
            try:
                return int(connection.execute("SELECT epoch FROM writer").fetchone()[0])
            except (sqlite3.Error, TypeError):
                return 0

    def _set_aside(self, error: Exception) -> None:
        self.close()
        aside = self.path.with_name(self.path.name + ".damaged")
        logger.error("the journal cannot be read: %s; it is kept as %s", error, aside)
        for suffix in _SUFFIXES:
            file = self._file(suffix)
            if file.exists():
                file.replace(aside.with_name(aside.name + suffix))
        self._num_damaged += 1

    def read(self) -> StoredJournal:
        """Read all rows. If a page is corrupt, read the rows before it and write them to a new file."""
        stored = StoredJournal(num_damaged=self._num_damaged)
        damage = None
        try:
            stored.requests.extend(self._connected.execute("SELECT * FROM requests ORDER BY number"))
        except sqlite3.DatabaseError as error:
            damage = error
        try:
            stored.adapters.extend(self._connected.execute("SELECT * FROM adapters ORDER BY name"))
            stored.commits.extend(self._connected.execute("SELECT * FROM commits ORDER BY number"))
        except sqlite3.DatabaseError as error:
            damage = error
        if damage is not None:
            stored.num_damaged += 1
            epoch = self._epoch
            self._set_aside(damage)
            self._open(least_epoch=epoch)
            self._lay_down(stored)
        return stored

    def _lay_down(self, stored: StoredJournal) -> None:
        connection = self._connected
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO requests VALUES (?, ?, ?)", stored.requests)
        connection.executemany("INSERT INTO commits VALUES (?, ?)", stored.commits)
        connection.executemany("INSERT INTO adapters VALUES (?, ?)", stored.adapters)
        connection.execute("COMMIT")

    def write(self, transaction: Transaction) -> None:
        """Write one transaction, which starts by checking the epoch."""
        connection = self._connected
        self._check_files()
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._check_epoch()
            _write_rows(connection, transaction)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be written: {error}") from None
        finally:
            if connection.in_transaction:  # otherwise the lock would block the next scheduler
                connection.rollback()

    def clear(self) -> None:
        """Delete all rows; the epoch is kept."""
        connection = self._connected
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM requests")
            connection.execute("DELETE FROM commits")
            connection.execute("DELETE FROM adapters")
            connection.execute("COMMIT")
            connection.execute("VACUUM")
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be written: {error}") from None

    def check(self) -> None:
        """Check the files and the epoch."""
        self._check_files()
        try:
            self._check_epoch()
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from None

    def _check_epoch(self) -> None:
        (epoch,) = self._connected.execute("SELECT epoch FROM writer").fetchone()
        if epoch != self._epoch:
            raise DeposedError(superseded(self._epoch, epoch, self.path))

    @property
    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError("the journal is not open")
        return self._connection

    def close(self) -> None:
        """Close the file; an open transaction is rolled back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write_rows(connection: sqlite3.Connection, transaction: Transaction) -> None:
    if transaction.accepted:
        connection.executemany("INSERT INTO requests VALUES (?, ?, x'')", transaction.accepted)
    if transaction.compacted is not None:
        rows = [(output, number) for number, output in transaction.compacted]
        connection.executemany("UPDATE requests SET output = ? WHERE number = ?", rows)
        connection.execute("DELETE FROM commits")
    elif transaction.commit:
        connection.execute("INSERT INTO commits (record) VALUES (?)", (transaction.commit,))
    if transaction.rewritten:
        connection.executemany("INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", transaction.rewritten)
    for name, record in transaction.adapters:
        if record:
            connection.execute("INSERT OR REPLACE INTO adapters VALUES (?, ?)", (name, record))
        else:
            connection.execute("DELETE FROM adapters WHERE name = ?", (name,))
    if transaction.forgotten:
        numbers = [(number,) for number in transaction.forgotten]
        connection.executemany("DELETE FROM requests WHERE number = ?", numbers)


def is_sqlite(path: Path) -> bool:
    """Return whether a file is a SQLite database, or empty."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) in (b"", _MAGIC)


def torn_tail_bytes(path: Path) -> int:
    """Return the number of bytes after the last complete frame of the write-ahead log; usually 0."""
    wal = path.with_name(path.name + "-wal")
    try:
        size = wal.stat().st_size
        with wal.open("rb") as file:
            header = file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        return 0
    if len(header) < _WAL_HEADER_BYTES:
        return size
    frame_bytes = _WAL_FRAME_HEADER_BYTES + int.from_bytes(header[8:12], "big")
    return (size - _WAL_HEADER_BYTES) % frame_bytes
