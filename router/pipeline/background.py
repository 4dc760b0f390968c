"""Requests that run in the background, such as lines of batches, at a lower priority than requests clients wait for."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Background:
    """Settings that all requests of a background task share.

    Attributes:
        priority: At most; requests may have a lower one.
        until: Unix seconds at which they time out.
    """

    priority: int
    until: float


current_background: ContextVar[Background | None] = ContextVar("current_background", default=None)
