"""The ledger: what each request took, once it has ended.

An entry is made when a request's end is committed, and written with others of the same moment as one document. A
scheduler that dies before that finds the request in its journal, and writes what is missing when it starts again: ended
requests stay there much longer (finished_ttl_s) than an entry waits. Where an end is amended, because a stop word is
found later, the entry is amended in its place. So each request is counted once, with what was delivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from midstream.errors import UnavailableError
from protos import generation_pb2
from protos import ledger_pb2 as pb
from scheduler.core.request import Request
from scheduler.edge.engine import Engine
from scheduler.edge.feed_batch import usage_of
from scheduler.journal.documents import Document, DocumentKey, Documents

logger = logging.getLogger(__name__)

_KIND = "ledger"
_WAIT_S = 0.5
_RETRY_S = 1.0
_NUM_PAGES = 20
# Clocks of a page and of its entries may differ by less.
_MARGIN_NS = 60_000_000_000
_Key = tuple[str, int]


class Ledger:
    """Keeps account of one scheduler's requests."""

    def __init__(
        self, documents: Documents, engine: Engine, ended: Iterable[Request], *, ttl_s: int, model: str
    ) -> None:
        """Write nothing before `run`.

        Args:
            documents: Where pages are stored.
            engine: Whose requests.
            ended: Those that had ended when the journal was read; of all others the engine tells.
            ttl_s: How long they are stored.
            model: Name of the served model.
        """
        self._documents = documents
        self._engine = engine
        self._ttl_ns = ttl_s * 1_000_000_000
        self._model = model
        self._recovered = [self._entry(request) for request in ended]
        self._waiting: dict[_Key, pb.LedgerEntry] = {}
        self._amended: dict[_Key, pb.LedgerEntry] = {}
        self._page: tuple[DocumentKey, dict[_Key, pb.LedgerEntry]] | None = None  # being written
        self._changed = asyncio.Event()
        self._last_id = 0
        self._is_open = False
        engine.on_ended.append(self._note)

    async def run(self) -> None:
        """Write what ended before this scheduler's start and is missing, then what ends, until cancelled."""
        while True:
            try:
                if not self._is_open:
                    await self._open()
                await self._flush()
            except UnavailableError as error:
                logger.error("the ledger cannot be written now: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            await self._changed.wait()
            await asyncio.sleep(_WAIT_S)

    async def close(self) -> None:
        """Write what is left, if that is possible now. Precondition: `run` was cancelled."""
        try:
            if self._is_open:
                await self._flush()
        except UnavailableError as error:
            logger.warning("the ledger lacks entries until this scheduler starts again: %s", error.message)

    async def read(self, after: str) -> pb.GetLedgerResponse:
        """Return the entries of some pages behind `after`."""
        pages = await self._pages(after)
        response = pb.GetLedgerResponse(next_after=pages[-1].key.id if pages else "")
        for page in pages:
            response.entries.extend(_entries(page))
        return response

    def _note(self, request: Request, is_amended: bool) -> None:
        """Take in a request that has ended, or whose end was amended."""
        entry = self._entry(request)
        key = _key(entry)
        entries = self._amended if is_amended and key not in self._waiting else self._waiting
        entries[key] = entry
        self._changed.set()

    def _entry(self, request: Request) -> pb.LedgerEntry:
        spec, usage, end = request.spec, usage_of(request), request.sequences[0].end
        # What was accepted says the same in every life of the scheduler, so it identifies the request.
        accepted = generation_pb2.GenerateRequest.FromString(spec.payload)
        return pb.LedgerEntry(
            request_id=spec.request_id,
            client_id=spec.client_id,
            model=accepted.model or self._model,
            lora=spec.lora_name,
            arrival_unix_ns=accepted.arrival_time_unix_ns,
            finished_unix_ns=self._engine.clock.to_unix_ns(request.times.finished_ns),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=None if end is None else end.reason,  # type: ignore[arg-type]
        )

    async def _open(self) -> None:
        """Note the ended requests of the journal that no page has.

        They are among the last max_num_finished that ended: so many entries are read, whatever clocks say.
        """
        max_num_finished, known = self._engine.core.config.max_num_finished, set[_Key]()
        after: DocumentKey | None = None
        while len(known) < max_num_finished:
            pages = await self._documents.list(_KIND, owner="", after=after, limit=_NUM_PAGES, is_descending=True)
            if not pages:
                break
            self._last_id = max(self._last_id, int(pages[0].key.id))
            known.update(_key(entry) for page in pages for entry in _entries(page))
            after = pages[-1].key
        missing = {_key(entry): entry for entry in self._recovered if _key(entry) not in known}
        self._waiting = missing | self._waiting
        self._recovered = []
        self._is_open = True

    async def _flush(self) -> None:
        """Write what waits; what cannot be written waits on.

        A page keeps its id until it is certain that it was written, so that trying again writes nothing twice.
        """
        self._changed.clear()
        while self._page is not None or self._waiting:
            if self._page is None:
                self._last_id = max(self._engine.now_ns(), self._last_id + 1)
                self._page = DocumentKey("", _KIND, f"{self._last_id:020d}"), self._waiting
                self._waiting = {}
            key, entries = self._page
            data = pb.LedgerPage(entries=entries.values()).SerializeToString()
            await self._documents.put(key, data, expires_ns=int(key.id) + self._ttl_ns, if_version=0)
            self._page = None
        for amended, entry in list(self._amended.items()):
            await self._amend(amended, entry)
            if self._amended[amended] is entry:
                del self._amended[amended]

    async def _amend(self, key: _Key, entry: pb.LedgerEntry) -> None:
        """Replace an entry where it was written."""
        after = f"{max(entry.finished_unix_ns - _MARGIN_NS, 0):020d}"
        while pages := await self._pages(after):
            for page in pages:
                entries = _entries(page)
                for place, known in enumerate(entries):
                    if _key(known) == key:
                        entries[place] = entry
                        data = pb.LedgerPage(entries=entries).SerializeToString()
                        await self._documents.put(page.key, data, expires_ns=page.expires_ns)
                        return
            after = pages[-1].key.id
        logger.warning("the ledger has no entry to amend", extra={"request_id": entry.request_id})

    async def _pages(self, after: str) -> list[Document]:
        place = DocumentKey("", _KIND, after) if after else None
        return await self._documents.list(_KIND, owner="", after=place, limit=_NUM_PAGES)


def _entries(page: Document) -> list[pb.LedgerEntry]:
    return list(pb.LedgerPage.FromString(page.data).entries)


def _key(entry: pb.LedgerEntry) -> _Key:
    return entry.request_id, entry.arrival_unix_ns
