"""Limits how many calls of one client, other than requests, are processed at the same time.

Such calls share the event loop with requests. Without this limit, if one client kept dozens of calls in progress, the
requests of others would wait for a step of each of these calls, again and again. New requests have separate slots
(`FrontDoor.start`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from midstream.rpc.errors import TakeTurn
from router.authentication import current_caller
from router.pipeline.start_slots import StartSlots
from router.pipeline.stream_limits import RESUME, is_query

_MAX_QUERIES, _QUERY_S = 2, 0.1
# Clients resume all of their streams at once when a router dies, and a stream may have no new output for a while.
_MAX_RESUMES, _RESUME_S = 16, 0.05

# A flood from the address of the prober, perhaps through a proxy on the same host, must not cause the router to be
# restarted.
_PROBES = frozenset({"/live", "/health"})


class CallTurns:
    """Lets a few calls of each client proceed; the others wait in order of arrival.

    A call that outlasts its slot is waiting for another component, or is a stream that has begun.
    """

    def __init__(self) -> None:
        self._queries = StartSlots(_MAX_QUERIES, hold_s=_QUERY_S)
        self._resumes = StartSlots(_MAX_RESUMES, hold_s=_RESUME_S)

    def of_method(self, method: str) -> TakeTurn | None:
        """Return a function that makes a gRPC call wait for its turn; None if calls of the method need not wait."""
        slots = self._resumes if method == RESUME else self._queries if is_query(method) else None
        return None if slots is None else lambda: slots.hold(current_caller.get().name)

    def for_pages(self, app: ASGIApp) -> ASGIApp:
        """Wrap an ASGI application, so that GET and HEAD requests, except health probes, wait for their turn."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or scope["path"] in _PROBES:
                await app(scope, receive, send)
                return
            client = scope.get("client")
            async with self._queries.hold(current_caller.get().name or (client[0] if client else "")):
                await app(scope, receive, send)

        return call
