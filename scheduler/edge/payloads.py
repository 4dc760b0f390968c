"""Requests and answers that are stored for audits (`--receipts payload`): encrypted documents with a lifetime of their
own. They are written after a request's end, in the background; a scheduler that takes over writes those of the ended
requests that are still in the journal again.
"""

from __future__ import annotations

import asyncio
import logging
from array import array

from midstream.errors import InvalidArgumentError, UnavailableError
from midstream.receipts.digests import canonical_request, request_digest
from midstream.security.payload_keys import PayloadKeys
from protos import generation_pb2, receipts_pb2
from scheduler.core.request import Request, RequestState
from scheduler.edge.engine import Engine
from scheduler.edge.kept_requests import KeptRequests
from scheduler.journal.documents import DocumentKey, Documents

logger = logging.getLogger(__name__)

_KIND = "payload"
_RETRY_S = 1.0


class Payloads:
    """The stored requests and answers of a scheduler."""

    def __init__(
        self, keys: PayloadKeys, documents: Documents, engine: Engine, kept: KeptRequests, *, ttl_s: int
    ) -> None:
        """Store the requests that end from now on, and those that have ended and are known."""
        self._keys, self._documents, self._engine, self._kept = keys, documents, engine, kept
        self._ttl_ns = ttl_s * 1_000_000_000
        self._writing: set[asyncio.Task[None]] = set()
        engine.on_ended.append(self._note_end)
        for request in engine.core.lifecycle.requests.values():
            if request.state is RequestState.FINISHED:
                self._note_end(request, False)

    async def close(self) -> None:
        """Stop writing; the next scheduler stores the remaining requests."""
        self._engine.on_ended.remove(self._note_end)
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def fill(self, response: receipts_pb2.GetReceiptResponse, query: receipts_pb2.GetReceiptRequest) -> None:
        """Add the nonce, and the contents that `query` asks for, to a receipt from the ledger, if they are stored."""
        document = await self._documents.get(_key(query.request_id))
        data = None if document is None else self._keys.unseal(document.data, query.request_id)
        event = None if data is None else self._kept.decode(data)
        if event is None:
            return
        body = receipts_pb2.ReceiptBody.FromString(response.receipt.body)
        nonce = event.spec.receipt_nonce
        if request_digest(nonce, event.spec.contents_digest) != body.request_digest:
            return  # another request had the same id
        response.receipt.nonce = nonce
        if query.include_request:
            response.request = canonical_request(generation_pb2.GenerateRequest.FromString(event.spec.payload))
        if query.include_outputs:
            ends = dict(event.ends)
            for index, tokens in enumerate(event.outputs):
                response.outputs.add(token_ids=array("I", tokens)[: ends[index].num_tokens])

    def _note_end(self, request: Request, _: bool) -> None:
        # Requests with tensors are not in the journal either: their output would be too large.
        if request.spec.receipt_nonce and not request.spec.tensor_bytes:
            sealed = self._keys.seal(self._kept.encode(request), request.request_id)
            task = asyncio.create_task(self._write(request, sealed))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, request: Request, sealed: bytes) -> None:
        expires_ns = self._engine.clock.to_unix_ns(request.times.finished_ns) + self._ttl_ns
        extra = {"request_id": request.request_id}
        while True:
            try:
                await self._documents.put(_key(request.request_id), sealed, expires_ns=expires_ns)
                return
            except UnavailableError as error:
                logger.error("cannot store a payload now; trying again: %s", error.message, extra=extra)
                await asyncio.sleep(_RETRY_S)
            except InvalidArgumentError as error:
                logger.error("cannot store a payload: %s", error.message, extra=extra)
                return


def _key(request_id: str) -> DocumentKey:
    return DocumentKey("", _KIND, request_id)
