"""The queue of requests that wait for a worker group: by priority, then fair between clients, then in order of arrival.

Clients share by start-time fair queueing: each has a virtual time that grows with the tokens it is charged for, and the
client that is furthest behind is served next. A client that comes back after a while starts at the present, so that
nobody saves up. Requests that ran before (paused, or rebuilt after a worker's loss) come first and are not charged
again.

The head is served before anything behind it, also when something smaller would fit: large requests are not starved.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import overload

from scheduler.core.request import Request


class _Client:
    """One client's requests of one priority."""

    __slots__ = ("requests", "virtual_time")

    def __init__(self, virtual_time: float) -> None:
        self.virtual_time = virtual_time
        self.requests: deque[Request] = deque()


class _FairQueue:
    """Requests of one priority. Those removed from the middle stay in place until they come up."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        # (virtual time, ordinal of the oldest request, client); an entry of another virtual time than its client's is
        # old.
        self._heap: list[tuple[float, int, str]] = []
        self._now = 0.0

    def push(self, request: Request) -> None:
        client = self._clients.get(request.spec.client_id)
        if client is None:
            client = self._clients[request.spec.client_id] = _Client(self._now)
        client.requests.append(request)
        if len(client.requests) == 1:
            client.virtual_time = max(client.virtual_time, self._now)
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

    def pop_head(self) -> None:
        virtual_time, _, client_id = heapq.heappop(self._heap)
        client = self._clients[client_id]
        request = client.requests.popleft()
        self._now = max(self._now, virtual_time)
        client.virtual_time = virtual_time + charge(request)
        if client.requests:
            self._enter(client)
        elif not self._heap:
            self._clients.clear()  # nobody waits, so nobody is behind
        if len(self._clients) > 2 * len(self._heap) + 64:
            self._forget_idle_clients()

    def charge(self, request: Request) -> None:
        """Charge the client for a request that was taken from the middle."""
        client = self._clients[request.spec.client_id]
        client.virtual_time += charge(request)
        if client.requests:
            self._enter(client)

    def _forget_idle_clients(self) -> None:
        """Those that the others have caught up with begin at the present, as everybody new does."""
        for client_id, client in list(self._clients.items()):
            if not client.requests and client.virtual_time <= self._now:
                del self._clients[client_id]

    def refund(self, client_id: str, amount: float) -> None:
        client = self._clients.get(client_id)
        if client is not None and amount > 0:
            client.virtual_time = max(client.virtual_time - amount, self._now)
            if client.requests:
                self._enter(client)

    def _enter(self, client: _Client) -> None:
        oldest = client.requests[0]
        heapq.heappush(self._heap, (client.virtual_time, oldest.ordinal, oldest.spec.client_id))


def charge(request: Request) -> float:
    """Tokens that a request's start is charged for; what it does not use is given back at its end."""
    return float(len(request.spec.prompt) + request.spec.max_tokens * request.spec.num_sequences)


class RequestQueue:
    """Bounded for newcomers; requests that ran before are always taken back."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.num_tokens = 0  # known tokens that wait to be computed
        self._waiting: dict[Request, int] = {}
        self._returned: list[tuple[tuple[int, int], Request]] = []
        self._ran_before: set[Request] = set()
        self._fair: dict[int, _FairQueue] = {}
        self._priorities: list[int] = []  # highest first

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def is_full(self) -> bool:
        """Newcomers are refused."""
        return len(self._waiting) >= self.max_size

    def push(self, request: Request) -> None:
        """Adds a newcomer."""
        self._add(request)
        priority = request.spec.priority
        if priority not in self._fair:
            self._fair[priority] = _FairQueue()
            self._priorities = sorted(self._fair, reverse=True)
        self._fair[priority].push(request)

    def put_back(self, request: Request) -> None:
        """Adds a request that ran before; it goes before all newcomers of its priority."""
        self._add(request)
        self._ran_before.add(request)
        heapq.heappush(self._returned, (request.order, request))

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        self.num_tokens -= self._waiting.pop(request)
        self._ran_before.discard(request)

    def head(self) -> Request | None:
        """The request to serve next."""
        while self._returned and self._returned[0][1] not in self._waiting:
            heapq.heappop(self._returned)
        returned = self._returned[0][1] if self._returned else None
        newcomer = self._head_newcomer()
        if returned is None or newcomer is None:
            return returned or newcomer
        return returned if returned.spec.priority >= newcomer.spec.priority else newcomer

    @property
    def ordered(self) -> WaitingRequests:
        """All that wait, most urgent first: by priority, what ran before, then in order of arrival."""
        return WaitingRequests(self)

    def pop(self, request: Request) -> None:
        """Take a request to serve it, and charge its client unless it ran before."""
        if request is self.head():
            self.remove(request)
            if self._returned and self._returned[0][1] is request:
                heapq.heappop(self._returned)
            else:
                self._fair[request.spec.priority].pop_head()
            return
        ran_before = request in self._ran_before
        self.remove(request)
        if not ran_before:
            self._fair[request.spec.priority].charge(request)

    def urgency(self, request: Request) -> tuple[int, bool, int]:
        """Sorts waiting requests."""
        return (-request.spec.priority, request not in self._ran_before, request.ordinal)

    def refund(self, request: Request, num_tokens: int) -> None:
        """Gives back what a request was charged for and did not use."""
        queue = self._fair.get(request.spec.priority)
        if queue is not None:
            queue.refund(request.spec.client_id, float(num_tokens))

    def _add(self, request: Request) -> None:
        num_tokens = sum(sequence.num_tokens for sequence in request.running_sequences)
        self._waiting[request] = num_tokens
        self.num_tokens += num_tokens

    def _head_newcomer(self) -> Request | None:
        for priority in self._priorities:
            head = self._fair[priority].head(self._waiting)
            if head is not None:
                return head
        return None


class WaitingRequests(Sequence[Request]):
    """The requests of a queue by urgency, sorted when they are first looked at."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._sorted: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._queue)

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
            self._sorted = sorted(self._queue, key=self._queue.urgency)
        return self._sorted
