"""What a pause of generation does with running requests."""

from __future__ import annotations

import enum


class PauseMode(enum.StrEnum):
    """What happens to running requests; new ones wait in any case."""

    KEEP = "keep"  # they keep their blocks
    RECOMPUTE = "recompute"  # they give up their blocks
    FINISH = "finish"  # they finish first
    ABORT = "abort"  # they end, and so do those that wait
