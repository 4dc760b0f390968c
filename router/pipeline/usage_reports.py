"""Clients' quota usage at each router, which routers report to each other through the schedulers.

A report has the usage of each client in the intervals of the last minute. It is repeated every second, so a lost report
has no effect, and a router that has just started learns of the last minute.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from protos import status_pb2

_INTERVAL_S = 10.0
_NUM_INTERVALS = 6
# A report has at most this many clients, the latest ones.
_MAX_CLIENTS = 1000


@dataclass(frozen=True, slots=True)
class UsageSeen:
    """Additional usage at another router.

    Attributes:
        at: Time of the report in which it was first seen.
    """

    at: float
    num_requests: int
    num_tokens: int


class UsageReports:
    """This router's usage, and that of the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A random start, because a restarted router counts from zero: its intervals must differ from earlier ones.
        self._first_number = secrets.randbits(40) << 20
        self._own: dict[str, status_pb2.ClientUsage] = {}  # by client, latest last
        # By router, client and interval: the highest numbers of requests and tokens, and when they were last reported.
        self._known: dict[tuple[str, str, int], tuple[int, int, float]] = {}
        self._running: dict[str, int] = {}  # by client, at all other routers
        self._seen: dict[str, deque[UsageSeen]] = {}  # by client, of the last minute

    def count(self, client: str, *, num_running: int, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Count usage at this router; `num_running` is the current number of requests."""
        usage = self._own.pop(client, None) or status_pb2.ClientUsage(client=client)
        self._own[client] = usage
        usage.num_running = num_running
        number = self._number()
        if not usage.intervals or usage.intervals[-1].number != number:
            usage.intervals.add(number=number)
            del usage.intervals[:-_NUM_INTERVALS]
        usage.intervals[-1].num_requests += num_requests
        usage.intervals[-1].num_tokens += num_tokens

    def has(self, client: str) -> bool:
        """Return whether this router reports a client's usage."""
        return client in self._own

    def own(self) -> list[status_pb2.ClientUsage]:
        """Return this router's usage in the last minute."""
        oldest = self._number() - _NUM_INTERVALS
        for client, usage in list(self._own.items()):
            while usage.intervals and usage.intervals[0].number <= oldest:
                del usage.intervals[0]
            if not usage.intervals and not usage.num_running:
                del self._own[client]
        return list(itertools.islice(reversed(self._own.values()), _MAX_CLIENTS))

    def learn(self, routers: Iterable[status_pb2.RouterStatus]) -> Iterator[tuple[str, UsageSeen]]:
        """Yield each client's usage that was not seen before.

        Args:
            routers: A status of each other router, not necessarily the latest.
        """
        now = self._clock()
        self._running = {}
        for router in routers:
            for usage in router.usage:
                client = usage.client
                self._running[client] = self._running.get(client, 0) + usage.num_running
                seen = self._difference(now, router.router_id, usage)
                if seen.num_requests or seen.num_tokens:
                    self._seen.setdefault(client, deque()).append(seen)
                    yield client, seen
        self._forget(now)

    def num_running_elsewhere(self, client: str) -> int:
        """Return a client's number of running requests at other routers."""
        return self._running.get(client, 0)

    def seen(self, client: str) -> Iterable[UsageSeen]:
        """Return a client's usage at other routers in the last minute, oldest first."""
        return self._seen.get(client, ())

    def _number(self) -> int:
        return self._first_number + int(self._clock() // _INTERVAL_S)

    def _difference(self, now: float, router_id: str, usage: status_pb2.ClientUsage) -> UsageSeen:
        num_requests = num_tokens = 0
        for interval in usage.intervals:
            key = router_id, usage.client, interval.number
            requests, tokens, _ = self._known.get(key, (0, 0, 0.0))
            num_requests += max(interval.num_requests - requests, 0)
            num_tokens += max(interval.num_tokens - tokens, 0)
            self._known[key] = max(interval.num_requests, requests), max(interval.num_tokens, tokens), now
        return UsageSeen(now, num_requests, num_tokens)

    def _forget(self, now: float) -> None:
        # A report that comes through another scheduler may be some seconds older.
        for key, (_, _, reported_at) in list(self._known.items()):
            if reported_at < now - 2 * _NUM_INTERVALS * _INTERVAL_S:
                del self._known[key]
        for client, seen in list(self._seen.items()):
            while seen and seen[0].at < now - _NUM_INTERVALS * _INTERVAL_S:
                seen.popleft()
            if not seen:
                del self._seen[client]
