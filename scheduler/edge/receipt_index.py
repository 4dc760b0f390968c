"""Finds the ledger's page with the receipt of a request.

A row per receipt would cost more than the receipt. Instead, the pages of the latest receipts are known in memory, and
once there are many, they are written together as one document: a table of digests of request ids, sorted for bisection.
A lookup reads these tables, the latest first, so it takes longer for old receipts: about 0.2 ms per 4,096 receipts.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable

from scheduler.journal.documents import DocumentKey, Documents

_KIND = "receipt_index"
_MAX_RECENT = 4096
_NUM_TABLES = 8
_DIGEST_BYTES = 8
_ROW = struct.Struct(f"<{_DIGEST_BYTES}sQ")  # digest of the request id, id of the page


class ReceiptIndex:
    """The index of one ledger."""

    def __init__(self, documents: Documents, ttl_ns: int) -> None:
        """Create an index whose tables are kept for `ttl_ns`."""
        self._documents, self._ttl_ns = documents, ttl_ns
        self._recent: dict[bytes, int] = {}

    async def covered(self) -> int:
        """Return the last page that is in a table; 0 if there is none. At a start, later pages must be added again."""
        tables = await self._documents.list(_KIND, owner="", limit=1, is_descending=True)
        return int(tables[0].key.id) if tables else 0

    async def add(self, page: int, request_ids: Iterable[str]) -> None:
        """Add the receipts on a page, which may be written later. Pages are added in order, perhaps repeatedly."""
        for request_id in request_ids:
            self._recent[_digest(request_id)] = page
        if len(self._recent) < _MAX_RECENT:
            return
        table = b"".join(_ROW.pack(*row) for row in sorted(self._recent.items()))
        key = DocumentKey("", _KIND, f"{page:020d}")
        await self._documents.put(key, table, expires_ns=page + self._ttl_ns)
        self._recent = {}

    async def pages(self, request_id: str) -> AsyncIterator[int]:
        """Yield the pages that may have a receipt of the request, the latest first."""
        digest = _digest(request_id)
        if digest in self._recent:
            yield self._recent[digest]
        after: DocumentKey | None = None
        while tables := await self._documents.list(_KIND, owner="", after=after, limit=_NUM_TABLES, is_descending=True):
            for table in tables:
                page = _find(table.data, digest)
                if page is not None:
                    yield page
            after = tables[-1].key


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES).digest()


def _find(table: bytes, digest: bytes) -> int | None:
    def digest_at(row: int) -> bytes:
        start = row * _ROW.size
        return table[start : start + _DIGEST_BYTES]

    rows = range(len(table) // _ROW.size)
    row = bisect_left(rows, digest, key=digest_at)
    if row == len(rows) or digest_at(row) != digest:
        return None
    page: int = _ROW.unpack_from(table, row * _ROW.size)[1]
    return page
