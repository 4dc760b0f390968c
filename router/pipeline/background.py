"""Requests that run in the background, such as lines of batches, at a lower priority than interactive requests."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Background:
    """Settings that all requests of a background task share.

    Attributes:
        until: Unix time, in seconds, at which the requests time out.
    """

    priority: int
    until: float


current_background: ContextVar[Background | None] = ContextVar("current_background", default=None)
