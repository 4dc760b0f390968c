"""Which requests have a client at this router."""

from __future__ import annotations

from collections import Counter


class Readers:
    """Counts the clients of each request: one whose connection was cut is back before its first stream is given up."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._counts

    def enter(self, request_id: str) -> None:
        """A client is there."""
        self._counts[request_id] += 1

    def leave(self, request_id: str) -> None:
        """It has left, or has all it came for."""
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]
