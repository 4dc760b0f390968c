"""The RPCs with which routers store documents for clients.

Routers' document kinds are separate from those of the scheduler itself: no router can read or change kept requests or
the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from midstream.errors import InvalidArgumentError, NotFoundError, OverloadedError
from protos import documents_pb2 as pb
from scheduler.journal.documents import Document, DocumentKey, Documents

_PREFIX = "client "
_MAX_LISTED = 1000
# A response of ListDocuments ends after this many bytes; a single document may be larger.
_LISTED_BYTES = 8 << 20
# A document up to this size may be replaced when the owner has reached its limit, so that a batch that runs, for
# example, can record its state. All such growth together has an eighth of the limit.
_SMALL_BYTES = 32 << 10
# How long sizes are added up before they are counted again. Until then, documents that were deleted or replaced count.
_RECOUNT_S = 10.0
_RETRY_AFTER_MS = 60_000


class DocumentCalls:
    """The document methods of the scheduler's gRPC service."""

    def __init__(self, documents: Documents, now_ns: Callable[[], int], max_owner_bytes: int) -> None:
        """Create the methods; `max_owner_bytes` is the maximum total size of the documents of one owner."""
        self._documents = documents
        self._now_ns = now_ns
        self._max_owner_bytes = max_owner_bytes
        self._num_bytes: dict[str, int] = {}  # by owner; at least the true size
        self._recount_at = 0.0

    async def PutDocument(self, request: pb.PutDocumentRequest, context: object) -> pb.PutDocumentResponse:
        key = _key(request.key)
        if request.expires_unix_ns and request.expires_unix_ns <= self._now_ns():
            raise InvalidArgumentError("must be in the future", field="expires_unix_ns")
        await self._take_room(key, len(request.data), is_replaced=request.if_version > 0)
        stored = await self._documents.put(
            key,
            request.data,
            expires_ns=request.expires_unix_ns or None,
            if_version=request.if_version if request.HasField("if_version") else None,
        )
        return pb.PutDocumentResponse(version=stored.version if stored is not None else 0)

    async def _take_room(self, key: DocumentKey, num_new: int, *, is_replaced: bool) -> None:
        """Count a document before it is stored. Raises OverloadedError if its owner would store too much."""
        limit = self._max_owner_bytes
        if is_replaced and num_new <= _SMALL_BYTES:
            limit += limit // 8
        if time.monotonic() >= self._recount_at:
            self._num_bytes.clear()
            self._recount_at = time.monotonic() + _RECOUNT_S
        if self._num_bytes.get(key.owner, limit) + num_new > limit:
            self._num_bytes[key.owner] = await self._documents.num_bytes(key.owner, without=key)
        num_bytes = self._num_bytes[key.owner]
        if num_bytes + num_new > limit:
            message = (
                f"the client stores {num_bytes} of at most {self._max_owner_bytes} bytes; delete files, batches or "
                "conversations"
            )
            raise OverloadedError(message, retry_after_ms=_RETRY_AFTER_MS)
        self._num_bytes[key.owner] = num_bytes + num_new

    async def GetDocument(self, request: pb.GetDocumentRequest, context: object) -> pb.GetDocumentResponse:
        found = await self._documents.get(_key(request.key))
        if found is None:
            raise NotFoundError("no such document")
        return pb.GetDocumentResponse(document=_to_proto(found))

    async def DeleteDocument(self, request: pb.DeleteDocumentRequest, context: object) -> pb.DeleteDocumentResponse:
        if not await self._documents.delete(_key(request.key)):
            raise NotFoundError("no such document")
        return pb.DeleteDocumentResponse()

    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: object) -> pb.ListDocumentsResponse:
        """Return documents of one kind; if they are large, fewer than requested."""
        documents = await self._documents.list(
            _PREFIX + request.kind,
            owner=request.owner if request.HasField("owner") else None,
            prefix=request.prefix,
            after=_key(request.after) if request.HasField("after") else None,
            limit=min(request.limit, _MAX_LISTED),
            is_descending=request.is_descending,
        )
        response, num_bytes = pb.ListDocumentsResponse(), 0
        for document in documents:
            num_bytes += len(document.data)
            if response.documents and num_bytes > _LISTED_BYTES:
                break
            response.documents.append(_to_proto(document))
        return response


def _key(key: pb.DocumentKey) -> DocumentKey:
    return DocumentKey(key.owner, _PREFIX + key.kind, key.id)


def _to_proto(document: Document) -> pb.Document:
    key = document.key
    named = pb.DocumentKey(owner=key.owner, kind=key.kind.removeprefix(_PREFIX), id=key.id)
    return pb.Document(key=named, data=document.data, version=document.version)
