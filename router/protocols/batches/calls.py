"""Calls to the router's own endpoints within the process, without a connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope


@dataclass(slots=True)
class Answer:
    """An endpoint's response.

    Attributes:
        headers: Headers by lower-case name.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    """POST a JSON body to an endpoint; if the call is cancelled, the endpoint sees a client that disconnects."""
    named = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": None,
        "server": None,
    }
    answer, is_read = Answer(500, {}, b""), False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client stays connected until the response is complete
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer
