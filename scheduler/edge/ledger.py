"""The ledger: the usage of each ended request.

An entry is created when a request's end is committed, and written together with other recent entries as one document (a
page). If the scheduler dies before that, the next one finds the request in the journal and writes the missing entry:
ended requests stay there much longer (finished_ttl_s) than an entry waits to be written. If an end is amended, because
a stop word is found later, the entry is updated in place. Each request is therefore counted exactly once, with the
output that was delivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from midstream.errors import UnavailableError
from midstream.merkle import merkle_paths
from midstream.receipts.digests import body_leaf
from protos import generation_pb2, receipts_pb2
from protos import ledger_pb2 as pb
from scheduler.core.request import Request
from scheduler.edge.engine import Engine
from scheduler.edge.receipt_index import ReceiptIndex
from scheduler.edge.receipts import Receipts
from scheduler.journal.documents import Document, DocumentKey, Documents

logger = logging.getLogger(__name__)

_KIND = "ledger"
_WAIT_S = 0.5
_RETRY_S = 1.0
_OPEN_TIMEOUT_S = 5.0
_NUM_PAGES = 20
# Upper bound on the difference between the clocks of a page and of its entries.
_MARGIN_NS = 60_000_000_000
_Key = tuple[str, int]


class Ledger:
    """The ledger of one scheduler."""

    def __init__(
        self,
        documents: Documents,
        engine: Engine,
        ended: Iterable[Request],
        *,
        ttl_s: int,
        model: str,
        receipts: Receipts | None = None,
    ) -> None:
        """Create a ledger; `run` writes its entries.

        Args:
            ended: Requests that had ended when the journal was read; the engine reports all others.
            receipts: Makes the entries' receipts; None if they have none.
        """
        self._documents = documents
        self._engine = engine
        self._ttl_ns = ttl_s * 1_000_000_000
        self._model = model
        self._receipts = receipts
        self._index = ReceiptIndex(documents, self._ttl_ns)
        self._recovered = [self._entry(request) for request in ended]
        self._waiting: dict[_Key, pb.LedgerEntry] = {}
        self._amended: dict[_Key, pb.LedgerEntry] = {}
        self._page: tuple[DocumentKey, dict[_Key, pb.LedgerEntry]] | None = None  # entries that are being written
        self._changed = asyncio.Event()
        self._last_id = 0
        self._opened = asyncio.Event()
        engine.on_ended.append(self._note)

    async def run(self) -> None:
        """Write missing entries of requests from the journal, then of requests as these end, until cancelled."""
        while True:
            try:
                if not self._opened.is_set():
                    await self._open()
                await self._flush()
            except UnavailableError as error:
                logger.error("cannot write the ledger now; trying again: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                continue
            await self._changed.wait()
            await asyncio.sleep(_WAIT_S)

    async def close(self) -> None:
        """Try once to write the remaining entries. Precondition: `run` was cancelled."""
        try:
            if self._opened.is_set():
                await self._flush()
        except UnavailableError as error:
            logger.warning("the ledger lacks entries until the next scheduler writes them: %s", error.message)

    async def read(self, after: str) -> pb.GetLedgerResponse:
        """Return the entries of the first pages after the page with the id `after`."""
        pages = await self._pages(after)
        response = pb.GetLedgerResponse(next_after=pages[-1].key.id if pages else "")
        for page in pages:
            contents = _contents(page)
            _complete_receipts(contents)
            response.entries.extend(contents.entries)
            await asyncio.sleep(0)  # there may be thousands of receipts on a page
        return response

    async def receipt(self, request_id: str) -> receipts_pb2.Receipt | None:
        """Return the receipt of the last request with this id that is on a page; None if there is none. Raises
        UnavailableError if the pages cannot be read.
        """
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._opened.wait()  # after a start, the index is not complete at once
        except TimeoutError:
            raise UnavailableError("the ledger cannot be read yet") from None
        async for number in self._index.pages(request_id):
            page = await self._documents.get(_page_key(number))
            if page is None:
                continue
            contents = _contents(page)
            _complete_receipts(contents)
            for entry in reversed(contents.entries):
                if entry.request_id == request_id and entry.HasField("receipt"):
                    return entry.receipt
        return None

    def _note(self, request: Request, is_amended: bool) -> None:
        """Queue the entry of a request that has ended, or whose end was amended."""
        entry = self._entry(request)
        key = _key(entry)
        entries = self._amended if is_amended and key not in self._waiting else self._waiting
        entries[key] = entry
        self._changed.set()

    def _entry(self, request: Request) -> pb.LedgerEntry:
        spec, end = request.spec, request.sequences[0].end
        assert end is not None
        # The accepted request is identical in every incarnation of the scheduler, so it identifies the entry.
        accepted = generation_pb2.GenerateRequest.FromString(spec.payload)
        entry = pb.LedgerEntry(
            request_id=spec.request_id,
            client_id=spec.client_id,
            model=accepted.model or self._model,
            lora=spec.lora_name,
            arrival_unix_ns=accepted.arrival_time_unix_ns,
            finished_unix_ns=self._engine.clock.to_unix_ns(request.times.finished_ns),
            prompt_tokens=len(spec.prompt),
            cached_tokens=request.counters.num_cached_tokens,
            completion_tokens=request.num_output_tokens,
            finish_reason=generation_pb2.FinishReason.ValueType(end.reason),
        )
        if self._receipts is not None and (body := self._receipts.body(request, accepted)):
            entry.receipt.body = body
        return entry

    async def _page_of(self, entries: Iterable[pb.LedgerEntry]) -> pb.LedgerPage:
        """Return a page with these entries, signed."""
        page = pb.LedgerPage(entries=entries)
        bodies = [entry.receipt.body for entry in _with_receipts(page)]
        if bodies and self._receipts is not None:
            page.key_id, page.signature = await self._receipts.sign(bodies)
        return page

    async def _add_to_index(self, key: DocumentKey, page: pb.LedgerPage) -> None:
        await self._index.add(int(key.id), [entry.request_id for entry in _with_receipts(page)])

    async def _open(self) -> None:
        """Queue entries for ended requests from the journal that are not on any page.

        These requests are among the last max_num_finished that ended, so it suffices to read the latest
        max_num_finished entries; this does not depend on clocks.
        """
        max_num_finished, known = self._engine.core.config.max_num_finished, set[_Key]()
        after: DocumentKey | None = None
        while len(known) < max_num_finished:
            pages = await self._documents.list(_KIND, owner="", after=after, limit=_NUM_PAGES, is_descending=True)
            if not pages:
                break
            self._last_id = max(self._last_id, int(pages[0].key.id))
            known.update(_key(entry) for page in pages for entry in _contents(page).entries)
            after = pages[-1].key
        missing = {_key(entry): entry for entry in self._recovered if _key(entry) not in known}
        self._waiting = missing | self._waiting
        self._recovered = []
        await self._fill_index()
        self._opened.set()

    async def _fill_index(self) -> None:
        if self._receipts is None:
            return
        after = _page_key(await self._index.covered())
        while pages := await self._documents.list(_KIND, owner="", after=after, limit=_NUM_PAGES):
            for page in pages:
                await self._add_to_index(page.key, _contents(page))
            after = pages[-1].key

    async def _flush(self) -> None:
        """Write the queued entries; keep them queued if that fails.

        A page keeps its id until it is known to have been written, so that a retry does not write it twice.
        """
        self._changed.clear()
        while self._page is not None or self._waiting:
            if self._page is None:
                self._last_id = max(self._engine.now_ns(), self._last_id + 1)
                self._page = _page_key(self._last_id), self._waiting
                self._waiting = {}
            key, entries = self._page
            page = await self._page_of(entries.values())
            # First the index, so that whoever has seen the page finds its receipts.
            await self._add_to_index(key, page)
            await self._documents.put(
                key, page.SerializeToString(), expires_ns=int(key.id) + self._ttl_ns, if_version=0
            )
            self._page = None
        for amended, entry in list(self._amended.items()):
            await self._amend(amended, entry)
            if self._amended[amended] is entry:
                del self._amended[amended]

    async def _amend(self, key: _Key, entry: pb.LedgerEntry) -> None:
        """Replace an entry on the page that contains it."""
        after = f"{max(entry.finished_unix_ns - _MARGIN_NS, 0):020d}"
        while pages := await self._pages(after):
            for page in pages:
                contents = _contents(page)
                for known in contents.entries:
                    if _key(known) == key:
                        data = (await self._amended_page(contents, known, entry)).SerializeToString()
                        await self._documents.put(page.key, data, expires_ns=page.expires_ns)
                        return
            after = pages[-1].key.id
        logger.warning("the ledger has no entry to amend for a request", extra={"request_id": entry.request_id})

    async def _amended_page(self, page: pb.LedgerPage, known: pb.LedgerEntry, entry: pb.LedgerEntry) -> pb.LedgerPage:
        """Replace an entry on a page, and sign the page again. While no receipts are made, the page's own stay as they
        are, since each is needed to verify the others.
        """
        if self._receipts is not None:
            known.CopyFrom(entry)
            return await self._page_of(page.entries)
        body = known.receipt.body
        known.CopyFrom(entry)
        if body:
            known.receipt.body = body
        return page

    async def _pages(self, after: str) -> list[Document]:
        place = DocumentKey("", _KIND, after) if after else None
        return await self._documents.list(_KIND, owner="", after=place, limit=_NUM_PAGES)


def _page_key(number: int) -> DocumentKey:
    return DocumentKey("", _KIND, f"{number:020d}")


def _contents(page: Document) -> pb.LedgerPage:
    return pb.LedgerPage.FromString(page.data)


def _with_receipts(page: pb.LedgerPage) -> list[pb.LedgerEntry]:
    return [entry for entry in page.entries if entry.HasField("receipt")]


def _complete_receipts(page: pb.LedgerPage) -> None:
    """Give each receipt on a page its path and signature."""
    receipts = [entry.receipt for entry in _with_receipts(page)]
    if not receipts:
        return
    _, paths = merkle_paths([body_leaf(receipt.body) for receipt in receipts])
    for receipt, path in zip(receipts, paths, strict=True):
        receipt.path.extend(path.siblings)
        receipt.left_siblings = path.left_siblings
        receipt.key_id, receipt.signature = page.key_id, page.signature


def _key(entry: pb.LedgerEntry) -> _Key:
    return entry.request_id, entry.arrival_unix_ns
