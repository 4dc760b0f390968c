"""Requests that have ended, kept a while for those who resume them: so many, so many tokens, and so long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from scheduler.core.config import CoreConfig
from scheduler.core.request import Request
from scheduler.core.timers import Timers


class FinishedRequests:
    """The ended requests that are kept, in order of their ends."""

    def __init__(self, config: CoreConfig, timers: Timers, on_forget: Callable[[Request], None]) -> None:
        """`on_forget` is told of each that is not kept any longer."""
        self._config = config
        self._timers = timers
        self._on_forget = on_forget
        self._requests: OrderedDict[str, tuple[Request, int]] = OrderedDict()  # with the time from which it is kept
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._requests.values())

    def keep(self, request: Request, now_ns: int) -> None:
        """Keeps a request from now on, in place of older ones where these take too much."""
        config = self._config
        self._requests[request.request_id] = request, now_ns
        self._num_tokens += _num_tokens(request)
        while len(self._requests) > config.max_num_finished or self._num_tokens > config.max_finished_tokens:
            self.forget(next(iter(self)))
        self._timers.at(now_ns + config.finished_ttl_ns, self._forget_expired)

    def forget(self, request: Request) -> None:
        """Keeps a request no longer."""
        del self._requests[request.request_id]
        self._num_tokens -= _num_tokens(request)
        self._on_forget(request)

    def _forget_expired(self, now_ns: int) -> None:
        while self._requests:
            oldest, kept_ns = next(iter(self._requests.values()))
            if kept_ns + self._config.finished_ttl_ns > now_ns:
                return
            self.forget(oldest)


def _num_tokens(request: Request) -> int:
    """What keeping a request takes; it does not change once the request has ended."""
    return len(request.spec.prompt) + sum(len(sequence.output) for sequence in request.sequences)
