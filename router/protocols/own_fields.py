"""The fields that chunks of this service add to the responses of the compatible APIs."""

from __future__ import annotations

from dataclasses import asdict

from midstream.chunk import Chunk
from router.protocols.kind_change import kind_change_of
from router.protocols.receipts import receipt_of
from router.protocols.validation import validation_of


def own_fields_of(chunk: Chunk) -> dict[str, object]:
    """Return the change of the workers' kind, the versions of the weights, the result of a validation, and the receipt,
    as far as there are any.
    """
    return kind_change_of(chunk) | _weights_of(chunk) | validation_of(chunk) | receipt_of(chunk)


def _weights_of(chunk: Chunk) -> dict[str, object]:
    """Return GenerateResponse.weights, or nothing before the first change of the weights."""
    return {"weights": [asdict(part) for part in chunk.weights]} if chunk.weights else {}
