"""One feed carries many streams: an error in one does not affect the others, and the first tokens of a stream overtake
tokens of other streams.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from detokenizer.feed import FeedPool, SchedulerFeed
from detokenizer.streams import OutputStream, RouterConnection
from midstream.errors import ExecutionError
from midstream.rpc.frame_link import LinkSettings
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
    pool = FeedPool("127.0.0.1:1", "d", (2,), LinkSettings(1 << 20), lambda _: None)
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
    pool = FeedPool("127.0.0.1:1", "d", (2,), LinkSettings(1 << 20), lambda _: None)
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


async def test_first_tokens_are_sent_before_the_next_batch_of_the_same_read() -> None:
    pool = FeedPool("127.0.0.1:1", "d", (2,), LinkSettings(1 << 20), lambda _: None)
    feed = SchedulerFeed(pool, "127.0.0.1:1", "d", (2,))
    feed.is_open, feed._connection = True, Mock()
    pump, decoders = Mock(), Mock()
    router = RouterConnection(lambda: pool.wake_router(pump), lambda _: None)
    streams = [OutputStream(number, f"r{number}", number, 0, (), router, decoders, 1 << 20) for number in (1, 2)]
    pump.run.side_effect = router.collect
    for stream in streams:
        feed.attach(stream)

    feed.take(pb.FeedBatch(opened=[opened(1), opened(2)]))
    feed.take(pb.FeedBatch(streams=[1], token_offsets=[0], token_ids=[7]))
    assert pump.run.call_count == 1
    feed.take(pb.FeedBatch(streams=[1], token_offsets=[1], token_ids=[8]))
    assert pump.run.call_count == 1
    feed.take(pb.FeedBatch(streams=[2], token_offsets=[0], token_ids=[9]))
    assert pump.run.call_count == 2
    feed.take(pb.FeedBatch(streams=[1, 2], token_offsets=[2, 1], token_ids=[8, 9]))
    assert pump.run.call_count == 2
    feed._finish_read()
    assert pump.run.call_count == 3
