"""Recognizes files that a repository cloned without Git LFS has in the place of large ones."""

from __future__ import annotations

from pathlib import Path

from midstream.errors import ConfigError

_START = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raise ConfigError if `path` is not the file itself but a pointer to it. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_START)) == _START:
            raise ConfigError(
                f"{path} is a Git LFS pointer instead of the file itself; run `git lfs pull` in {path.parent}",
                field="model",
            )
