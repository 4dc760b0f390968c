"""Idempotency keys of calls that create files and batches; a document per key records the first call's result."""

from __future__ import annotations

import time

from midstream.errors import NotFoundError
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocuments
from router.pipeline.idempotency import request_id_of
from router.protocols.batches.files import NS_PER_S

_KIND = "idempotency_key"
_KEEP_S = 24 * 3600


async def claim(
    documents: ClientDocuments, cell: Cell, owner: str, key: str, call: str, new_id: str
) -> tuple[Cell, str]:
    """Return the cell and id of the object that a call with `key` creates: an earlier call's, otherwise `new_id`."""
    if not key:
        return cell, new_id
    name = request_id_of(key, call)
    while True:
        try:
            found = await documents.get(_KIND, owner, name)
        except NotFoundError:
            expires_ns = time.time_ns() + _KEEP_S * NS_PER_S
            await documents.put(cell, _KIND, owner, name, new_id.encode(), expires_ns=expires_ns, if_version=0)
        else:
            return found.cell, found.data.decode()
