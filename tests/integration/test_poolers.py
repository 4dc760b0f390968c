"""The journal in PostgreSQL works in the same way through PgBouncer, and whatever the role's defaults are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from midstream.errors import ConfigError
from scheduler.journal import DeposedError, JournalError
from scheduler.journal.documents import Document, DocumentKey
from scheduler.journal.postgres import PostgresStore
from scheduler.journal.postgres_documents import PostgresDocuments
from scheduler.journal.store import Transaction, seal
from tests.integration.postgres import ROLE, PostgresServer, has_pooler, pooler, running_server

NUM_COMMITS = 20
# Each of these lets the journal fail, lose data or depend on luck, if its transactions do not set it.
DEFAULTS = {
    "synchronous_commit": "off",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "statement_timeout": "30ms",
    "lock_timeout": "30ms",
    "idle_in_transaction_session_timeout": "30ms",
    "client_encoding": "latin1",
    "standard_conforming_strings": "off",
    "bytea_output": "escape",
    "datestyle": "SQL, DMY",
    "timezone": "Asia/Kathmandu",
    "search_path": '"$user", "a schema of its own", public',
}
needs_pooler = pytest.mark.skipif(not has_pooler(), reason="PgBouncer is not installed")
CONNECTIONS = ["direct", *(pytest.param(mode, marks=needs_pooler) for mode in ("session", "transaction"))]
HOLDER = "ärzte-\N{SNOWMAN}"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    # The longest delay of asynchronous commits, so that a crash loses them.
    with running_server("wal_writer_delay=10s") as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {ROLE} LOGIN".encode())
            for name, value in DEFAULTS.items():
                connection.execute(f"ALTER ROLE {ROLE} SET {name} = {value if ',' in value else repr(value)}".encode())
        yield server


@pytest.fixture
def database(server: PostgresServer) -> PostgresServer:
    """Return the server without a journal."""
    with psycopg.connect(server.conninfo, autocommit=True) as connection:
        connection.execute('DROP SCHEMA IF EXISTS "a schema of its own" CASCADE')
        connection.execute(f'CREATE SCHEMA "a schema of its own" AUTHORIZATION {ROLE}'.encode())
    return server


@contextlib.contextmanager
def connected(server: PostgresServer, how: str, *settings: str) -> Iterator[str]:
    """Yield a connection string of the role, directly or through a pooler in a mode."""
    with contextlib.ExitStack() as stack:
        direct = f"host=127.0.0.1 port={server.port} dbname=postgres"
        where = direct if how == "direct" else stack.enter_context(pooler(server.port, how, *settings))
        yield f"{where} user={ROLE}"


@pytest.mark.parametrize("how", CONNECTIONS)
def test_what_was_written_survives_a_crash_of_the_server(database: PostgresServer, how: str) -> None:
    key = DocumentKey("owner", "kind", "id")
    with connected(database, how) as conninfo:
        store, documents = PostgresStore(conninfo, HOLDER), PostgresDocuments(conninfo, HOLDER)
        documents.open(store.take_over(least_epoch=1))
        for number in range(NUM_COMMITS):
            store.check()
            assert documents.put(key, bytes([number, 0, 92]), 1, None, number) is not None
            assert documents.get(key, 1) is not None
            store.write(Transaction(accepted=[(number, b"\\x00\0")], commit=seal(bytes([number]))))
        database.crash()
        database.start()
        store.close()
        documents.close()
        assert store.take_over(least_epoch=1) > 1
        stored = store.read()
        assert stored.requests == [(number, b"\\x00\0", b"") for number in range(NUM_COMMITS)]
        assert [record for _, record in stored.commits] == [seal(bytes([number])) for number in range(NUM_COMMITS)]
        assert documents.get(key, 1) == Document(key, bytes([NUM_COMMITS - 1, 0, 92]), NUM_COMMITS, 1)
        store.close()
        documents.close()


@pytest.mark.parametrize("how", CONNECTIONS)
def test_a_standby_waits_while_the_writer_works_and_takes_over_once(database: PostgresServer, how: str) -> None:
    """The pooler has two connections for four clients, so that they all get one another's."""
    with connected(database, how, *(["default_pool_size=2"] if how == "transaction" else [])) as conninfo:
        first, second = PostgresStore(conninfo, "first"), PostgresStore(conninfo, "second", is_standby=True)
        documents = PostgresDocuments(conninfo, "first")
        documents.open(epoch := first.take_over(least_epoch=1))
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(second.take_over, 1)
            for number in range(2 * NUM_COMMITS):
                first.write(Transaction(commit=seal(bytes([number]))))
                assert documents.put(DocumentKey("a", "b", str(number)), b"", 1, None, None) is not None
                with contextlib.suppress(TimeoutError):
                    waiting.result(timeout=0.02)
            assert not waiting.done()
            first.close()
            assert waiting.result() == epoch + 1
        for write in (first.check, lambda: first.write(Transaction(commit=seal(b"late")))):
            with pytest.raises(DeposedError):
                write()
        assert len(second.read().commits) == 2 * NUM_COMMITS
        first.close()
        second.close()
        documents.close()


@pytest.mark.parametrize("how", CONNECTIONS)
def test_a_slow_transaction_is_not_cut_off(database: PostgresServer, how: str) -> None:
    """It waits for a lock, and then for its client, each for longer than the role's time limits."""
    with connected(database, how) as conninfo, psycopg.connect(database.conninfo) as other:
        store = PostgresStore(conninfo, "first")
        store.take_over(least_epoch=1)
        other.execute('LOCK TABLE "a schema of its own".midstream_commits IN ACCESS EXCLUSIVE MODE')
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(store.write, Transaction(commit=seal(b"one")))
            while not other.execute("SELECT FROM pg_locks WHERE NOT granted").rowcount:
                pass
            other.execute("SELECT pg_sleep(0.1)")
            other.rollback()
            writing.result()
        with store._database.transaction() as connection:
            connection.execute("DELETE FROM midstream_commits")
            other.execute("SELECT pg_sleep(0.1)")
        assert store.read().commits == []
        store.close()


@pytest.mark.parametrize("how", CONNECTIONS)
def test_connections_that_were_closed_while_idle_are_opened_again(database: PostgresServer, how: str) -> None:
    with connected(database, how) as conninfo:
        store, documents = PostgresStore(conninfo, "first"), PostgresDocuments(conninfo, "first")
        documents.open(store.take_over(least_epoch=1))
        with psycopg.connect(database.conninfo) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", (ROLE,)
            )
        store.write(Transaction(commit=seal(b"one")))
        assert documents.put(DocumentKey("a", "b", "c"), b"", 1, None, None) is not None
        assert len(store.read().commits) == 1
        store.close()
        documents.close()


@needs_pooler
def test_a_pooler_that_splits_transactions_is_refused(database: PostgresServer) -> None:
    with connected(database, "statement") as conninfo, pytest.raises(JournalError, match="statement pooling"):
        PostgresStore(conninfo, "first").take_over(least_epoch=1)


def test_the_tables_stay_where_they_are_when_the_role_gets_a_schema_of_its_own(database: PostgresServer) -> None:
    with connected(database, "direct") as conninfo:
        store = PostgresStore(conninfo, "first")
        store.take_over(least_epoch=1)
        store.write(Transaction(commit=seal(b"one")))
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA AUTHORIZATION {ROLE}".encode())
        store.close()
        again = PostgresStore(conninfo, "first")
        again.take_over(least_epoch=1)
        assert len(again.read().commits) == 1
        again.close()
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {ROLE} CASCADE".encode())


def test_rows_that_a_policy_hides_are_not_taken_for_absent(database: PostgresServer) -> None:
    with connected(database, "direct") as conninfo:
        store = PostgresStore(conninfo, "first")
        store.take_over(least_epoch=1)
        store.write(Transaction(commit=seal(b"one")))
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            for how in ("ENABLE", "FORCE"):
                table = '"a schema of its own".midstream_commits'
                connection.execute(f"ALTER TABLE {table} {how} ROW LEVEL SECURITY".encode())
        with pytest.raises(JournalError, match="row-level security"):
            store.read()
        store.close()


def test_a_role_without_a_schema_is_refused(database: PostgresServer) -> None:
    with (
        connected(database, "direct") as conninfo,
        pytest.raises(ConfigError, match="journal_url: the role's search_path names no schema"),
    ):
        PostgresStore(f"{conninfo} options='-c search_path=absent'", "first").take_over(least_epoch=1)


@pytest.mark.parametrize("conninfo", ["postgres//user:hunter2@host/name", "host=h pasword=hunter2", "hunter2"])
def test_a_wrong_connection_string_is_refused_without_its_password(conninfo: str) -> None:
    with pytest.raises(ConfigError, match="journal_url: is not a connection string") as raised:
        PostgresStore(conninfo, "first")
    assert "hunter2" not in str(raised.value)
