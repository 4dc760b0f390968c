"""Documents in a separate SQLite file, next to a journal on one machine."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from midstream.errors import UnavailableError
from scheduler.journal import superseded
from scheduler.journal.documents import Execute, SqlDocuments

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS writer (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS midstream_documents (
    kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, version INTEGER NOT NULL, created_ns INTEGER NOT NULL,
    expires_ns INTEGER, data BLOB NOT NULL, PRIMARY KEY (kind, id, owner));
CREATE INDEX IF NOT EXISTS midstream_documents_of_owner ON midstream_documents (owner);
CREATE INDEX IF NOT EXISTS midstream_documents_that_expire ON midstream_documents (expires_ns)
    WHERE expires_ns IS NOT NULL;
INSERT OR IGNORE INTO writer VALUES (1, 0)
"""
_SUFFIXES = ("", "-wal", "-shm")


class SqliteDocuments(SqlDocuments):
    """Documents in one file that is accessible only to its owner; in memory if there is no journal."""

    def __init__(self, path: Path | None) -> None:
        """Prepare the store; `open` opens it. `path` is the file, or None for memory."""
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._epoch = 0
        self._inode = (0, 0)

    def open(self, scheduler_epoch: int) -> None:
        """Open or create the file; a file that SQLite cannot read is set aside."""
        self._epoch = scheduler_epoch
        with self._errors("opened"):
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
                self._connect()

    def _connect(self) -> None:
        self.close()
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # SQLite creates -wal and -shm with the mode of this file
            with contextlib.suppress(PermissionError):
                self._path.chmod(0o600)
        connection = sqlite3.connect(self._path or ":memory:", timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        self._connection = connection
        connection.execute("PRAGMA auto_vacuum=FULL")  # must come before the first table to have an effect
        connection.execute("PRAGMA journal_mode=WAL").fetchone()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        connection.execute("UPDATE writer SET epoch = max(epoch, ?)", (self._epoch,))
        self._check_epoch(connection)
        connection.execute("COMMIT")
        self._inode = self._stat()

    def _stat(self) -> tuple[int, int]:
        if self._path is None:
            return 0, 0
        with contextlib.suppress(FileNotFoundError):
            status = self._path.stat()
            return status.st_dev, status.st_ino
        return 0, 0

    def _set_aside(self, error: Exception) -> None:
        self.close()
        if self._path is None:
            return
        aside = self._path.with_name(self._path.name + ".damaged")
        logger.error("the documents cannot be read: %s; they are kept as %s", error, aside)
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                self._path.with_name(self._path.name + suffix).replace(aside.with_name(aside.name + suffix))

    def _check_epoch(self, connection: sqlite3.Connection) -> None:
        (epoch,) = connection.execute("SELECT epoch FROM writer").fetchone()
        if epoch != self._epoch:
            raise UnavailableError(superseded(self._epoch, epoch, self._path))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Execute]:
        with self._errors("read"):
            yield self._connected.execute

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Execute]:
        with self._errors("written"):
            connection = self._connected
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_epoch(connection)
                yield connection.execute
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.rollback()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._set_aside(error)  # the next call creates a new file
            raise UnavailableError(f"the documents in {self._path} cannot be {what}: {error}") from None
        except OSError as error:
            raise UnavailableError(f"the documents in {self._path} cannot be {what}: {error}") from None

    @property
    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._stat() != self._inode:
            logger.critical(
                "the documents in %s were deleted or replaced while in use; starting with an empty store", self._path
            )
            self.close()
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        """Close the file; an open transaction is rolled back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
