"""Detects changes of files with credentials."""

from __future__ import annotations

import os

Signature = tuple[int, ...]


def signature_of(status: os.stat_result) -> Signature:
    """Return a value that changes when a file is replaced or changed, or becomes readable."""
    # The status change time (ctime) also changes with the permissions.
    return status.st_ino, status.st_ctime_ns, status.st_mtime_ns, status.st_size
