"""Services that share a process."""

from __future__ import annotations

import asyncio

import pytest

from midstream.errors import ExecutionError
from midstream.parts import Part, PartError, run_parts


async def end() -> None:
    """End without waiting for a signal."""


async def serve_for_ever() -> None:
    await asyncio.Event().wait()


async def test_the_process_ends_if_a_part_ends_without_being_told_to() -> None:
    parts = [Part("router", "router:1", end), Part("scheduler", "scheduler:2", serve_for_ever)]
    with pytest.raises(PartError, match="router:1 failed") as raised:
        await asyncio.wait_for(run_parts(parts), timeout=10)
    assert isinstance(raised.value.error, ExecutionError)
