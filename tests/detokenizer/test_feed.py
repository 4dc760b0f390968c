"""One feed carries many streams; an error in one stream does not affect the others."""

from __future__ import annotations

from typing import Any

from detokenizer.feed import FeedPool, SchedulerFeed
from detokenizer.streams import OutputStream, RouterConnection
from midstream.errors import ExecutionError
from protos import generation_pb2
from protos import scheduler_pb2 as pb


def opened(stream: int) -> pb.FeedOpened:
    output = generation_pb2.OutputConfig(detokenize=False)
    return pb.FeedOpened(stream=stream, num_prompt_tokens=1, num_sequences=1, streaming=True, output=output)


def streams_of(feed: SchedulerFeed) -> list[OutputStream]:
    decoders: Any = None
    router = RouterConnection(lambda: None, lambda _: None)
    streams = [OutputStream(number, f"r{number}", number, 0, (), router, decoders, 1 << 20) for number in (1, 2)]
    for stream in streams:
        feed.attach(stream)
    return streams


async def test_an_error_in_tokens_fails_only_their_stream() -> None:
    pool = FeedPool("127.0.0.1:1", "d", (2,), 1 << 20, lambda _: None)
    feed = SchedulerFeed(pool, "127.0.0.1:1", "d", (2,))
    feed.is_open = True
    first, second = streams_of(feed)
    feed._take(pb.FeedBatch(opened=[opened(1), opened(2)]))
    first._sequences.append(None)  # type: ignore[arg-type]
    feed._take(pb.FeedBatch(streams=[1, 2], sequence_indices=[1, 0], token_offsets=[0, 0], token_ids=[7, 8]))
    assert isinstance(first.error, ExecutionError)
    assert second.error is None
    assert [list(chunk.token_ids) for chunk in second.take()] == [[8]]


async def test_an_invalid_tensor_fails_only_its_own_stream() -> None:
    tensor = generation_pb2.Tensor(name="t", dtype=77)  # type: ignore[arg-type]  # unknown
    bad = pb.FeedBatch(outputs=[pb.FeedOutputs(stream=1, tensors=[tensor])])
    pool = FeedPool("127.0.0.1:1", "d", (2,), 1 << 20, lambda _: None)
    feed = SchedulerFeed(pool, "127.0.0.1:1", "d", (2,))
    feed.is_open = True
    first, second = streams_of(feed)
    feed._take(pb.FeedBatch(opened=[opened(1), opened(2)]))
    bad.streams.extend([2])
    bad.token_offsets.extend([0])
    bad.token_ids.extend([7])
    feed._take(bad)
    assert isinstance(first.error, ExecutionError)
    assert second.error is None
    assert [list(chunk.token_ids) for chunk in second.take()] == [[7]]
