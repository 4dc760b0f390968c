"""Receipts are found by the ids of their requests, in memory and in tables."""

from __future__ import annotations

import pytest

from midstream.clock import SteadyClock
from scheduler.edge import receipt_index
from scheduler.edge.receipt_index import ReceiptIndex
from scheduler.journal.documents import Documents
from scheduler.journal.sqlite_documents import SqliteDocuments

NOW = SteadyClock().now_ns()
TTL_NS = 10**18


async def pages(index: ReceiptIndex, request_id: str) -> list[int]:
    return [page - NOW async for page in index.pages(request_id)]


async def test_the_latest_page_comes_first_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_index, "_MAX_RECENT", 4)
    monkeypatch.setattr(receipt_index, "_NUM_TABLES", 2)
    documents = Documents(SqliteDocuments(None), SteadyClock())
    await documents.open(1)
    index = ReceiptIndex(documents, TTL_NS)
    assert await index.covered() == 0
    for page in range(13):
        await index.add(NOW + page, [f"{page}a", f"{page}b", "again" if page in (1, 7, 12) else f"{page}c"])
    # Every second page completes a table of at least four receipts; the last page is in memory only.
    assert await index.covered() == NOW + 11
    for page in range(13):
        assert await pages(index, f"{page}a") == [page]
    assert await pages(index, "again") == [12, 7, 1]
    assert await pages(index, "unknown") == []

    later = ReceiptIndex(documents, TTL_NS)
    assert await pages(later, "again") == [7, 1]
    await later.add(NOW + 12, ["12a"])
    assert await pages(later, "12a") == [12]
    await documents.close()
