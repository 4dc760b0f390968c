"""How the compatible APIs report that a request moved to another kind of workers (GenerateResponse.kind_changed_at)."""

from __future__ import annotations

from midstream.chunk import Chunk

NAME = "kind_changed_at"
# Trailing metadata of calls whose responses have no place for it.
METADATA = "midstream-kind-changed-at"


def kind_change_of(chunk: Chunk) -> dict[str, object]:
    """Return the JSON field, or nothing if the kind has not changed so far."""
    return {} if chunk.kind_changed_at is None else {NAME: chunk.kind_changed_at}
