"""A connection to PostgreSQL that works in the same way whatever is between, and whatever the role's defaults are.

A pooler such as PgBouncer may run each transaction on another connection to the server, with the settings that the last
client left there. Nothing here depends on the state of a session: all statements are in transactions, each transaction
sets what it needs at its start, and no statement is prepared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from midstream.errors import ConfigError

Connection = psycopg.Connection[tuple[object, ...]]

_CONNECT_TIMEOUT_S = 5
# An arbitrary number: the key of an advisory lock that lets only one process at a time create the tables.
_SCHEMA_LOCK = 0x6D696473
# The defaults of a role or a database may differ. Statements of a live client are never cut off; a transaction whose
# client is silent is, as it would hold the lease's row.
_BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SET LOCAL row_security = off;
SET LOCAL idle_in_transaction_session_timeout = {link_timeout_ms};
SET LOCAL search_path = {schemas}
"""
_TRANSACTION_TIMEOUT_VERSION = 170_000
# The schema of existing tables, else the one in which new tables are created.
_SCHEMA_OF = """
SELECT coalesce((SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE pg_class.oid = to_regclass('midstream_writer')), current_schema())
"""


class Database:
    """A database with some tables. It is opened by the first transaction, and again if the connection was closed."""

    def __init__(self, conninfo: str, name: str, tables: str, link_timeout_s: float) -> None:
        """Check the connection string.

        Args:
            conninfo: Connection string for libpq: a URL, or `host=... dbname=...`.
            name: Name of the connection in the server's views.
            tables: Statements, separated by semicolons, that create tables if they are missing.
            link_timeout_s: Time after which either side ends a transaction if it does not hear from the other.

        Raises:
            ConfigError: The connection string is invalid. The message does not quote it: it may contain a password.
        """
        try:
            conninfo_to_dict(conninfo)
        except psycopg.ProgrammingError:
            raise ConfigError(
                "is not a connection string of libpq; use postgresql://USER@HOST/DATABASE or host=HOST dbname=DATABASE",
                field="journal_url",
            ) from None
        self._conninfo, self._name, self._tables = conninfo, name, tables
        self._link_timeout_ms = int(link_timeout_s * 1000)
        self._connection: Connection | None = None
        self._begin = b""

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Return a context that runs statements as one transaction, which is durable once the context has ended.

        Raises:
            ConfigError: The role has no schema for the tables.
            psycopg.Error: The transaction failed; if the connection was lost at its end, it may have been committed.
        """
        connection = self._start()
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                connection.execute("ROLLBACK")
            raise

    def _start(self) -> Connection:
        """Begin a transaction, on a new connection if the server or a pooler closed the old one while it was idle."""
        if self._connection is not None:
            try:
                self._connection.execute(self._begin)
            except psycopg.OperationalError:
                if self.is_connected:
                    raise
            else:
                return self._connection
        self._connection = connection = self._connect()
        connection.execute(self._begin)
        return connection

    def _connect(self) -> Connection:
        """Connect, and create missing tables. Both sides detect a lost connection soon, instead of hours later."""
        connection: Connection = psycopg.connect(
            self._conninfo,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=_CONNECT_TIMEOUT_S,
            application_name=f"midstream {self._name}",
            client_encoding="UTF8",
            keepalives_idle=1,
            keepalives_interval=1,
            keepalives_count=3,
            tcp_user_timeout=self._link_timeout_ms,
        )
        try:
            self._begin = self._statements(connection, sql.SQL("DEFAULT"))
            schema = self._schema(connection)
            self._begin = self._statements(connection, sql.SQL("{}, pg_temp").format(sql.Identifier(schema)))
            connection.execute(self._begin)
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            for statement in self._tables.split(";"):
                connection.execute(statement.encode())
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _statements(self, connection: Connection, schemas: sql.Composable) -> bytes:
        begin = sql.SQL(_BEGIN).format(link_timeout_ms=sql.Literal(self._link_timeout_ms), schemas=schemas)
        if connection.info.server_version >= _TRANSACTION_TIMEOUT_VERSION:
            begin += sql.SQL("; SET LOCAL transaction_timeout = 0")
        return begin.as_bytes(connection)

    def _schema(self, connection: Connection) -> str:
        connection.execute(self._begin)
        (schema,) = connection.execute(_SCHEMA_OF).fetchone() or (None,)
        connection.execute("COMMIT")
        if schema is None:
            raise ConfigError("the role's search_path names no schema that exists; set one", field="journal_url")
        return str(schema)

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
