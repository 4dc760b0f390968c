"""Document stores in SQLite and in PostgreSQL behave the same."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from midstream.clock import SteadyClock
from midstream.errors import InvalidArgumentError, UnavailableError
from scheduler.journal.documents import MAX_DOCUMENT_BYTES, DocumentKey, Documents, DocumentStore
from scheduler.journal.postgres import PostgresStore
from scheduler.journal.postgres_documents import PostgresDocuments
from scheduler.journal.sqlite_documents import SqliteDocuments
from tests.integration.postgres import postgres_server

Make = Callable[[], DocumentStore]
KEY = DocumentKey("ann", "response", "r1")


class Hand:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.time_ns = 1_000_000

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.time_ns, lambda: self.time_ns)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as conninfo:
        yield conninfo


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Return a function that creates stores that use the same database."""
    if kind != "postgres":
        yield lambda: SqliteDocuments(None if kind == "memory" else tmp_path / "documents")
        return
    conninfo = request.getfixturevalue("server")
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS midstream_writer, midstream_documents")
    journal = PostgresStore(conninfo, "a")
    journal.take_over(least_epoch=1)
    yield lambda: PostgresDocuments(conninfo, "a")
    journal.close()


@pytest.fixture
def hand() -> Hand:
    return Hand()


@contextlib.asynccontextmanager
async def opened(store: DocumentStore, hand: Hand, epoch: int = 1) -> AsyncIterator[Documents]:
    documents = Documents(store, hand.clock())
    await documents.open(epoch)
    yield documents
    await documents.close()


async def test_a_document_is_returned_unchanged(make: Make, hand: Hand) -> None:
    async with opened(make(), hand) as documents:
        assert await documents.get(KEY) is None
        first = await documents.put(KEY, b"\x00one\xff")
        assert first is not None
        assert (first.version, first.created_ns, first.expires_ns) == (1, 1_000_000, None)
        hand.time_ns += 5
        second = await documents.put(KEY, b"", expires_ns=2_000_000)
        assert second is not None
        assert (second.version, second.created_ns, second.expires_ns) == (2, 1_000_000, 2_000_000)
        assert await documents.get(KEY) == second
        assert await documents.get(DocumentKey("bob", "response", "r1")) is None
        assert await documents.delete(KEY)
        assert not await documents.delete(KEY)
        assert await documents.get(KEY) is None


async def test_a_put_for_another_version_changes_nothing(make: Make, hand: Hand) -> None:
    async with opened(make(), hand) as documents:
        assert await documents.put(KEY, b"a", if_version=1) is None
        assert await documents.get(KEY) is None
        assert await documents.put(KEY, b"a", if_version=0) is not None
        assert await documents.put(KEY, b"b", if_version=0) is None
        assert await documents.put(KEY, b"c", if_version=1) is not None
        found = await documents.get(KEY)
        assert found is not None
        assert (found.data, found.version) == (b"c", 2)


async def test_expired_documents_are_gone(make: Make, hand: Hand) -> None:
    store = make()
    async with opened(store, hand) as documents:
        await documents.put(KEY, b"old", expires_ns=1_000_100)
        hand.time_ns = 1_000_099
        assert await documents.get(KEY) is not None
        hand.time_ns = 1_000_100
        assert await documents.get(KEY) is None
        assert await documents.list("response") == []
        assert await documents.num_bytes("ann") == 0
        assert not await documents.delete(KEY)
        new = await documents.put(KEY, b"new", expires_ns=1_000_200, if_version=0)
        assert new is not None
        assert (new.version, new.created_ns) == (1, 1_000_100)
        await documents._call(store.expire, 1_000_300)
        hand.time_ns = 0  # the time no longer matters, since the row has been deleted
        assert await documents.get(KEY) is None


async def test_lists_page_by_prefix_in_the_order_of_ids(make: Make, hand: Hand) -> None:
    async with opened(make(), hand) as documents:
        for owner, id_ in (("ann", "a/2"), ("ann", "a/1"), ("bob", "a/1"), ("ann", "b"), ("ann", "a"), ("ann", "a/é")):
            await documents.put(DocumentKey(owner, "item", id_), id_.encode())
        await documents.put(DocumentKey("ann", "other", "a/1"), b"")

        async def page(**how: object) -> list[tuple[str, str]]:
            found = await documents.list("item", **how)  # type: ignore[arg-type]
            assert all(document.data == document.key.id.encode() for document in found)
            return [(document.key.owner, document.key.id) for document in found]

        assert await page(owner="ann") == [("ann", id_) for id_ in ("a", "a/1", "a/2", "a/é", "b")]
        assert await page(owner="ann", prefix="a/", is_descending=True) == [
            ("ann", "a/é"),
            ("ann", "a/2"),
            ("ann", "a/1"),
        ]
        assert await page(limit=2) == [("ann", "a"), ("ann", "a/1")]
        after = DocumentKey("ann", "item", "a/1")
        assert await page(limit=2, after=after) == [("bob", "a/1"), ("ann", "a/2")]
        assert await page(after=after, is_descending=True) == [("ann", "a")]
        assert await page(prefix="a/1") == [("ann", "a/1"), ("bob", "a/1")]


async def test_the_size_counts_an_owners_documents_of_all_kinds(make: Make, hand: Hand) -> None:
    async with opened(make(), hand) as documents:
        await documents.put(KEY, b"12345")
        await documents.put(DocumentKey("ann", "file", "f"), b"123")
        await documents.put(DocumentKey("bob", "file", "f"), b"1")
        assert await documents.num_bytes("ann") == 8
        assert await documents.num_bytes("ann", without=KEY) == 3
        assert await documents.num_bytes("") == 0


@pytest.mark.parametrize("id_", ["", "x" * 513, "a\0b"])
async def test_a_wrong_id_is_refused(id_: str, hand: Hand) -> None:
    async with opened(SqliteDocuments(None), hand) as documents:
        with pytest.raises(InvalidArgumentError, match="id: "):
            await documents.put(DocumentKey("ann", "response", id_), b"")
        with pytest.raises(InvalidArgumentError, match="data: "):
            await documents.put(KEY, bytes(MAX_DOCUMENT_BYTES + 1))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_documents_outlive_their_scheduler_and_a_deposed_one_changes_nothing(
    kind: str, make: Make, hand: Hand, server: str
) -> None:
    async with opened(make(), hand, 1) as old:
        await old.put(KEY, b"kept")
        if kind == "postgres":
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute("UPDATE midstream_writer SET epoch = 2")
        async with opened(make(), hand, 2) as new:
            with pytest.raises(UnavailableError, match="superseded"):
                await old.put(KEY, b"late")
            with pytest.raises(UnavailableError, match="superseded"):
                await old.delete(KEY)
            found = await new.get(KEY)
            assert found is not None
            assert found.data == b"kept"
            assert await new.put(KEY, b"new") is not None


async def test_connections_to_postgres_are_reestablished(server: str, hand: Hand) -> None:
    journal = PostgresStore(server, "a")
    epoch = journal.take_over(least_epoch=1)
    async with opened(PostgresDocuments(server, "a"), hand, epoch) as documents:
        await documents.put(KEY, b"kept")
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% documents'"
            )
        # The task that deletes expired documents may detect the lost connection first.
        with contextlib.suppress(UnavailableError):
            await documents.get(KEY)
        assert await documents.get(KEY) is not None
    journal.close()


async def test_an_existing_file_becomes_private(tmp_path: Path, hand: Hand) -> None:
    path = tmp_path / "documents"
    path.touch(mode=0o644)
    path.chmod(0o644)
    async with opened(SqliteDocuments(path), hand) as documents:
        await documents.put(KEY, b"secret")
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


async def test_a_file_deleted_while_in_use_is_recreated(
    tmp_path: Path, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "new" / "documents"
    async with opened(SqliteDocuments(path), hand) as documents:
        await documents.put(KEY, b"lost")
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
        for file in path.parent.iterdir():
            file.unlink()
        assert await documents.get(KEY) is None
        assert "deleted or replaced while in use" in caplog.text
        await documents.put(KEY, b"kept")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT data FROM midstream_documents").fetchall() == [(b"kept",)]


async def test_a_file_that_is_not_a_database_is_set_aside(tmp_path: Path, hand: Hand) -> None:
    path = tmp_path / "documents"
    path.write_bytes(b"nonsense" * 1000)
    async with opened(SqliteDocuments(path), hand) as documents:
        assert await documents.put(KEY, b"kept") is not None
    assert path.with_name("documents.damaged").read_bytes().startswith(b"nonsense")


async def test_a_write_whose_answer_is_lost_is_found(make: Make, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    put = store.put

    def lose(*arguments: Any) -> None:
        put(*arguments)
        raise UnavailableError("the connection was lost")

    def fail(*_: Any) -> None:
        raise UnavailableError("the connection was lost")

    async with opened(store, hand) as documents:
        monkeypatch.setattr(store, "put", lose)
        await documents.put_surely(KEY, b"new")
        found = await documents.get(KEY)
        assert found is not None
        assert found.data == b"new"
        monkeypatch.setattr(store, "put", fail)
        with pytest.raises(UnavailableError):
            await documents.put_surely(KEY, b"newer")
