"""Runs the parts of one call concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

_T = TypeVar("_T")


async def run_all(parts: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Run coroutines concurrently; return their results in order. If one raises an error, cancel the others, wait for
    them, and raise that error.

    Unlike with a TaskGroup of Python 3.11, the error is not part of a reference cycle, so the objects that a failed
    call holds are freed at once instead of by a later garbage collection.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    error: BaseException | None = None
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        error = _first_error(tasks)
        if error is not None:
            raise error
        return [await task for task in tasks]
    finally:
        await _cancel(tasks)
        # The traceback of the error holds this frame.
        tasks.clear()
        del error


async def _cancel(tasks: Iterable[asyncio.Task[_T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _first_error(tasks: Iterable[asyncio.Task[_T]]) -> BaseException | None:
    errors = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((error for error in errors if error is not None), None)
