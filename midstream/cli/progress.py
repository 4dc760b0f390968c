"""Work on many items at once, with a progress bar on a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


async def work_through(
    items: Sequence[ItemT], work: Callable[[ItemT], Awaitable[ResultT]], *, concurrency: int, title: str
) -> list[ResultT]:
    """Return the results of `work` for all items, in order; at most `concurrency` items are worked on at a time."""
    console, slots = Console(stderr=True), asyncio.Semaphore(max(concurrency, 1))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=len(items))

        async def one(item: ItemT) -> ResultT:
            async with slots:
                result = await work(item)
            progress.advance(bar)
            return result

        return await asyncio.gather(*map(one, items))
