"""Documents that routers store through the scheduler's service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from midstream.clock import SteadyClock
from midstream.errors import InvalidArgumentError, NotFoundError, OverloadedError
from protos import documents_pb2 as pb
from scheduler.edge.document_calls import DocumentCalls
from scheduler.journal.documents import DocumentKey, Documents
from scheduler.journal.sqlite_documents import SqliteDocuments

CONTEXT: Any = None


@pytest.fixture
async def documents() -> AsyncIterator[Documents]:
    documents = Documents(SqliteDocuments(None), SteadyClock())
    await documents.open(1)
    yield documents
    await documents.close()


@pytest.fixture
def calls(documents: Documents) -> DocumentCalls:
    return DocumentCalls(documents, time.time_ns, 100_000)


def key(document_id: str, owner: str = "a", kind: str = "file") -> pb.DocumentKey:
    return pb.DocumentKey(owner=owner, kind=kind, id=document_id)


async def put(calls: DocumentCalls, place: pb.DocumentKey, data: bytes, **fields: Any) -> int:
    return (await calls.PutDocument(pb.PutDocumentRequest(key=place, data=data, **fields), CONTEXT)).version


async def test_a_put_depends_on_the_version(calls: DocumentCalls) -> None:
    assert await put(calls, key("1"), b"x", if_version=0) == 1
    assert await put(calls, key("1"), b"y", if_version=0) == 0
    assert await put(calls, key("1"), b"y", if_version=1) == 2
    found = await calls.GetDocument(pb.GetDocumentRequest(key=key("1")), CONTEXT)
    assert found.document == pb.Document(key=key("1"), data=b"y", version=2)
    with pytest.raises(InvalidArgumentError):
        await put(calls, key("1"), b"y", expires_unix_ns=1)


async def test_routers_cannot_reach_the_schedulers_own_documents(calls: DocumentCalls, documents: Documents) -> None:
    await documents.put(DocumentKey("", "request", "1"), b"x")
    with pytest.raises(NotFoundError):
        await calls.GetDocument(pb.GetDocumentRequest(key=key("1", "", "request")), CONTEXT)
    with pytest.raises(NotFoundError):
        await calls.DeleteDocument(pb.DeleteDocumentRequest(key=key("1", "", "request")), CONTEXT)


async def test_lists_are_in_order_and_by_owner(calls: DocumentCalls) -> None:
    for owner, name in (("a", "2"), ("b", "1"), ("a", "1")):
        await put(calls, key(name, owner), b"x")

    async def ids(**fields: Any) -> list[str]:
        request = pb.ListDocumentsRequest(kind="file", limit=10, **fields)
        return [item.key.owner + item.key.id for item in (await calls.ListDocuments(request, CONTEXT)).documents]

    assert await ids() == ["a1", "b1", "a2"]
    assert await ids(owner="a", is_descending=True) == ["a2", "a1"]
    assert await ids(owner="a", after=key("1")) == ["a2"]


async def test_the_documents_of_an_owner_have_a_size_limit(calls: DocumentCalls) -> None:
    await put(calls, key("1"), bytes(60_000))
    with pytest.raises(OverloadedError, match="stores 60000 of at most 100000 bytes"):
        await put(calls, key("2"), bytes(60_000))
    await put(calls, key("2"), b"small")
    await put(calls, key("2", "b"), bytes(60_000))
    await calls.DeleteDocument(pb.DeleteDocumentRequest(key=key("1")), CONTEXT)
    await put(calls, key("3"), bytes(60_000))


async def test_small_documents_count_too(calls: DocumentCalls) -> None:
    for number in range(10):
        await put(calls, key(str(number)), bytes(10_000))
    with pytest.raises(OverloadedError):
        await put(calls, key("one more"), b"x", if_version=0)
    # What exists may be replaced, and grow until an eighth more is stored.
    assert await put(calls, key("1"), bytes(20_000), if_version=1) == 2
    with pytest.raises(OverloadedError):
        await put(calls, key("2"), bytes(20_000), if_version=1)
    assert await put(calls, key("2"), bytes(12_500), if_version=1) == 2


async def test_a_document_that_is_replaced_counts_once(calls: DocumentCalls) -> None:
    for version in range(5):
        assert await put(calls, key("1"), bytes(90_000), if_version=version) == version + 1
