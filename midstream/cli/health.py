"""Queries a process's health endpoints over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl

_TIMEOUT_S = 2.0
_CLOSED = "does not listen"


async def probe_health(address: str) -> str | None:
    """Return why the process at `address` is unhealthy; None if it is healthy.

    Args:
        address: HOST:PORT; an IPv6 address is in brackets.
    """
    answer = await _get(address, "/health")
    if isinstance(answer, str):
        return answer
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " in head.split(b"\r\n", 1)[0]:
        return None
    return _reasons(body)


async def is_alive(address: str) -> bool:
    """Return whether the process at `address` is alive, which includes waiting and draining."""
    answer = await _get(address, "/live")
    if answer == _CLOSED:
        return True  # a process that drains has closed its port; one that hangs has not
    # Any other response, even 404, shows that its loop is running.
    return isinstance(answer, bytes) and b" 503 " not in answer.split(b"\r\n", 1)[0]


async def _get(address: str, path: str) -> bytes | str:
    """Return the response, or the reason why there is none."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            # A TLS port does not respond to plain text.
            plain = await _ask(host, int(port), path, None)
            return plain or await _ask(host, int(port), path, _any_certificate())
    except TimeoutError:
        return "does not answer"
    except OSError:
        return _CLOSED


async def _ask(host: str, port: int, path: str, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(host.strip("[]"), port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
        answer = await reader.read(64 << 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
    return answer


def _any_certificate() -> ssl.SSLContext:
    # Health is not secret and no data is sent, so the server's certificate is not verified here. If the port requires a
    # client certificate, this process presents its own.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    cert, key = (os.environ.get(name, "") for name in ("MIDSTREAM_TLS_CERT", "MIDSTREAM_TLS_KEY"))
    if cert and key:
        with contextlib.suppress(OSError):
            context.load_cert_chain(cert, key, password=lambda: b"")
    return context


def _reasons(body: bytes) -> str:
    try:
        reasons = json.loads(body)["stalled"]
        return ", ".join(str(reason) for reason in reasons) or "not serving"
    except (ValueError, KeyError, TypeError):
        return "not serving"
