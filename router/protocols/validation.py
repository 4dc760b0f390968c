"""How the compatible APIs report whether an output matches a schema that was not fully enforced
(GenerateResponse.validation).
"""

from __future__ import annotations

from midstream.chunk import Chunk

NAME = "validation"
# Trailing metadata of calls whose responses have no place for it: JSON.
METADATA = "midstream-validation"
# Parameters of KServe's responses.
IS_VALID, ERRORS = "output_is_valid", "output_errors"


def validation_of(chunk: Chunk) -> dict[str, dict[str, object]]:
    """Return the JSON field, or nothing if everything was enforced or the sequence has not ended."""
    found = chunk.validation
    return {} if found is None else {NAME: {"is_valid": found.is_valid, "errors": list(found.errors)}}
