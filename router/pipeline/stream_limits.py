"""How many streams may be open at once, in all and for one client."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from midstream.errors import OverloadedError

_RETRY_AFTER_MS = 1000


class StreamLimits:
    """Counts open streams.

    Attributes:
        num_open: Streams that are open now.
    """

    def __init__(self, max_streams: int = 4096, max_streams_per_client: int = 1024) -> None:
        self.num_open = 0
        self._max_streams = max_streams
        self._max_streams_per_client = max_streams_per_client
        self._open: Counter[str] = Counter()

    def take(self, client: str) -> Callable[[], None]:
        """Counts a stream of `client`; what comes back ends it, once.

        Raises:
            OverloadedError: There are too many.
        """
        if self.num_open >= self._max_streams:
            raise OverloadedError(
                f"this router has {self.num_open} streams, its most; try another", retry_after_ms=_RETRY_AFTER_MS
            )
        if self._open[client] >= self._max_streams_per_client:
            raise OverloadedError(
                f"this client has {self._open[client]} streams on this router, its most", retry_after_ms=_RETRY_AFTER_MS
            )
        self.num_open += 1
        self._open[client] += 1
        return functools.partial(self._give_back, client)

    def _give_back(self, client: str) -> None:
        self.num_open -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
