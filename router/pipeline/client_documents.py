"""Documents that the router stores in the schedulers on behalf of clients: files, batches and conversations.

A document belongs to the cell in which it was stored. Ids are unique across all cells; a read queries every cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from midstream.errors import NotFoundError
from midstream.rpc.errors import error_from_rpc
from protos import documents_pb2 as pb
from router.pipeline.cells import Cell, CellSet
from router.pipeline.kept_requests import ask_cell, ask_cells

_TRY_TIMEOUT_S = 10.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ClientDocument:
    """A document and where it is stored.

    Attributes:
        owner: Name of the authenticated client; empty if authentication is off.
        version: Incremented by each put.
    """

    cell: Cell
    owner: str
    id: str
    data: bytes
    version: int


class ClientDocuments:
    """Documents in all cells. Methods raise UnavailableError if a scheduler is unreachable beyond the timeout."""

    def __init__(self, cells: CellSet) -> None:
        self.cells = cells

    async def put(
        self,
        cell: Cell,
        kind: str,
        owner: str,
        document_id: str,
        data: bytes,
        *,
        expires_ns: int = 0,
        if_version: int | None = None,
    ) -> int:
        """Store a document; return its new version, or 0 if `if_version` is set but is not the current version.

        A put is repeated while the scheduler is unreachable, so one with `if_version` may return 0 because an earlier
        attempt was stored although its response was lost.
        """
        key = pb.DocumentKey(owner=owner, kind=kind, id=document_id)
        request = pb.PutDocumentRequest(key=key, data=data, expires_unix_ns=expires_ns, if_version=if_version)
        response = await self._ask(cell, lambda cell: cell.stub.PutDocument(request, timeout=_TRY_TIMEOUT_S))
        return response.version

    async def get(self, kind: str, owner: str, document_id: str) -> ClientDocument:
        """Return a document. Raises NotFoundError if the document does not exist."""
        request = pb.GetDocumentRequest(key=pb.DocumentKey(owner=owner, kind=kind, id=document_id))
        found = await ask_cells(self.cells, lambda cell: cell.stub.GetDocument(request, timeout=_TRY_TIMEOUT_S))
        cell, response = next(iter(found.items()))
        return _document(cell, response.document)

    async def delete(self, cell: Cell, kind: str, owner: str, document_id: str) -> None:
        request = pb.DeleteDocumentRequest(key=pb.DocumentKey(owner=owner, kind=kind, id=document_id))
        try:
            await self._ask(cell, lambda cell: cell.stub.DeleteDocument(request, timeout=_TRY_TIMEOUT_S))
        except NotFoundError:
            return

    async def parts(self, cell: Cell, kind: str, owner: str, prefix: str, limit: int) -> AsyncIterator[ClientDocument]:
        """Return a cell's documents whose ids start with a prefix, in order of ids. Read at most `limit` at a time."""
        request = pb.ListDocumentsRequest(kind=kind, owner=owner, prefix=prefix, limit=limit)
        while True:
            response = await self._ask(cell, lambda cell: cell.stub.ListDocuments(request, timeout=_TRY_TIMEOUT_S))
            if not response.documents:
                return
            for document in response.documents:
                yield _document(cell, document)
            request.after.CopyFrom(response.documents[-1].key)

    async def newest(self, kind: str, owner: str, *, after: str, limit: int, ascending: bool) -> list[ClientDocument]:
        """Return an owner's documents from all cells after the id `after`, newest first unless `ascending`."""
        request = pb.ListDocumentsRequest(kind=kind, owner=owner, limit=limit, is_descending=not ascending)
        if after:
            request.after.id, request.after.owner = after, owner
        cells = list(self.cells.cells.values())
        pages = await asyncio.gather(
            *(self._ask(cell, lambda one: one.stub.ListDocuments(request, timeout=_TRY_TIMEOUT_S)) for cell in cells)
        )
        found = [_document(cell, item) for cell, page in zip(cells, pages, strict=True) for item in page.documents]
        found.sort(key=lambda document: document.id, reverse=not ascending)
        return found[:limit]

    async def waiting(self, cell: Cell, kind: str, limit: int) -> list[ClientDocument]:
        """Return up to `limit` documents of a cell, of all owners, oldest first. Try only once; raise MidstreamError on
        failure.
        """
        request = pb.ListDocumentsRequest(kind=kind, limit=limit)
        try:
            response = await cell.stub.ListDocuments(request, timeout=_TRY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return [_document(cell, document) for document in response.documents]

    async def _ask(self, cell: Cell, call: Callable[[Cell], Awaitable[_T]]) -> _T:
        return await ask_cell(self.cells, cell, call)


def _document(cell: Cell, found: pb.Document) -> ClientDocument:
    return ClientDocument(cell, found.key.owner, found.key.id, found.data, found.version)
