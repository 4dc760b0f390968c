"""Where the files of a journal are."""

from __future__ import annotations

from pathlib import Path


def documents_of(path: Path) -> Path:
    """Return the path of the documents beside the journal at `path`.

    Only the known suffix is replaced, so that journals such as `10.0.0.1` and `10.0.0.2` share no documents.
    """
    if path.suffix == ".journal":
        return path.with_suffix(".documents")
    return path.with_name(path.name + ".documents")
