"""Quotas of authenticated clients: requests and tokens per minute, and concurrent requests.

A quota per minute is a token bucket that refills steadily and holds at most one minute's worth. A request takes 1 from
the bucket for requests, and its prompt and output tokens from the bucket for tokens as they are processed. The latter
may become negative; new requests are then rejected until it is positive again. This way actual usage is counted, and no
running request is ended.

A router counts across all of its APIs. Routers of the same cells report their usage to each other through the
schedulers (usage_reports), so a quota holds for all of them together, with a delay of about two seconds.

A detached request counts as running until it ends. While nobody reads it, its scheduler reports it to all routers.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Iterable

from prometheus_client import Counter

from midstream.chunk import Chunk
from midstream.errors import OverloadedError
from midstream.telemetry import Metrics
from protos import status_pb2
from router.authentication import Caller, Quota
from router.pipeline.usage_reports import UsageReports, UsageSeen

_PERIOD_S = 60.0
_BUSY_RETRY_MS = 1000
_MIN_RETRY_MS = 50
_MAX_CHARGED = 16_384
# Time for the scheduler to learn that the last reader of a request has left.
_LEAVE_S = 0.25


class _Rate:
    """A token bucket for requests or tokens."""

    def __init__(self, name: str, limit: int, now: float, share: float = 1.0) -> None:
        """`share` is the part of the limit that remains."""
        self.name = name
        self.limit = limit
        self._level = share * limit
        self._at = now

    def level(self, now: float) -> float:
        """Return the remaining amount; negative if the quota is overdrawn."""
        self._level = min(self._level + (now - self._at) * self.limit / _PERIOD_S, self.limit)
        self._at = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount

    def with_limit(self, limit: int, now: float) -> _Rate:
        """Return a bucket with another limit and the same remaining fraction."""
        return self if limit == self.limit else _Rate(self.name, limit, now, self.level(now) / self.limit)

    def seconds_until(self, level: float, now: float) -> float:
        """Return the number of seconds until the bucket reaches this level."""
        return max(level - self.level(now), 0.0) * _PERIOD_S / self.limit


class ChargedTokens:
    """For each sequence of a request: the range of output tokens that its client has been charged for."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}

    def add(self, chunk: Chunk) -> int:
        """Add the tokens of a chunk; return how many of them are new.

        Of two ranges with a gap between them only the later one is kept: tokens may be counted twice if a client does
        not read them in order, but are always counted.
        """
        first, end = chunk.token_offset, chunk.next_offset
        if first == end:
            return 0
        low, high = self._ranges.get(chunk.sequence_index, (first, first))
        num_known = max(min(high, end) - max(low, first), 0)
        is_adjacent = first <= high and end >= low
        self._ranges[chunk.sequence_index] = (min(low, first), max(high, end)) if is_adjacent else (first, end)
        return end - first - num_known


class Account:
    """The quota usage of one client."""

    def __init__(self, client: str, quota: Quota, clock: Callable[[], float], used: Iterable[UsageSeen] = ()) -> None:
        """`used` is what the client has used at other routers in the last minute, oldest first."""
        self.num_running = 0
        self._client = client
        self._clock = clock
        self._rates: dict[str, _Rate] = {}
        self.change(quota, used)

    def change(self, quota: Quota, used: Iterable[UsageSeen]) -> None:
        """Set the quota. Usage under the previous quota still counts, since the client may alternate between tokens
        with different quotas. For limits that did not exist before, `used` counts.
        """
        self.quota = quota
        self.is_limited = quota != Quota()
        self._requests = self._changed("requests", quota.requests_per_minute, used)
        self._tokens = self._changed("tokens", quota.tokens_per_minute, used)

    def admit(self, num_running_elsewhere: int = 0) -> None:
        """Count a new request; `num_running_elsewhere` is the client's number of requests at other routers.

        Raises:
            OverloadedError: A quota is exhausted; the message begins with the quota's name.
        """
        now = self._clock()
        limit = self.quota.max_concurrent
        if limit and self.num_running + num_running_elsewhere >= limit:
            message = f"max_concurrent: {self._client} has reached its limit of {limit} running requests"
            raise OverloadedError(message, retry_after_ms=_BUSY_RETRY_MS)
        for rate in (self._requests, self._tokens):
            wait_s = rate.seconds_until(1, now) if rate is not None else 0.0
            if rate is not None and wait_s > 0:
                message = f"{rate.name}_per_minute: {self._client} has used its limit of {rate.limit}"
                raise OverloadedError(message, retry_after_ms=max(math.ceil(wait_s * 1000), _MIN_RETRY_MS))
        if self._requests is not None:
            self._requests.take(1, now)

    def charge(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def _changed(self, name: str, limit: int, used: Iterable[UsageSeen]) -> _Rate | None:
        """Return the bucket called `name` with a new limit; None if there is no limit any more."""
        if not limit:
            return None
        now, rate = self._clock(), self._rates.get(name)
        if rate is not None:
            rate = rate.with_limit(limit, now)
        else:
            rate = _Rate(name, limit, now - _PERIOD_S)
            for seen in used:
                rate.take(seen.num_requests if name == "requests" else seen.num_tokens, seen.at)
        self._rates[name] = rate
        return rate

    def take(self, seen: UsageSeen) -> None:
        """Count what the client has used at another router."""
        if self._requests is not None:
            self._requests.take(seen.num_requests, seen.at)
        if self._tokens is not None:
            self._tokens.take(seen.num_tokens, seen.at)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's rate limit headers."""
        now, found = self._clock(), dict[str, str]()
        for rate in (self._requests, self._tokens):
            if rate is not None:
                found[f"x-ratelimit-limit-{rate.name}"] = str(rate.limit)
                found[f"x-ratelimit-remaining-{rate.name}"] = str(max(math.floor(rate.level(now)), 0))
                found[f"x-ratelimit-reset-{rate.name}"] = f"{rate.seconds_until(rate.limit, now):.3f}s"
        return found


class Admission:
    """One admitted request, or a reader of its output; call `release` once when it ends."""

    def __init__(self, quotas: Quotas, client: str, request_id: str, *, is_running: bool = True) -> None:
        """`client` is the client's name; it is empty if the client is not authenticated and therefore has no quota.
        `is_running` states whether it counts as a running request.
        """
        self._quotas = quotas
        self._client = client
        self._request_id = request_id
        self._is_released = not is_running

    def charge_prompt(self, request_id: str, num_tokens: int) -> None:
        """Charge the prompt of a request that starts, and forget which tokens of an earlier request with this id were
        charged.
        """
        if self._client:
            self._quotas.forget(self._client, request_id)
            self._quotas.charge(self._client, num_tokens, 0)

    def charge_output(self, request_id: str, chunk: Chunk) -> None:
        """Charge the output tokens of a chunk, except for those that the client has been charged for at this router."""
        if not self._client:
            return
        num_new = self._quotas.charged_of(self._client, request_id).add(chunk)
        if num_new:
            self._quotas.charge(self._client, 0, num_new)

    def release(self, *, is_left: bool = False) -> None:
        """Record that the request has ended, or that its client has disconnected; with `is_left`, the request may
        continue without it.
        """
        if self._client and not self._is_released:
            self._is_released = True
            self._quotas.leave(self._client, self._request_id, is_left=is_left)


class Quotas:
    """The quota usage of all authenticated clients."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._reports = UsageReports(clock)
        self._read: Counts[str] = Counts()  # requests that run and are read at this router, by id
        # Requests that run while nobody reads them, by client: those reported by the schedulers, and those left by a
        # client of this router, with the time at which they were left.
        self._unread: dict[str, set[str]] = {}
        self._left: dict[str, dict[str, float]] = {}
        self._requests: Counter = metrics.counter("client_requests", "Requests by authenticated client.", ("client",))
        self._refused: Counter = metrics.counter(
            "client_refused_requests", "Requests rejected for exceeding a quota.", ("client", "quota")
        )
        self._tokens: Counter = metrics.counter(
            "client_tokens", "Prompt and output tokens by authenticated client.", ("client", "kind")
        )
        self._counts: dict[str, tuple[Counter, Counter]] = {}
        self._charged: OrderedDict[tuple[str, str], ChargedTokens] = OrderedDict()

    def admit(self, caller: Caller, request_id: str = "") -> Admission:
        """Count a request of `caller`. Raises OverloadedError if the caller's quota is exhausted.

        Args:
            request_id: Its internal id. If the request runs already, it is not counted twice.
        """
        if not caller.is_authenticated:
            return Admission(self, "", "")
        account = self._account(caller)
        unread = self._unread_of(caller) - {request_id}
        num_unread = sum(other not in self._read for other in unread)
        try:
            account.admit(self._reports.num_running_elsewhere(caller.name) + num_unread)
        except OverloadedError as error:
            self._refused.labels(caller.name, error.message.partition(":")[0]).inc()
            raise
        self._requests.labels(caller.name).inc()
        self._enter(account, caller.name, request_id, num_requests=1)
        return Admission(self, caller.name, request_id)

    def resume(self, caller: Caller, request_id: str = "") -> Admission:
        """Return the admission to charge for output that `caller` reads from a request admitted earlier."""
        if not caller.is_authenticated:
            return Admission(self, "", "", is_running=False)
        account, is_running = self._account(caller), request_id in self._unread_of(caller)
        if is_running:
            self._enter(account, caller.name, request_id)
        return Admission(self, caller.name, request_id, is_running=is_running)

    def _unread_of(self, caller: Caller) -> set[str]:
        # A request of an unauthenticated client may have any client id, but not an id of this caller.
        reported = self._unread.get(caller.name, ())
        return {request_id for request_id in reported if caller.owns(request_id)}.union(self._left.get(caller.name, ()))

    def _enter(self, account: Account, client: str, request_id: str, num_requests: int = 0) -> None:
        account.num_running += 1
        if request_id:
            self._read[request_id] += 1
            self._left.get(client, {}).pop(request_id, None)
        self._report(client, account, num_requests=num_requests)

    def forget(self, client: str, request_id: str) -> None:
        """Forget which output tokens of a request its client has been charged for."""
        self._charged.pop((client, request_id), None)

    def charged_of(self, client: str, request_id: str) -> ChargedTokens:
        """Return the output tokens of a request that its client has been charged for; those of old requests are
        forgotten.
        """
        key = client, request_id
        charged = self._charged.get(key)
        if charged is None:
            charged = self._charged[key] = ChargedTokens()
            if len(self._charged) > _MAX_CHARGED:
                self._charged.popitem(last=False)
        return charged

    def headers(self, caller: Caller) -> dict[str, str]:
        """Return HTTP headers with the caller's remaining quota; none if it has no quota."""
        return self._account(caller).headers() if caller.is_authenticated and caller.quota != Quota() else {}

    def leave(self, client: str, request_id: str, *, is_left: bool) -> None:
        """Decrement the client's number of running requests; with `is_left`, this one may run while nobody reads it."""
        account = self._accounts[client]
        account.num_running -= 1
        if request_id:
            self._read[request_id] -= 1
            if not self._read[request_id]:
                del self._read[request_id]
            if is_left:
                self._left.setdefault(client, {})[request_id] = self._clock()
        self._report(client, account)

    def learn_detached(self, detached: Iterable[status_pb2.DetachedRequests], asked_at: float) -> None:
        """Record the requests that run while nobody reads them, as the schedulers reported when asked at `asked_at`."""
        self._unread = {}
        for item in detached:
            self._unread.setdefault(item.client, set()).update(item.request_ids)
        for client, left in list(self._left.items()):
            kept = {request_id: at for request_id, at in left.items() if at + _LEAVE_S > asked_at}
            if kept:
                self._left[client] = kept
            else:
                del self._left[client]

    def charge(self, client: str, prompt: int, output: int) -> None:
        account = self._accounts[client]
        account.charge(prompt + output)
        self._report(client, account, num_tokens=prompt + output)
        counts = self._counts.get(client)
        if counts is None:  # looking up the labels takes longer than counting, and outputs are counted token by token
            counts = self._tokens.labels(client, "prompt"), self._tokens.labels(client, "output")
            self._counts[client] = counts
        if prompt:
            counts[0].inc(prompt)
        if output:
            counts[1].inc(output)

    def usage(self) -> list[status_pb2.ClientUsage]:
        """Return the usage at this router, to be reported to the others."""
        return self._reports.own()

    def learn(self, routers: Iterable[status_pb2.RouterStatus]) -> None:
        """Count the usage that other routers have reported."""
        for client, seen in self._reports.learn(routers):
            if client in self._accounts:
                self._accounts[client].take(seen)

    def _report(self, client: str, account: Account, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        # A client that has lost its quota is reported until its requests have ended.
        if account.is_limited or self._reports.has(client):
            self._reports.count(
                client, num_running=account.num_running, num_requests=num_requests, num_tokens=num_tokens
            )

    def _account(self, caller: Caller) -> Account:
        account = self._accounts.get(caller.name)
        if account is None:
            account = Account(caller.name, caller.quota, self._clock, self._reports.seen(caller.name))
            self._accounts[caller.name] = account
        elif account.quota != caller.quota:
            account.change(caller.quota, self._reports.seen(caller.name))
        return account
