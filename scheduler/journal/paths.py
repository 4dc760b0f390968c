"""Where the files of a journal are."""

from __future__ import annotations

from pathlib import Path


def beside(path: Path, suffix: str) -> Path:
    """Return the path of another file of the journal at `path`.

    Only known suffixes of journals are replaced, so that journals such as `10.0.0.1` and `10.0.0.2` share no file.
    """
    if path.suffix in (".journal", ".sqlite"):
        return path.with_suffix(suffix)
    return path.with_name(path.name + suffix)
