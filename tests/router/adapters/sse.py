"""Server-sent events over a plain socket, so that a test can close or drop the connection after any event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class EventStream:
    """The events of one response.

    Attributes:
        last_id: Id of the last event that was read.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.last_id = ""

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of each event until `[DONE]` or the end of the connection."""
        while line := await self._reader.readline():
            if line.startswith(b"id: "):
                self.last_id = line[4:].strip().decode()
            elif line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return


@asynccontextmanager
async def post_stream(
    port: int, path: str, body: dict[str, object], last_event_id: str | None = None
) -> AsyncIterator[EventStream]:
    """Post `body` and yield the events of the response. Leaving the context closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n"
    head += f"Last-Event-ID: {last_event_id}\r\n" if last_event_id is not None else ""
    writer.write(head.encode() + b"\r\n" + data)
    try:
        yield EventStream(reader)
    finally:
        writer.close()
