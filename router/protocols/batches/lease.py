"""The queue of unfinished batches, with a lease for the router that runs each batch.

An entry's document names its holder, which rewrites it about every second. A router that sees the same version for long
enough, by its own clock, takes the entry over, so the clocks of routers need not agree. If the old holder is still
alive, this does no harm, since both write the same output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from dataclasses import dataclass

from midstream.errors import MidstreamError, NotFoundError
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocument, ClientDocuments

logger = logging.getLogger(__name__)

_KIND = "batch_lease"
_LOOK_S = 0.5
# Interval while the queue is empty. The router that adds a batch usually takes it itself, without this delay.
_IDLE_LOOK_S = 2.0
_RENEW_S = 1.0
_LEASE_S = 5.0
_GIVE_BACK_S = 1.0
_MAX_SEEN = 1000


@dataclass(slots=True)
class Lease:
    """An entry of the queue for which this router holds the lease."""

    cell: Cell
    owner: str
    batch_id: str
    version: int


class Leases:
    """The leases of the unfinished batches of all clients."""

    def __init__(self, documents: ClientDocuments) -> None:
        self._documents = documents
        self._holder = uuid.uuid4().hex
        # Version of each entry, and the loop time at which that version was first seen.
        self._seen: dict[tuple[Cell, str], tuple[int, float]] = {}
        self._added = asyncio.Event()

    async def wait(self) -> None:
        """Wait until it is time to look for batches again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S if self._seen else _IDLE_LOOK_S):
                await self._added.wait()
        self._added.clear()

    async def add(self, cell: Cell, owner: str, batch_id: str) -> None:
        """Add a batch, unless the queue has it already."""
        await self._documents.put(cell, _KIND, owner, batch_id, _entry(""), if_version=0)
        self._added.set()

    async def take(self, cell: Cell, held: set[str], limit: int) -> list[Lease]:
        """Lease up to `limit` free entries of a cell, oldest first.

        Args:
            held: Ids of the batches that this router runs.
            limit: Maximum number of entries to take.
        """
        now = asyncio.get_running_loop().time()
        try:
            entries = await self._documents.waiting(cell, _KIND, _MAX_SEEN)
        except MidstreamError:
            # While the cell is unreachable, no router can renew a lease, so this time does not count.
            self._seen = {key: (version, now) for key, (version, _) in self._seen.items()}
            return []
        known = {(cell, entry.id) for entry in entries}
        self._seen = {
            key: seen for key, seen in self._seen.items() if (key in known if key[0] is cell else not key[0].is_gone)
        }
        leases: list[Lease] = []
        for entry in entries:
            if len(leases) >= limit:
                break
            if entry.id not in held and self._is_free(entry, now):
                version = await self._put(cell, entry.owner, entry.id, entry.version, self._holder)
                if version:
                    leases.append(Lease(cell, entry.owner, entry.id, version))
        return leases

    def _is_free(self, entry: ClientDocument, now: float) -> bool:
        holder = json.loads(entry.data)["holder"]
        key = entry.cell, entry.id
        version, since = self._seen.get(key, (0, now))
        if version != entry.version:
            self._seen[key] = entry.version, now
            since = now
        return not holder or now - since >= _LEASE_S

    async def keep(self, lease: Lease) -> None:
        """Renew a lease regularly until another router has taken it."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                version = await self._put(lease.cell, lease.owner, lease.batch_id, lease.version, self._holder)
            except NotFoundError:
                return
            except MidstreamError as error:
                logger.info("cannot renew the lease of a batch now: %s", error.message)
                continue
            if not version:
                return
            lease.version = version

    async def give_back(self, lease: Lease) -> None:
        """Release a lease, so that another router can take over the batch immediately."""
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await self._put(lease.cell, lease.owner, lease.batch_id, lease.version, "")
        except (MidstreamError, TimeoutError) as error:
            logger.info("cannot release the lease of a batch; it expires later: %s", error)

    async def remove(self, lease: Lease) -> None:
        """Remove the entry of a batch that has ended."""
        await self._documents.delete(lease.cell, _KIND, lease.owner, lease.batch_id)

    async def _put(self, cell: Cell, owner: str, batch_id: str, version: int, holder: str) -> int:
        """Write an entry; return its new version, or 0 if another router wrote it first."""
        stored = await self._documents.put(cell, _KIND, owner, batch_id, _entry(holder), if_version=version)
        if stored or not holder:
            return stored
        # The put may have been repeated because its first response was lost.
        found = await self._documents.get(_KIND, owner, batch_id)
        return found.version if json.loads(found.data)["holder"] == holder else 0


def _entry(holder: str) -> bytes:
    return json.dumps({"holder": holder}).encode()
