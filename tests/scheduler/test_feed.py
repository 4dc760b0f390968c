"""First tokens are sent to the detokenizer before the other tokens of their step."""

from __future__ import annotations

from array import array

from midstream.clock import SteadyClock
from scheduler.core.effects import Accepted, Emitted
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec
from scheduler.edge.feed import DetokenizerFeed, FeedHub


class Streams:
    """Requests whose tokens one detokenizer reads; request i is stream i."""

    def __init__(self, num_requests: int) -> None:
        self.hub = FeedHub(1, lambda _: None, lambda _: None, SteadyClock())
        self.feed: DetokenizerFeed = self.hub.connect("d", lambda: None)
        self.requests = [
            Request(RequestSpec(request_id=f"r{number}", prompt=array("I", [1]), max_tokens=9), number)
            for number in range(num_requests)
        ]
        for number, request in enumerate(self.requests):
            self.hub.publish([Accepted(request, is_attached=False)])
            self.feed.attach(number, request.request_id)

    def step(self, *numbers: int) -> list[list[int]]:
        """Publish a token of each of these requests; return the streams of each batch that is then sent."""
        sequences = [self.requests[number].sequences[0] for number in numbers]
        for sequence in sequences:
            sequence.output.append(len(sequence.output))
        self.hub.publish([Emitted(sequences, [len(sequence.output) for sequence in sequences])])
        sent = []
        while (batch := self.feed.collect()) is not None:
            sent.append(list(batch.streams))
        return sent


def test_first_tokens_have_a_batch_of_their_own() -> None:
    streams = Streams(4)
    assert streams.step(0, 1) == [[0, 1]]
    assert streams.step(2, 0, 1) == [[2], [0, 1]]
    assert streams.step(0, 1, 2) == [[0, 1, 2]]
    assert streams.step(3, 0, 1, 2) == [[3], [0, 1, 2]]


def test_streams_without_tokens_need_no_batch_of_their_own() -> None:
    streams = Streams(2)
    streams.step(0)
    streams.feed.detach(1)
    streams.feed.attach(1, "r1")
    assert streams.step(0) == [[0]]
