"""Asks a process's /health how it is."""

from __future__ import annotations

import asyncio
import json

_TIMEOUT_S = 2.0


async def probe_health(address: str) -> str | None:
    """What is wrong with the process whose HTTP port is at `address`; None when nothing is.

    Args:
        address: HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                answer = await reader.read(64 << 10)
            finally:
                writer.close()
    except TimeoutError:
        return "does not answer"
    except OSError:
        return "does not listen yet"
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " in head.split(b"\r\n", 1)[0]:
        return None
    return _reasons(body)


def _reasons(body: bytes) -> str:
    try:
        reasons = json.loads(body)["stalled"]
        return ", ".join(str(reason) for reason in reasons) or "not serving"
    except (ValueError, KeyError, TypeError):
        return "not serving"
