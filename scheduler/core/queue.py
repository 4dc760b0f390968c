"""The queue of requests that wait for a worker group: ordered by priority, fair between clients, then by arrival.

Clients share capacity by start-time fair queueing: each has a virtual time that grows with its charges, and the client
with the lowest virtual time is served next. A request is charged for the KV cache that it may hold: the blocks of all
its rows, in tokens. A client that returns after idling starts at the current virtual time, so idle clients accumulate
no credit; debt is kept, even while the queue is empty. Requests that ran before (paused, or rebuilt after a worker's
loss) come first and are not charged again.

A request with several sequences may start in parts: it stays in the queue, charged for those that started, until the
last of them starts.

A request that its worker could not run yet is held: it waits like the others, but cannot start before a given time. If
it has no output, its client is charged both for the wasted computation and for the next start: otherwise requests that
are often held, such as those with a new grammar, would keep other clients waiting.

A client's requests start in order of arrival, except that smaller ones may start before its oldest request while that
one waits for capacity, until they have been charged as much as it costs. Many users may share one client id, or have
none. Placement decides which requests may start before a waiting head of another client.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import overload

from scheduler.core.request import Request

# Number of idle clients to remember, in addition to two per waiting request.
_MAX_IDLE_CLIENTS = 64
# Number of a client's next requests to search for smaller ones that may overtake its oldest request.
_MAX_SEARCHED = 32
# Number of stale entries (of requests that no longer wait) to keep, in addition to one per waiting request.
_MAX_REMOVED = 64


class _Client:
    """The waiting requests of one client with one priority. Up to `num_removed` of them no longer wait."""

    __slots__ = ("num_removed", "requests", "virtual_time")

    def __init__(self, virtual_time: float) -> None:
        self.virtual_time = virtual_time
        self.num_removed = 0
        self.requests: deque[Request] = deque()


class _FairQueue:
    """Requests of one priority. Requests removed from the middle stay in their lists until they reach the head."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        # (virtual time, ordinal of the oldest request, client); an entry is stale if its virtual time is not the
        # client's.
        self._heap: list[tuple[float, int, str]] = []
        self._now = 0.0

    def push(self, request: Request, *, is_first: bool = False) -> None:
        """Append a request to its client's queue, or prepend it if `is_first`."""
        client = self._clients.get(request.spec.client_id)
        if client is None:
            client = self._clients[request.spec.client_id] = _Client(self._now)
        if not client.requests:
            client.virtual_time = max(client.virtual_time, self._now)
        if is_first:
            client.requests.appendleft(request)
        else:
            client.requests.append(request)
        if client.requests[0] is request:
            self._enter(client)

    def head(self, waiting: dict[Request, int]) -> Request | None:
        while self._heap:
            virtual_time, _, client_id = self._heap[0]
            client = self._clients.get(client_id)
            if client is not None and client.virtual_time == virtual_time:
                while client.requests and client.requests[0] not in waiting:
                    client.requests.popleft()
                if client.requests:
                    return client.requests[0]
            heapq.heappop(self._heap)
        return None

    def next_heads(self, waiting: dict[Request, int], most: int) -> list[Request]:
        """Return the first requests of the next clients to serve, in order; at most `most`."""
        heads: list[Request] = []
        entries: list[tuple[float, int, str]] = []
        while len(heads) < most and (head := self.head(waiting)) is not None:
            entry = heapq.heappop(self._heap)
            if head not in heads:
                entries.append(entry)
                heads.append(head)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return heads

    def oldest(self, client_id: str, waiting: dict[Request, int]) -> Request | None:
        """Return the client's request that is to start next, or None."""
        return next((request for request in self._clients[client_id].requests if request in waiting), None)

    def next_of(self, head: Request, waiting: dict[Request, int]) -> list[Request]:
        """Return the next requests of a head's client, in order."""
        requests = self._clients[head.spec.client_id].requests
        following = (requests[place] for place in range(1, min(len(requests), 1 + _MAX_SEARCHED)))
        return [request for request in following if request in waiting]

    def tag(self, client_id: str) -> float:
        """Return the client's virtual time, by which clients are ordered."""
        return self._clients[client_id].virtual_time

    def withdraw(self, request: Request) -> None:
        """Remove a request from any position."""
        self._clients[request.spec.client_id].requests.remove(request)

    def note_removed(self, request: Request, waiting: dict[Request, int]) -> None:
        """Record that a request no longer waits; delete the entries of such requests once they outnumber the others."""
        client = self._clients[request.spec.client_id]
        client.num_removed += 1
        if client.num_removed > len(client.requests) // 2 + _MAX_REMOVED:
            client.requests = deque(other for other in client.requests if other in waiting)
            client.num_removed = 0

    def charge(self, client_id: str, cost: float) -> None:
        """Charge a client for a request that has started: the client's first waiting request, or one that a policy
        selected.
        """
        client = self._clients[client_id]
        self._now = max(self._now, client.virtual_time)
        client.virtual_time += cost  # its entry in the heap is stale now
        if client.requests:
            self._enter(client)
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        if len(self._clients) > 2 * len(self._heap) + _MAX_IDLE_CLIENTS:
            self._forget_idle_clients()

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        client = self._clients.get(entry[2])
        return client is not None and client.virtual_time == entry[0] and bool(client.requests)

    def _forget_idle_clients(self) -> None:
        """Forget idle clients without debt, then those with the least debt; they restart at the current virtual
        time.
        """
        idle = sorted((client.virtual_time, name) for name, client in self._clients.items() if not client.requests)
        for place, (virtual_time, name) in enumerate(idle):
            if virtual_time > self._now and place >= len(idle) - _MAX_IDLE_CLIENTS // 2:
                break
            del self._clients[name]

    def refund(self, client_id: str, amount: float) -> None:
        client = self._clients.get(client_id)
        if client is not None and amount > 0:
            client.virtual_time = max(client.virtual_time - amount, self._now)
            if client.requests:
                self._enter(client)

    def _enter(self, client: _Client) -> None:
        oldest = client.requests[0]
        heapq.heappush(self._heap, (client.virtual_time, oldest.ordinal, oldest.spec.client_id))


def charge(request: Request, tokens_per_block: int, num_rows: int, num_output_tokens: int | None = None) -> float:
    """Return the amount of KV cache, in tokens of whole blocks, that `num_rows` rows of a request hold.

    The rows share the full blocks of the prompt. Each has `num_output_tokens` output tokens, by default the maximum.
    """
    if num_rows == 0:
        return 0.0
    spec = request.spec
    num_tokens = len(spec.prompt) + (spec.max_tokens if num_output_tokens is None else num_output_tokens)
    each, shared = -(-num_tokens // tokens_per_block), (len(spec.prompt) - 1) // tokens_per_block
    return float((each + (num_rows - 1) * (each - shared)) * tokens_per_block)


class RequestQueue:
    """A queue with a limit on new requests; requests that ran before are always accepted."""

    def __init__(self, max_size: int, tokens_per_block: int = 1) -> None:
        self.max_size = max_size
        self._tokens_per_block = tokens_per_block
        self.num_tokens = 0  # known tokens waiting to be computed
        self._waiting: dict[Request, int] = {}
        # By urgency; requests taken in the meantime stay in place until they reach the head.
        self._returned: list[tuple[tuple[int, int], int, Request]] = []
        self._num_returned = 0
        self._returned_requests: set[Request] = set()
        self._held: dict[Request, int] = {}  # the time from which each request may start
        self._fair: dict[int, _FairQueue] = {}
        self._priorities: list[int] = []  # highest first
        self._num_charged: dict[Request, int] = {}  # rows charged to each request; removed when it ends
        # What requests that overtook a waiting request of their client were charged.
        self._overtaken: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def is_full(self) -> bool:
        """Whether new requests are rejected."""
        return len(self._waiting) >= self.max_size

    def push(self, request: Request) -> None:
        self._add(request)
        self._fair_queue(request.spec.priority).push(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that ran before; if a part of it is still queued, the whole request is queued anew.

        It is placed before all new requests of its priority.
        """
        self._add_again(request)
        self._return(request)

    def hold(self, request: Request, until_ns: int) -> None:
        """Queue a request that its worker could not run. It may start once `release_due` is called with this time."""
        self._add_again(request)
        if not _has_output(request):
            self.settle(request)
        self._held[request] = until_ns

    def release_due(self, now_ns: int) -> None:
        """Allow held requests to start if their time has come."""
        due = [request for request, until_ns in self._held.items() if until_ns <= now_ns]
        for request in sorted(due, key=lambda request: request.ordinal, reverse=True):  # the oldest becomes the first
            self.release(request)

    def release(self, request: Request) -> None:
        """Allow a held request to start."""
        del self._held[request]
        if _has_output(request):
            self._return(request)
        else:
            self._fair_queue(request.spec.priority).push(request, is_first=True)

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        self.num_tokens -= self._waiting.pop(request)
        self._overtaken.pop(request, None)
        if request in self._held:
            del self._held[request]
        elif request in self._returned_requests:
            self._returned_requests.discard(request)
            self._forget_returned()
        elif request in self._num_charged:  # the request may be put back before its entry here reaches the head
            self._fair[request.spec.priority].withdraw(request)
        else:
            self._fair[request.spec.priority].note_removed(request, self._waiting)

    def _forget_returned(self) -> None:
        """Delete the entries of requests that were removed or started, once they outnumber the others."""
        if len(self._returned) > 2 * len(self._returned_requests) + _MAX_REMOVED:
            entries = {entry[2]: entry for entry in self._returned if entry[2] in self._returned_requests}
            self._returned = list(entries.values())
            heapq.heapify(self._returned)

    def head(self) -> Request | None:
        """Return the request to serve next, or None."""
        while self._returned and self._returned[0][2] not in self._returned_requests:
            heapq.heappop(self._returned)
        returned = self._returned[0][2] if self._returned else None
        newcomer = self._head_newcomer()
        if returned is None or newcomer is None:
            return returned or newcomer
        return returned if returned.spec.priority >= newcomer.spec.priority else newcomer

    @property
    def ordered(self) -> WaitingRequests:
        """Return all waiting requests that may start, most urgent first: by priority, then those that ran before, then
        by arrival.
        """
        return WaitingRequests(self)

    def take(self, request: Request, num_sequences: int) -> None:
        """Take waiting sequences of a request in order to start them, and charge its client if the request is new.

        The request leaves the queue with the last of its sequences.
        """
        is_newcomer, num_before = self.is_newcomer(request), self._num_charged.get(request, 0)
        is_whole = num_sequences == len(request.waiting_sequences)
        if is_newcomer:
            num_rows = request.spec.num_rows if is_whole else num_before + num_sequences
            self._num_charged[request] = num_rows
            cost = self._charge(request, num_rows) - self._charge(request, num_before)
            queue = self._fair[request.spec.priority]
            oldest = queue.oldest(request.spec.client_id, self._waiting)
            if oldest is not None and oldest is not request:
                self._overtaken[oldest] = self._overtaken.get(oldest, 0.0) + cost
            if is_whole:
                queue.withdraw(request)
            queue.charge(request.spec.client_id, cost)
        if is_whole:
            self.num_tokens -= self._waiting.pop(request)
            self._overtaken.pop(request, None)
            if request in self._returned_requests:
                self._returned_requests.discard(request)
                self._forget_returned()
            self._held.pop(request, None)
            return
        num_tokens = sum(sequence.num_tokens for sequence in request.waiting_sequences[num_sequences:])
        self.num_tokens += num_tokens - self._waiting[request]
        self._waiting[request] = num_tokens

    def _charge(self, request: Request, num_rows: int, num_output_tokens: int | None = None) -> float:
        return charge(request, self._tokens_per_block, num_rows, num_output_tokens)

    def urgency(self, request: Request) -> tuple[int, bool, int]:
        """Return the sort key of a waiting request."""
        return (-request.spec.priority, request not in self._returned_requests, request.ordinal)

    def settle(self, request: Request) -> None:
        """Refund the unused part of a request's charge when it ends."""
        num_rows = self._num_charged.pop(request, 0)
        if num_rows:
            longest = max(len(sequence.output) for sequence in request.sequences)
            unused = self._charge(request, num_rows) - self._charge(request, num_rows, longest)
            self._fair[request.spec.priority].refund(request.spec.client_id, unused)

    def behind(self, head: Request, most: int) -> list[Request]:
        """Return up to `most` requests after the head: requests that ran before, and the first request of each
        client.
        """
        returned = (item for _, _, item in heapq.nsmallest(2 * most, self._returned))
        candidates = [item for item in dict.fromkeys(returned) if item in self._returned_requests]
        for priority in self._priorities:
            if len(candidates) > most:
                break
            candidates += self._fair[priority].next_heads(self._waiting, most)
        candidates.sort(key=lambda request: -request.spec.priority)  # stable: those that ran before stay first
        return [request for request in candidates if request is not head][:most]

    def smallest_after(self, first: Request) -> Request | None:
        """Return the smallest of the next new requests of the client of `first`; None if there is none, or `first` is
        not itself a new request, and therefore not the first of its client.
        """
        if not self.is_newcomer(first):
            return None
        following = self._fair[first.spec.priority].next_of(first, self._waiting)
        return min(following, key=lambda request: self._charge(request, request.spec.num_rows), default=None)

    def allowance(self, request: Request, other: Request) -> float:
        """Return how much more the client of `other` may be charged before the client of `request` would also be
        served.

        Both are new requests and heads of their clients. A negative amount means that the client has already been
        charged more.
        """
        if request.spec.priority != other.spec.priority:
            return -1.0
        queue = self._fair[request.spec.priority]
        num_charged = self._num_charged.get(request, 0)
        cost = self._charge(request, request.spec.num_rows) - self._charge(request, num_charged)
        return queue.tag(request.spec.client_id) + cost - queue.tag(other.spec.client_id)

    def may_overtake_own(self, request: Request, other: Request) -> bool:
        """Return whether a request may start before an older one of its client, which waits for capacity."""
        are_newcomers = self.is_newcomer(request) and self.is_newcomer(other)
        if not are_newcomers or request.spec.priority != other.spec.priority:
            return False
        cost, other_cost = (self._charge(item, item.spec.num_rows) for item in (request, other))
        return cost < other_cost and self._overtaken.get(other, 0.0) + cost <= other_cost

    def is_newcomer(self, request: Request) -> bool:
        """Return whether a waiting request has never run."""
        return request not in self._returned_requests and request not in self._held

    def is_held(self, request: Request) -> bool:
        """Return whether a waiting request may not start yet."""
        return request in self._held

    def _fair_queue(self, priority: int) -> _FairQueue:
        if priority not in self._fair:
            self._fair[priority] = _FairQueue()
            self._priorities = sorted(self._fair, reverse=True)
        return self._fair[priority]

    def _add_again(self, request: Request) -> None:
        if request in self._waiting:
            has_place = request in self._held or request in self._returned_requests or request in self._num_charged
            if not has_place:  # the entry of a new request, which is deleted later, would be valid again
                self._fair[request.spec.priority].withdraw(request)
            self.remove(request)
        self._add(request)

    def _return(self, request: Request) -> None:
        self._returned_requests.add(request)
        self._num_returned += 1
        heapq.heappush(self._returned, (request.order, self._num_returned, request))

    def _add(self, request: Request) -> None:
        num_tokens = sum(sequence.num_tokens for sequence in request.waiting_sequences)
        self._waiting[request] = num_tokens
        self.num_tokens += num_tokens

    def _head_newcomer(self) -> Request | None:
        for priority in self._priorities:
            head = self._fair[priority].head(self._waiting)
            if head is not None:
                return head
        return None


def _has_output(request: Request) -> bool:
    return any(sequence.output for sequence in request.sequences)


class WaitingRequests(Sequence[Request]):
    """A queue's requests in order of urgency; they are sorted on first access."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._sorted: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._requests())

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests()[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests())

    def _requests(self) -> list[Request]:
        if self._sorted is None:
            self._sorted = sorted(
                (request for request in self._queue if not self._queue.is_held(request)), key=self._queue.urgency
            )
        return self._sorted
