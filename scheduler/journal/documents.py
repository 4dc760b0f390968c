"""Documents: data stored for clients beyond a request's lifetime, such as responses, files and batches.

A document is bytes under a key of owner, kind and id. Documents are stored in a separate database, which a dedicated
thread reads and writes, so that a large document delays no tokens. A write is durable once its coroutine returns. A
failed write affects only its caller, and a write by a deposed scheduler is rejected.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, cast

from midstream.clock import SteadyClock
from midstream.errors import InvalidArgumentError, UnavailableError
from midstream.record import record

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_DOCUMENT_BYTES = 64 << 20
MAX_KEY_CHARS = 512
_EXPIRY_INTERVAL_S = 60.0
_READ_BACK_S = (0.1, 0.5, 1.0, 2.0, 4.0)
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True, slots=True, order=True)
class DocumentKey:
    """The key of a document. Lists are sorted by (id, owner).

    Attributes:
        owner: Owner of the document; may be empty. Each owner has its own kinds and ids.
        kind: A short name chosen by the code, such as `response`.
        id: 1 to 512 characters, without NUL. Ids that start with a time make lists chronological.
    """

    owner: str
    kind: str
    id: str


@record
class Document:
    """A stored document.

    Attributes:
        version: 1 when new, incremented by each put.
        created_ns: Unix time of its first put, in nanoseconds.
        expires_ns: Unix time of its expiry, in nanoseconds; None if it does not expire.
    """

    key: DocumentKey
    data: bytes
    version: int
    created_ns: int
    expires_ns: int | None = None


class Documents:
    """The documents of a scheduler.

    All methods raise UnavailableError if the database cannot be read or written, or another scheduler has taken over.
    """

    def __init__(self, store: DocumentStore, clock: SteadyClock) -> None:
        """Create the interface; call `open` before use."""
        self._store, self._clock = store, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="documents")
        self._expiry: asyncio.Task[None] | None = None

    async def open(self, scheduler_epoch: int) -> None:
        """Take over the documents from the previous scheduler."""
        await self._call(self._store.open, scheduler_epoch)
        self._expiry = asyncio.create_task(self._expire(), name="expiry of documents")

    async def put(
        self, key: DocumentKey, data: bytes, *, expires_ns: int | None = None, if_version: int | None = None
    ) -> Document | None:
        """Store a document, replacing any document with the same key.

        Args:
            data: The contents, at most 64 MiB.
            expires_ns: Unix time of its expiry, in nanoseconds; None if it does not expire.
            if_version: Store the document only if this is its current version; 0 means only if it does not exist, None
                always.

        Returns:
            The document as stored; None, with nothing changed, if the version differs.

        Raises:
            InvalidArgumentError: The key or the data is too long.
        """
        if not 0 < len(key.id) <= MAX_KEY_CHARS or len(key.owner) > MAX_KEY_CHARS or "\0" in key.id + key.owner:
            raise InvalidArgumentError(f"must be 1 to {MAX_KEY_CHARS} characters without NUL", field="id")
        if len(data) > MAX_DOCUMENT_BYTES:
            message = f"has {len(data)} bytes; must have at most {MAX_DOCUMENT_BYTES}; split it into several documents"
            raise InvalidArgumentError(message, field="data")
        return await self._call(self._store.put, key, data, self._clock.now_ns(), expires_ns, if_version)

    async def put_surely(self, key: DocumentKey, data: bytes) -> None:
        """Store a document, and raise only if it is not stored.

        A database may commit a write and lose its connection before it says so; the document is then read back.

        Raises:
            UnavailableError: The document is not stored, or the database does not answer for some seconds.
        """
        try:
            await self.put(key, data)
        except UnavailableError:
            found = await self._read_back(key)
            if found is None or found.data != data:
                raise

    async def _read_back(self, key: DocumentKey) -> Document | None:
        for pause_s in _READ_BACK_S:
            try:
                return await self.get(key)
            except UnavailableError:
                await asyncio.sleep(pause_s)
        return None

    async def get(self, key: DocumentKey) -> Document | None:
        """Return a document, or None."""
        return await self._call(self._store.get, key, self._clock.now_ns())

    async def delete(self, key: DocumentKey) -> bool:
        """Delete a document; return whether there was one."""
        return await self._call(self._store.delete, key, self._clock.now_ns())

    async def list(
        self,
        kind: str,
        *,
        owner: str | None = None,
        prefix: str = "",
        after: DocumentKey | None = None,
        limit: int = 100,
        is_descending: bool = False,
    ) -> list[Document]:
        """Return documents in order of their ids.

        Args:
            owner: Owner of the documents; None means any owner, for the service's own tasks.
            prefix: Prefix of their ids.
            after: Start after this key (before it if `is_descending`); it need not exist.
            is_descending: Whether to list from the last id to the first.
        """
        query = Query(kind, owner, prefix, after, limit, is_descending)
        return await self._call(self._store.list, query, self._clock.now_ns())

    async def num_bytes(self, owner: str, *, without: DocumentKey | None = None) -> int:
        """Return the total size of an owner's documents of all kinds, except one."""
        return await self._call(self._store.num_bytes, owner, self._clock.now_ns(), without)

    async def close(self) -> None:
        """Return once all writes are durable or have failed."""
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.wait((self._expiry,))
            await self._call(self._store.close)
        self._thread.shutdown(wait=False)

    async def _expire(self) -> None:
        while True:
            try:
                await self._call(self._store.expire, self._clock.now_ns())
            except Exception as error:  # noqa: BLE001 (logged, and retried)
                logger.warning("cannot delete expired documents now: %s", error)
            await asyncio.sleep(_EXPIRY_INTERVAL_S)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))


@record
class Query:
    """Parameters of a listing; fields as in `Documents.list`."""

    kind: str
    owner: str | None
    prefix: str
    after: DocumentKey | None
    limit: int
    is_descending: bool


class DocumentStore(ABC):
    """Storage of documents. All methods run in one thread; `now_ns` determines expiry. Errors are as in Documents."""

    @abstractmethod
    def open(self, scheduler_epoch: int) -> None:
        """Reject writes by schedulers of earlier epochs from now on."""

    @abstractmethod
    def put(
        self, key: DocumentKey, data: bytes, now_ns: int, expires_ns: int | None, if_version: int | None
    ) -> Document | None:
        """See Documents.put."""

    @abstractmethod
    def get(self, key: DocumentKey, now_ns: int) -> Document | None:
        """See Documents.get."""

    @abstractmethod
    def delete(self, key: DocumentKey, now_ns: int) -> bool:
        """See Documents.delete."""

    @abstractmethod
    def list(self, query: Query, now_ns: int) -> list[Document]:
        """See Documents.list."""

    @abstractmethod
    def num_bytes(self, owner: str, now_ns: int, without: DocumentKey | None) -> int:
        """See Documents.num_bytes."""

    @abstractmethod
    def expire(self, now_ns: int) -> None:
        """Delete expired documents."""

    @abstractmethod
    def close(self) -> None:
        """Release the database."""


class Cursor(Protocol):
    """The part of the database cursor interface that is used here."""

    @property
    def rowcount(self) -> int:
        """Number of rows that were changed."""

    def fetchall(self) -> Sequence[Sequence[object]]:
        """Return all rows."""


Execute = Callable[[str, Sequence[object]], Cursor]

_SELECT = "SELECT owner, kind, id, data, version, created_ns, expires_ns FROM midstream_documents "


class SqlDocuments(DocumentStore):
    """The table `midstream_documents` of a SQL database, to which subclasses connect. `?` stands for parameters."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Execute]:
        """Return a context in which statements can read."""

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Execute]:
        """Return a context that runs statements as one transaction, which fails if the scheduler has been deposed."""

    def put(
        self, key: DocumentKey, data: bytes, now_ns: int, expires_ns: int | None, if_version: int | None
    ) -> Document | None:
        place = (key.owner, key.kind, key.id)
        with self._writing() as execute:
            execute(
                "DELETE FROM midstream_documents WHERE owner = ? AND kind = ? AND id = ? AND expires_ns <= ?",
                (*place, now_ns),
            )
            rows = execute(
                "SELECT version, created_ns FROM midstream_documents WHERE owner = ? AND kind = ? AND id = ?", place
            ).fetchall()
            version, created_ns = cast("tuple[int, int]", rows[0]) if rows else (0, now_ns)
            if if_version is not None and if_version != version:
                return None
            if rows:
                execute(
                    "UPDATE midstream_documents SET data = ?, version = ?, expires_ns = ? "
                    "WHERE owner = ? AND kind = ? AND id = ?",
                    (data, version + 1, expires_ns, *place),
                )
            else:
                execute(
                    "INSERT INTO midstream_documents (owner, kind, id, data, version, created_ns, expires_ns) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*place, data, 1, created_ns, expires_ns),
                )
        return Document(key, data, version + 1, created_ns, expires_ns)

    def get(self, key: DocumentKey, now_ns: int) -> Document | None:
        statement = _SELECT + "WHERE owner = ? AND kind = ? AND id = ? AND (expires_ns IS NULL OR expires_ns > ?)"
        with self._reading() as execute:
            found = _documents(execute(statement, (key.owner, key.kind, key.id, now_ns)).fetchall())
        return next(found, None)

    def delete(self, key: DocumentKey, now_ns: int) -> bool:
        statement = (
            "DELETE FROM midstream_documents "
            "WHERE owner = ? AND kind = ? AND id = ? AND (expires_ns IS NULL OR expires_ns > ?)"
        )
        with self._writing() as execute:
            return execute(statement, (key.owner, key.kind, key.id, now_ns)).rowcount > 0

    def list(self, query: Query, now_ns: int) -> list[Document]:
        conditions = ["kind = ? AND (expires_ns IS NULL OR expires_ns > ?)"]
        values: list[object] = [query.kind, now_ns]
        if query.owner is not None:
            conditions.append("owner = ?")
            values.append(query.owner)
        if query.prefix:
            conditions.append("id >= ? AND id < ?")
            values += [query.prefix, query.prefix + _LAST_CHARACTER]
        if query.after is not None:
            conditions.append("(id, owner) < (?, ?)" if query.is_descending else "(id, owner) > (?, ?)")
            values += [query.after.id, query.after.owner]
        direction = "DESC" if query.is_descending else "ASC"
        statement = _SELECT + f"WHERE {' AND '.join(conditions)} ORDER BY id {direction}, owner {direction} LIMIT ?"
        with self._reading() as execute:
            return list(_documents(execute(statement, (*values, query.limit)).fetchall()))

    def num_bytes(self, owner: str, now_ns: int, without: DocumentKey | None) -> int:
        statement = (
            "SELECT coalesce(sum(length(data)), 0) FROM midstream_documents "
            "WHERE owner = ? AND (expires_ns IS NULL OR expires_ns > ?) AND NOT (kind = ? AND id = ?)"
        )
        kind, id_ = (without.kind, without.id) if without is not None else ("", "")  # no document has an empty id
        with self._reading() as execute:
            ((num_bytes,),) = execute(statement, (owner, now_ns, kind, id_)).fetchall()
        return int(cast("int", num_bytes))

    def expire(self, now_ns: int) -> None:
        with self._reading() as execute:
            due = execute("SELECT 1 FROM midstream_documents WHERE expires_ns <= ? LIMIT 1", (now_ns,)).fetchall()
        if due:
            with self._writing() as execute:
                execute("DELETE FROM midstream_documents WHERE expires_ns <= ?", (now_ns,))


def _documents(rows: Sequence[Sequence[object]]) -> Iterator[Document]:
    typed = cast("Sequence[tuple[str, str, str, bytes, int, int, int | None]]", rows)
    for owner, kind, id_, data, version, created_ns, expires_ns in typed:
        yield Document(DocumentKey(owner, kind, id_), data, version, created_ns, expires_ns)
