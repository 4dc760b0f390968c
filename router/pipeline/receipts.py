"""Looks up receipts in the schedulers."""

from __future__ import annotations

from collections.abc import Sequence

from protos import receipts_pb2
from router.pipeline.cells import CellSet
from router.pipeline.kept_requests import ask_cells

# A scheduler waits for the end of the request for up to 5 s.
_TRY_TIMEOUT_S = 10.0


class Receipts:
    """Receipts of all cells."""

    def __init__(self, cells: CellSet) -> None:
        self._cells = cells

    async def get(
        self,
        request_id: str,
        num_tokens: Sequence[int] = (),
        *,
        include_request: bool = False,
        include_outputs: bool = False,
    ) -> receipts_pb2.GetReceiptResponse:
        """Return the receipt of an ended request, given its internal id.

        Args:
            num_tokens: Lengths of the sequences; if given, the scheduler waits until they have ended with these.
            include_request: Whether to return the canonical request.
            include_outputs: Whether to return the output tokens.

        Raises:
            NotFoundError: No cell has the request, or it has not ended.
            UnavailableError: Some cells do not respond, and no other has the request.
        """
        query = receipts_pb2.GetReceiptRequest(
            request_id=request_id,
            num_tokens=num_tokens,
            include_request=include_request,
            include_outputs=include_outputs,
        )
        found = await ask_cells(self._cells, lambda cell: cell.stub.GetReceipt(query, timeout=_TRY_TIMEOUT_S))
        return next(iter(found.values()))

    async def keys(self) -> list[receipts_pb2.ReceiptKey]:
        """Return the public keys of all cells that respond. Raises MidstreamError if none does."""
        query = receipts_pb2.ListReceiptKeysRequest()
        found = await ask_cells(self._cells, lambda cell: cell.stub.ListReceiptKeys(query, timeout=_TRY_TIMEOUT_S))
        keys = {key.key_id: key for answer in found.values() for key in answer.keys}
        return sorted(keys.values(), key=lambda key: (key.created_unix_s, key.key_id))
