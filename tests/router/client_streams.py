"""Helpers for clients that call the routers of a test cluster."""

from __future__ import annotations

from collections.abc import Callable

from midstream.client import AsyncClient, Chunk, Result

OpenClient = Callable[..., AsyncClient]
PROMPT = [10, 11, 12]


async def collect(client: AsyncClient, **arguments: object) -> tuple[Result, list[Chunk]]:
    stream = client.generate(token_ids=PROMPT, **arguments)  # type: ignore[arg-type]
    chunks = [chunk async for chunk in stream]
    result = Result(stream.request_id)
    for chunk in chunks:
        result.add(chunk)
    return result, chunks
