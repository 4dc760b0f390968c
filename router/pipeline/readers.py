"""Count the clients of requests at this router."""

from __future__ import annotations

from collections import Counter


class Readers:
    """Counts each request's clients: a client may reconnect before its first stream is dropped."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._counts

    def enter(self, request_id: str) -> None:
        """Add a client."""
        self._counts[request_id] += 1

    def leave(self, request_id: str) -> None:
        """Remove a client."""
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]
