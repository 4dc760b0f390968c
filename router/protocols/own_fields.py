"""The fields that chunks of this service add to the responses of the compatible APIs."""

from __future__ import annotations

from midstream.chunk import Chunk
from router.protocols.kind_change import kind_change_of
from router.protocols.receipts import receipt_of
from router.protocols.validation import validation_of


def own_fields_of(chunk: Chunk) -> dict[str, object]:
    """Return the change of the workers' kind, the result of a validation, and the receipt, as far as there are any."""
    return kind_change_of(chunk) | validation_of(chunk) | receipt_of(chunk)
