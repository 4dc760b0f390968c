"""Checks folders in locations to which other users can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder, not a link, that only this user can access. Raises OSError if missing."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
