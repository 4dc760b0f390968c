"""Deadlines of requests, most of which have none."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext

_UNLIMITED: AbstractAsyncContextManager[None] = nullcontext()


def until(deadline: float | None) -> AbstractAsyncContextManager[object]:
    """Limit a block's duration like `asyncio.timeout_at`, which costs ten times as much if there is no deadline."""
    return _UNLIMITED if deadline is None else asyncio.timeout_at(deadline)
