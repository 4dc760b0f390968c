"""Documents in PostgreSQL, in the database of the journal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import psycopg

from midstream.errors import UnavailableError
from scheduler.journal.documents import Cursor, Execute, SqlDocuments
from scheduler.journal.postgres import LINK_TIMEOUT_S
from scheduler.journal.postgres_database import Connection, Database

# Ids are compared by bytes, regardless of the database's collation.
_TABLES = """
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
        self._database = Database(conninfo, f"{holder} documents", _TABLES, LINK_TIMEOUT_S)
        self._epoch = 0

    def open(self, scheduler_epoch: int) -> None:
        """Connect, and create the table if it is missing."""
        self._epoch = scheduler_epoch
        with self._errors("opened"), self._database.transaction():
            pass

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Execute]:
        with self._errors("read"), self._database.transaction() as connection:
            yield _executing(connection)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Execute]:
        with self._errors("written"), self._database.transaction() as connection:
            execute = _executing(connection)
            yield execute
            # This check comes last, since token commits wait as long as the row is locked. A new writer waits for the
            # end of this transaction.
            found = execute("SELECT epoch FROM midstream_writer WHERE one = 1 FOR SHARE", ()).fetchall()
            if not found or found[0][0] != self._epoch:
                raise UnavailableError(f"scheduler epoch {self._epoch} was superseded: another scheduler has the lease")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            message = f"the documents in PostgreSQL cannot be {what}: {str(error).strip()}"
            raise UnavailableError(message) from None

    def close(self) -> None:
        self._database.close()


def _executing(connection: Connection) -> Execute:
    def execute(statement: str, values: Sequence[object]) -> Cursor:
        return connection.execute(statement.replace("?", "%s").encode(), values)

    return execute
