"""Ended requests that are kept longer (`keep_s`): stored as documents and restored on demand.

While a request runs, and for finished_ttl_s after its end, it is in memory and in the journal. A request with `keep_s`
is stored as a document when its end is committed. Submit and the feed restore it from there as an ended request;
everything else is derived from its tokens.
"""

from __future__ import annotations

import asyncio
import logging
from array import array

from google.protobuf.message import DecodeError

from midstream.errors import InvalidArgumentError, NotFoundError, UnavailableError
from protos import journal_pb2
from scheduler.core.events import AbortRequested, Recovered
from scheduler.core.request import Request, RequestState
from scheduler.edge.engine import Engine
from scheduler.journal.documents import DocumentKey, Documents
from scheduler.journal.records import StoredRequest, encode_request, replay
from scheduler.journal.store import StoredJournal, seal
from scheduler.wire.requests import ModelLimits

logger = logging.getLogger(__name__)

_KIND = "request"
_RETRY_S = 1.0
# A deleted request leaves an empty document for longer than the request can stay in memory and in the journal.
_DELETED_NS = 7 * 24 * 3600 * 1_000_000_000


class KeptRequests:
    """The kept requests of a scheduler."""

    def __init__(self, documents: Documents, engine: Engine, limits: ModelLimits, model_fingerprint: str) -> None:
        """Store requests that end from now on, and those from the journal that might not have been stored yet.

        Args:
            engine: The engine that runs the requests; it has recovered the journal.
            model_fingerprint: Fingerprint of the served model; requests of another model cannot be restored.
        """
        self._documents = documents
        self._engine = engine
        self._limits = limits
        self._model_fingerprint = model_fingerprint
        self._writing: set[asyncio.Task[None]] = set()
        engine.on_ended.append(self._on_ended)
        for request in engine.core.lifecycle.requests.values():
            if request.state is RequestState.FINISHED:
                self._keep(request, is_recovered=True)

    async def find(self, request_id: str) -> Request | None:
        """Return a known or restored request; None if there is none, or if it was deleted."""
        known = self._engine.core.lifecycle.requests
        request = known.get(request_id)
        if request is not None and not request.spec.keep_ns:
            return request
        document = await self._documents.get(_key(request_id))
        if document is not None and not document.data:
            return None
        if request_id not in known and document is not None:
            event = self.decode(document.data)
            if event is not None:
                self._engine.recover([event])
        return known.get(request_id)

    async def delete(self, request_id: str) -> None:
        """End a request if it is running, and delete it. Raises NotFoundError if no request with this id is kept."""
        request = await self.find(request_id)
        if request is None or not request.spec.keep_ns:
            raise NotFoundError(f"no request {request_id[:128]!r} is kept")
        expires_ns = self._engine.now_ns() + _DELETED_NS
        await self._documents.put(_key(request_id), b"", expires_ns=expires_ns)
        self._engine.handle(AbortRequested(self._engine.now_ns(), request_id))

    async def close(self) -> None:
        """Stop writing; the next scheduler stores the remaining requests."""
        self._engine.on_ended.remove(self._on_ended)
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _on_ended(self, request: Request, _: bool) -> None:
        self._keep(request)

    def _keep(self, request: Request, *, is_recovered: bool = False) -> None:
        if request.spec.keep_ns and not request.spec.tensor_bytes:
            task = asyncio.create_task(self._write(request, self.encode(request), is_recovered=is_recovered))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, request: Request, data: bytes, *, is_recovered: bool) -> None:
        """Store an ended request, encoded as `data`, unless it was deleted or had been stored before this scheduler
        started.

        This is retried until it succeeds; until then the request is in the journal, but only for a limited time. A
        request that is too large for a document is not kept.
        """
        key = _key(request.request_id)
        expires_ns = request.times.finished_ns + request.spec.keep_ns
        while expires_ns > self._engine.now_ns():
            try:
                known = await self._documents.get(key)
                if known is not None and (is_recovered or not known.data):
                    return
                version = known.version if known is not None else 0
                if await self._documents.put(key, data, expires_ns=expires_ns, if_version=version) is not None:
                    return
            except UnavailableError as error:
                extra = {"request_id": request.request_id}
                logger.error("cannot store a finished request now; trying again: %s", error.message, extra=extra)
                await asyncio.sleep(_RETRY_S)
            except InvalidArgumentError as error:
                extra = {"request_id": request.request_id}
                logger.error("cannot keep a finished request: %s", error.message, extra=extra)
                return

    def encode(self, request: Request) -> bytes:
        """Return an ended request with its output, as a serialized KeptRequest."""
        clock = self._engine.clock
        stored = StoredRequest(
            1,
            Recovered(0, request.spec, ()),
            [array("I", sequence.output) for sequence in request.sequences],
            [list(sequence.outputs) for sequence in request.sequences],
            {sequence.index: sequence.end for sequence in request.sequences if sequence.end is not None},
            request.finish,
            kind=request.kind,
            kind_changed_at=request.kind_changed_at,
            earlier_kinds=request.earlier_kinds,
        )
        return journal_pb2.KeptRequest(
            request=seal(encode_request(request, self._model_fingerprint, clock)),
            output=seal(stored.output_record(clock)),
        ).SerializeToString()

    def decode(self, data: bytes) -> Recovered | None:
        """Return the event that restores an ended request; None if it is damaged or belongs to another model."""
        try:
            kept = journal_pb2.KeptRequest.FromString(data)
        except DecodeError:
            return None
        rows = StoredJournal(requests=[(1, kept.request, kept.output)])
        replayed = replay(rows, self._limits, self._model_fingerprint, self._engine.clock)
        if replayed.num_damaged or not replayed.requests:
            reason = "it is damaged" if replayed.num_damaged else "it belongs to another model"
            logger.warning("cannot restore a kept request: %s", reason)
            return None
        return replayed.requests[1].event(self._engine.now_ns())


def _key(request_id: str) -> DocumentKey:
    return DocumentKey("", _KIND, request_id)
