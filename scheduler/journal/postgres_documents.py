"""Documents in PostgreSQL, in the database of the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psycopg

from midstream.errors import UnavailableError
from scheduler.journal.documents import Cursor, Execute, SqlDocuments
from scheduler.journal.postgres import connect

# Ids are compared by bytes, regardless of the database's collation.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS midstream_documents (
    kind text NOT NULL, id text COLLATE "C" NOT NULL, owner text COLLATE "C" NOT NULL, version bigint NOT NULL,
    created_ns bigint NOT NULL, expires_ns bigint, data bytea NOT NULL, PRIMARY KEY (kind, id, owner));
CREATE INDEX IF NOT EXISTS midstream_documents_of_owner ON midstream_documents (owner);
CREATE INDEX IF NOT EXISTS midstream_documents_that_expire ON midstream_documents (expires_ns)
    WHERE expires_ns IS NOT NULL
"""


class PostgresDocuments(SqlDocuments):
    """Documents in a table next to the journal's tables. Only the holder of the journal's lease can write. Reconnects
    after a failure.
    """

    def __init__(self, conninfo: str, holder: str) -> None:
        """Prepare the store; `open` connects. The arguments are those of PostgresStore."""
        self._conninfo, self._holder = conninfo, holder
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None
        self._epoch = 0

    def open(self, scheduler_epoch: int) -> None:
        """Connect, and create the table if it is missing."""
        self._epoch = scheduler_epoch
        with self._errors("opened"):
            self._connected  # noqa: B018 (connects)

    @property
    def _connected(self) -> psycopg.Connection[tuple[object, ...]]:
        if self._connection is None:
            self._connection = connect(self._conninfo, f"{self._holder} documents", _SCHEMA)
        return self._connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Execute]:
        with self._errors("read"):
            yield self._execute

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Execute]:
        with self._errors("written"), self._connected.transaction():
            yield self._execute
            # This check comes last, since token commits wait as long as the row is locked. A new writer waits for the
            # end of this transaction.
            found = self._execute("SELECT epoch FROM midstream_writer WHERE one = 1 FOR SHARE", ()).fetchall()
            if not found or found[0][0] != self._epoch:
                raise UnavailableError(f"scheduler epoch {self._epoch} was superseded: another scheduler has the lease")

    def _execute(self, statement: str, values: Sequence[object]) -> Cursor:
        return self._connected.execute(statement.replace("?", "%s").encode(), values)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            if self._connection is not None and (self._connection.closed or self._connection.broken):
                self._connection = None
            message = f"the documents in PostgreSQL cannot be {what}: {str(error).strip()}"
            raise UnavailableError(message) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
