"""All known requests: unfinished ones and, for a while, ended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from scheduler.core.config import CoreConfig
from scheduler.core.request import Request
from scheduler.core.timers import Timers


class RequestTable(Mapping[str, Request]):
    """Requests by id. Ended requests are kept for clients that resume them, with limits on their number, tokens and
    age.
    """

    def __init__(self, config: CoreConfig, timers: Timers, on_forget: Callable[[Request], None]) -> None:
        """Create a table; `on_forget` is called with each request that is dropped."""
        self._config = config
        self._timers = timers
        self._on_forget = on_forget
        self._requests: dict[str, Request] = {}
        # In the order of their ends, with the time since which each has been kept.
        self._ended: OrderedDict[str, tuple[Request, int]] = OrderedDict()
        self._num_ended_tokens = 0
        self._is_expiry_set = False

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests  # Mapping.__contains__ raises and catches a KeyError

    def get(self, request_id: str) -> Request | None:  # type: ignore[override]  # there is only one default
        """Return a request, or None if it is unknown; `Mapping.get` would raise and catch a KeyError."""
        return self._requests.get(request_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests) - len(self._ended)

    @property
    def ended(self) -> list[Request]:
        """Return the requests that have ended, in the order in which they ended."""
        return [request for request, _ in self._ended.values()]

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def keep(self, request: Request, now_ns: int) -> None:
        """Keep an ended request from now on, and drop older ones beyond the limits."""
        config = self._config
        self._ended[request.request_id] = request, now_ns
        self._num_ended_tokens += _num_tokens(request)
        while len(self._ended) > config.max_num_finished or self._num_ended_tokens > config.max_finished_tokens:
            self.forget(next(iter(self._ended.values()))[0])
        if not self._is_expiry_set:
            self._set_expiry()

    def forget(self, request: Request) -> None:
        """Drop an ended request."""
        del self._ended[request.request_id], self._requests[request.request_id]
        self._num_ended_tokens -= _num_tokens(request)
        self._on_forget(request)

    def _set_expiry(self) -> None:
        """Set the timer of the request that expires first."""
        self._is_expiry_set = bool(self._ended)
        if self._ended:
            _, kept_ns = next(iter(self._ended.values()))
            self._timers.at(kept_ns + self._config.finished_ttl_ns, self._forget_expired)

    def _forget_expired(self, now_ns: int) -> None:
        while self._ended:
            oldest, kept_ns = next(iter(self._ended.values()))
            if kept_ns + self._config.finished_ttl_ns > now_ns:
                break
            self.forget(oldest)
        self._set_expiry()


def _num_tokens(request: Request) -> int:
    """Return the number of tokens that a kept request counts for; constant once it has ended."""
    return len(request.spec.prompt) + sum(len(sequence.output) for sequence in request.sequences)
