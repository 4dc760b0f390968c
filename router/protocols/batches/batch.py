"""A batch as it is stored, and changes to it.

The document of a batch is changed both by the router that runs it and by clients that cancel it, so each change is a
function that is applied again if another change was stored first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from midstream.errors import NotFoundError
from router.pipeline.cells import Cell
from router.pipeline.client_documents import ClientDocuments
from router.protocols.batches.files import FILE_PREFIX, NS_PER_S

BATCH_PREFIX = "batch_"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_KIND = "batch"
# Minimum time for which a batch can be retrieved after it has ended.
_KEEP_S = 30 * 24 * 3600
_USAGE = ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens")


@dataclass(slots=True)
class Batch:
    """A batch; the fields up to `usage` are those of OpenAI's API.

    Attributes:
        output_ttl_s: How long its output and error files are stored.
        num_parts: Number of parts whose output has been stored.
        num_output_bytes, num_error_bytes: Number of bytes of each file stored so far.
        digest: Digest of the body that created the batch, to recognize a repeated call.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    model: str | None = None
    errors: dict[str, object] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    usage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_USAGE, 0))
    output_ttl_s: int = 0
    num_parts: int = 0
    num_output_bytes: int = 0
    num_error_bytes: int = 0
    digest: str = ""

    @property
    def output_id(self) -> str:
        """Id of the output file, which may not exist yet."""
        return f"{FILE_PREFIX}{self.id.removeprefix(BATCH_PREFIX)}o"

    @property
    def error_id(self) -> str:
        """Id of the error file, which may not exist yet."""
        return f"{FILE_PREFIX}{self.id.removeprefix(BATCH_PREFIX)}e"

    def enter(self, status: str) -> None:
        """Change the status, and record the time of the change."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def view(self) -> dict[str, object]:
        """Return the batch in the format that clients see."""
        fields = asdict(self)
        for name in ("output_ttl_s", "num_parts", "num_output_bytes", "num_error_bytes", "digest"):
            del fields[name]
        cached = fields["usage"].pop("cached_tokens")
        reasoning = fields["usage"].pop("reasoning_tokens")
        fields["usage"]["input_tokens_details"] = {"cached_tokens": cached}
        fields["usage"]["output_tokens_details"] = {"reasoning_tokens": reasoning}
        return {**fields, "object": "batch"}


class Batches:
    """The batches of all clients. `owner` is the client's name; empty if authentication is off."""

    def __init__(self, documents: ClientDocuments) -> None:
        self.documents = documents

    async def create(self, cell: Cell, owner: str, batch: Batch) -> None:
        """Store a new batch, unless a batch with its id already exists."""
        await self._put(cell, owner, batch, 0)

    async def get(self, owner: str, batch_id: str) -> tuple[Cell, Batch]:
        """Return a batch, and the cell that stores it. Raises NotFoundError if the batch does not exist."""
        cell, batch, _ = await self._get(owner, batch_id)
        return cell, batch

    async def update(self, owner: str, batch_id: str, change: Callable[[Batch], None]) -> Batch:
        """Apply `change` and return the batch. `change` must be idempotent: it is called again if the batch was changed
        before the result was stored.
        """
        while True:
            cell, batch, version = await self._get(owner, batch_id)
            before = asdict(batch)
            change(batch)
            if asdict(batch) == before or await self._put(cell, owner, batch, version):
                return batch

    async def list(self, owner: str, *, after: str, limit: int) -> list[Batch]:
        """Return the batches created before the one with id `after`, newest first."""
        found = await self.documents.newest(_KIND, owner, after=after, limit=limit, ascending=False)
        return [Batch(**json.loads(document.data)) for document in found]

    async def _get(self, owner: str, batch_id: str) -> tuple[Cell, Batch, int]:
        missing = NotFoundError(f"no batch {batch_id[:64]!r} was found")
        if not batch_id.startswith(BATCH_PREFIX):
            raise missing
        try:
            found = await self.documents.get(_KIND, owner, batch_id)
        except NotFoundError:
            raise missing from None
        return found.cell, Batch(**json.loads(found.data)), found.version

    async def _put(self, cell: Cell, owner: str, batch: Batch, version: int) -> int:
        data = json.dumps(asdict(batch)).encode()
        expires_ns = (batch.expires_at + _KEEP_S) * NS_PER_S
        return await self.documents.put(cell, _KIND, owner, batch.id, data, expires_ns=expires_ns, if_version=version)
