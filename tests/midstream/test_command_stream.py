from __future__ import annotations

import asyncio

import grpc.aio

from midstream.rpc.command_stream import CommandStream


class Stream(CommandStream[bytes, bytes]):
    """One whose other side is lost at the very moment that it is to end."""

    def __init__(self) -> None:
        super().__init__("service", "127.0.0.1:1", 1 << 20, None, "")
        self.begins = asyncio.Event()

    def _call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        return channel.stream_stream("/a/b")()

    async def _begin(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        is_first = not self.begins.is_set()
        self.begins.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if is_first:
                raise TimeoutError from None
            raise

    def _take(self, batch: bytes) -> None:
        raise AssertionError

    def _lose(self) -> None:
        pass


async def test_a_stream_that_is_cancelled_as_it_breaks_ends() -> None:
    stream = Stream()
    running = asyncio.create_task(stream.run())
    await stream.begins.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=20)
    assert done
    assert running.cancelled()
