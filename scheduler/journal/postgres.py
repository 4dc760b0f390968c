"""The journal in PostgreSQL, for a scheduler with a standby on another machine.

The writer holds a lease, which every transaction renews under the writer's epoch; a new holder raises the epoch in the
same row. A transaction of a deposed scheduler therefore finds no row and is rolled back. Only the database's clock
determines when a lease expires.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import psycopg

from midstream.errors import ConfigError
from scheduler.journal import DeposedError, JournalError
from scheduler.journal.postgres_database import Connection, Database
from scheduler.journal.store import Store, StoredJournal, Transaction

logger = logging.getLogger(__name__)

LEASE_S = 2.0
SCHEMA_VERSION = 1
_POLL_INTERVAL_S = 0.2
LINK_TIMEOUT_S = 2 * LEASE_S
_TABLES = """
CREATE TABLE IF NOT EXISTS midstream_writer (
    one integer PRIMARY KEY CHECK (one = 1), schema_version integer NOT NULL, epoch bigint NOT NULL,
    holder text NOT NULL, lease_until timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS midstream_requests (
    number bigint PRIMARY KEY, request bytea NOT NULL, output bytea NOT NULL);
CREATE TABLE IF NOT EXISTS midstream_commits (number bigserial PRIMARY KEY, record bytea NOT NULL);
CREATE TABLE IF NOT EXISTS midstream_adapters (name text PRIMARY KEY, record bytea NOT NULL);
INSERT INTO midstream_writer VALUES (1, %d, 0, '', '-infinity') ON CONFLICT DO NOTHING
"""
_RENEW = (
    "UPDATE midstream_writer SET lease_until = clock_timestamp() + make_interval(secs => %s) "
    "WHERE one = 1 AND epoch = %s"
)


class PostgresStore(Store):
    """A journal in the tables of one database."""

    def __init__(self, conninfo: str, holder: str, *, is_standby: bool = False) -> None:
        """Prepare the store; `take_over` connects. Raises ConfigError if the connection string is invalid.

        Args:
            conninfo: Connection string for libpq: a URL, or `host=... dbname=...`.
            holder: Name of this scheduler. A scheduler that returns with the same name need not wait for its own old
                lease.
            is_standby: Whether to wait even for a lease of this name.
        """
        self._database = Database(conninfo, holder, _TABLES % SCHEMA_VERSION, LINK_TIMEOUT_S)
        self._holder = holder
        self._is_standby = is_standby
        self._epoch = 0

    def take_over(self, least_epoch: int) -> int:
        """Connect, create missing tables, and wait for the lease."""
        with self._errors("cannot be opened"):
            seen: object = None
            since = time.monotonic()
            # A lease that has not been renewed for this long has expired, even if the database's clock was set back.
            while lease := self._try_to_take(least_epoch, is_over=time.monotonic() - since > 2 * LEASE_S):
                if seen is None:
                    logger.info("waiting for the journal's lease")
                if lease != seen:
                    seen, since = lease, time.monotonic()
                time.sleep(_POLL_INTERVAL_S)
        return self._epoch

    def _try_to_take(self, least_epoch: int, *, is_over: bool) -> tuple[object, ...] | None:
        """Take the lease if it has expired, if `is_over`, or if a scheduler of this name held it and this is not a
        standby; otherwise return its current row.
        """
        with self._database.transaction() as connection:
            version, epoch, holder, is_free, until = connection.execute(
                "SELECT schema_version, epoch, holder, lease_until <= clock_timestamp(), lease_until::text "
                "FROM midstream_writer FOR UPDATE"
            ).fetchone() or (0, 0, "", True, "")
            assert isinstance(version, int)
            assert isinstance(epoch, int)
            if version > SCHEMA_VERSION:
                raise ConfigError(
                    f"the journal was written by a newer version (schema {version}; this version supports "
                    f"{SCHEMA_VERSION}); use that version, or another database",
                    field="journal_url",
                )
            if not is_free and not is_over and (self._is_standby or holder != self._holder):
                return epoch, until
            self._epoch = max(epoch + 1, least_epoch)
            connection.execute(
                "UPDATE midstream_writer SET epoch = %s, holder = %s, "
                "lease_until = clock_timestamp() + make_interval(secs => %s)",
                (self._epoch, self._holder, LEASE_S),
            )
        return None

    def read(self) -> StoredJournal:
        stored = StoredJournal()
        with self._errors("cannot be read"), self._database.transaction() as connection:
            query = "SELECT number, request, output FROM midstream_requests ORDER BY number"
            stored.requests.extend(connection.execute(query))  # type: ignore[arg-type]
            query = "SELECT number, record FROM midstream_commits ORDER BY number"
            stored.commits.extend(connection.execute(query))  # type: ignore[arg-type]
            query = "SELECT name, record FROM midstream_adapters ORDER BY name"
            stored.adapters.extend(connection.execute(query))  # type: ignore[arg-type]
        return stored

    def write(self, transaction: Transaction) -> None:
        """Write one transaction, which starts by renewing the lease; a long one also renews it at its end."""
        started = time.monotonic()
        with (
            self._errors("cannot be written"),
            self._database.transaction() as connection,
            connection.cursor() as cursor,
        ):
            self._renew(connection)
            if transaction.accepted:
                cursor.executemany("INSERT INTO midstream_requests VALUES (%s, %s, '')", transaction.accepted)
            if transaction.compacted is not None:
                rows = [(output, number) for number, output in transaction.compacted]
                cursor.executemany("UPDATE midstream_requests SET output = %s WHERE number = %s", rows)
                cursor.execute("DELETE FROM midstream_commits")
            elif transaction.commit:
                cursor.execute("INSERT INTO midstream_commits (record) VALUES (%s)", (transaction.commit,))
            if transaction.rewritten:
                cursor.executemany(
                    "INSERT INTO midstream_requests VALUES (%s, %s, %s) "
                    "ON CONFLICT (number) DO UPDATE SET request = excluded.request, output = excluded.output",
                    transaction.rewritten,
                )
            for name, record in transaction.adapters:
                cursor.execute("DELETE FROM midstream_adapters WHERE name = %s", (name,))
                if record:
                    cursor.execute("INSERT INTO midstream_adapters VALUES (%s, %s)", (name, record))
            if transaction.forgotten:
                cursor.execute("DELETE FROM midstream_requests WHERE number = ANY(%s)", (transaction.forgotten,))
            if time.monotonic() - started > LEASE_S / 2:
                # A standby may be waiting for this transaction, and takes over if the lease has expired.
                self._renew(connection)

    def check(self) -> None:
        """Renew the lease."""
        with self._errors("cannot be written"), self._database.transaction() as connection:
            self._renew(connection)

    def _renew(self, connection: Connection) -> None:
        if connection.execute(_RENEW, (LEASE_S, self._epoch)).rowcount != 1:
            raise DeposedError(f"scheduler epoch {self._epoch} was superseded: another scheduler has the lease")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise JournalError(f"the journal in PostgreSQL {what}: {str(error).strip()}") from None

    def close(self) -> None:
        """Release the lease, so that a standby need not wait, and disconnect."""
        if self._epoch and self._database.is_connected:
            with contextlib.suppress(psycopg.Error), self._database.transaction() as connection:
                connection.execute(_RENEW, (0, self._epoch))
        self._database.close()
