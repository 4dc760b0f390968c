"""Helpers for streamed HTTP responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive, Send

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def write(send: Send, text: str, *, more: bool) -> None:
    """Write a piece of the body."""
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` until it ends or the client disconnects."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
