"""The first tokens of requests are sent to the detokenizer before the other tokens of a step, and batches are limited
in size.
"""

from __future__ import annotations

from array import array

import pytest

from midstream.clock import SteadyClock
from protos import generation_pb2, scheduler_pb2
from scheduler.core.effects import Accepted, Emitted, KindSet, RequestForgotten
from scheduler.core.kind import Kind
from scheduler.core.request import Request
from scheduler.core.request_spec import RequestSpec
from scheduler.edge import feed_batch
from scheduler.edge.feed import DetokenizerFeed, FeedHub


class Streams:
    """Requests whose tokens one detokenizer reads; request i is stream i."""

    def __init__(self, num_requests: int, num_prompt_tokens: int = 1, payload: bytes = b"") -> None:
        self.hub = FeedHub(1, lambda _: None, lambda _: None, SteadyClock())
        self.feed: DetokenizerFeed = self.hub.connect("d", lambda: None)
        self.requests = [
            Request(
                RequestSpec(
                    request_id=f"r{number}", prompt=array("I", [1]) * num_prompt_tokens, max_tokens=9, payload=payload
                ),
                number,
            )
            for number in range(num_requests)
        ]
        for number, request in enumerate(self.requests):
            self.hub.publish([Accepted(request, is_attached=False)])
            self.feed.attach(number, request.request_id)

    def step(self, *numbers: int) -> list[list[int]]:
        """Publish one token of each of these requests; return the streams in each batch that the feed then sends."""
        sequences = [self.requests[number].sequences[0] for number in numbers]
        for sequence in sequences:
            sequence.output.append(len(sequence.output))
        self.hub.publish([Emitted(sequences, [len(sequence.output) for sequence in sequences])])
        return [list(batch.streams) for batch in self.collect()]

    def collect(self) -> list[scheduler_pb2.FeedBatch]:
        """Return the batches that the feed would send now."""
        return list(iter(self.feed.collect, None))


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


def test_prompts_that_begin_the_output_count_as_tokens_of_a_batch() -> None:
    """A new feed opens all requests at once, and the detokenizer would reject a batch that is too large."""
    output = generation_pb2.OutputConfig(exclude_input_from_output=False)
    payload = generation_pb2.GenerateRequest(output=output).SerializeToString()
    batches = Streams(5, 40_000, payload).collect()
    opened = [[(item.stream, len(item.prompt_token_ids)) for item in batch.opened] for batch in batches]
    assert opened == [[(0, 40_000), (1, 40_000)], [(2, 40_000), (3, 40_000)], [(4, 40_000)]]


def test_all_fields_of_opened_requests_count_as_bytes_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_batch, "MAX_BYTES", 1000)
    stopping = generation_pb2.StoppingConfig(stop_words=["x" * 100] * 6)
    payload = generation_pb2.GenerateRequest(stopping=stopping).SerializeToString()
    opened = [[item.stream for item in batch.opened] for batch in Streams(5, payload=payload).collect()]
    assert opened == [[0, 1], [2, 3], [4]]


def test_a_committed_change_of_kind_precedes_the_next_token_and_is_repeated_on_each_attachment() -> None:
    streams = Streams(1)
    streams.step(0)
    kind = Kind("print", "", "int8")
    streams.hub.publish([KindSet(streams.requests[0], kind)])
    streams.step(0)
    streams.hub.publish([KindSet(streams.requests[0], kind, (2,), has_changed=True)])
    assert streams.collect() == []
    streams.requests[0].sequences[0].output.append(5)
    streams.hub.publish([Emitted(streams.requests[0].sequences, [3])])
    (batch,) = streams.collect()
    assert [(item.stream, list(item.changed_at)) for item in batch.kind_changes] == [(0, [2])]
    assert list(batch.token_ids) == [5]
    streams.requests[0].sequences[0].output.append(6)
    streams.hub.publish([Emitted(streams.requests[0].sequences, [4])])
    assert [list(batch.kind_changes) for batch in streams.collect()] == [[]]
    streams.feed.attach(7, "r0")
    (batch,) = streams.collect()
    assert [(item.stream, list(item.changed_at)) for item in batch.kind_changes] == [(7, [2])]


def test_a_reader_that_comes_while_its_request_is_forgotten_is_told_that_it_is_unknown() -> None:
    """The core has forgotten the request, but that is not committed yet, so the feed still knows it."""
    streams = Streams(2)
    streams.step(0, 1)
    streams.feed.attach(7, "r0")
    streams.hub.publish([RequestForgotten(streams.requests[0])])
    streams.requests[0].release_sequences()
    (batch,) = streams.collect()
    assert [(item.stream, item.error.code) for item in batch.opened] == [(0, 5), (7, 5)]
    assert streams.step(1) == [[1]]


def test_a_detokenizer_with_another_tokenizer_is_refused() -> None:
    streams = Streams(0)
    spec = RequestSpec(request_id="a", prompt=array("I", [1]), max_tokens=9, tokenizer_fingerprint="one")
    streams.hub.publish([Accepted(Request(spec, 0), is_attached=False)])
    other = streams.hub.connect("other", lambda: None, tokenizer_fingerprint="two")
    same = streams.hub.connect("same", lambda: None, tokenizer_fingerprint="one")
    for feed in (streams.feed, other, same):
        feed.attach(1, "a")
    assert [feed.num_attached for feed in (streams.feed, other, same)] == [0, 0, 1]
    batch = other.collect()
    assert batch is not None
    (opened,) = batch.opened
    assert (opened.error.field, "'other' has another tokenizer" in opened.error.message) == (
        "tokenizer_fingerprint",
        True,
    )
