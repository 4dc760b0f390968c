"""The synchronous client, which runs the asynchronous one in a background thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from midstream.chunk import Chunk
from midstream.client.async_client import AsyncClient
from midstream.client.background_loop import BackgroundLoop
from midstream.client.result import Result
from midstream.client.stream import AsyncStream

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Stream:
    """The output of a request: iterate over its chunks, or call `result()`; see AsyncStream."""

    def __init__(self, stream: AsyncStream, loop: BackgroundLoop) -> None:
        self._stream = stream
        self._loop = loop
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self._loop.run(_next(self._stream))) is not None:
                yield chunk
        finally:
            # This does not wait, because the garbage collector may end an abandoned iteration in the loop's own thread.
            self.cancel()

    def result(self) -> Result:
        """Wait for the end of the request and return its output, except chunks that were already read."""
        return self._loop.run(self._stream.result())

    def text(self) -> str:
        """Wait for the end of the request and return the text of the first sequence."""
        return self.result().text

    def cancel(self) -> None:
        """Leave the stream; the request is aborted unless it is detached."""
        self._loop.post(self._stream.cancel)


def _streaming(
    method: Callable[Concatenate[AsyncClient, _P], AsyncStream],
) -> Callable[Concatenate[Client, _P], Stream]:
    @functools.wraps(method)
    def call(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Stream:
        return Stream(method(client._client, *args, **kwargs), client._loop)

    return call


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @functools.wraps(method)
    def call(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return client._loop.run(method(client._client, *args, **kwargs))

    return call


class Client:
    """Talks to the routers of a service; use it as a context manager. Its methods are those of AsyncClient."""

    generate = _streaming(AsyncClient.generate)
    resume = _streaming(AsyncClient.resume)
    stream = _streaming(AsyncClient.stream)
    embed = _blocking(AsyncClient.embed)
    abort = _blocking(AsyncClient.abort)
    receipt = _blocking(AsyncClient.receipt)
    receipt_keys = _blocking(AsyncClient.receipt_keys)
    model_info = _blocking(AsyncClient.model_info)
    server_info = _blocking(AsyncClient.server_info)
    loads = _blocking(AsyncClient.loads)
    request_stats = _blocking(AsyncClient.request_stats)
    load_lora = _blocking(AsyncClient.load_lora)
    unload_lora = _blocking(AsyncClient.unload_lora)
    loras = _blocking(AsyncClient.loras)
    update_weights = _blocking(AsyncClient.update_weights)
    weights = _blocking(AsyncClient.weights)
    pause_generation = _blocking(AsyncClient.pause_generation)
    resume_generation = _blocking(AsyncClient.resume_generation)
    sleep = _blocking(AsyncClient.sleep)
    wake_up = _blocking(AsyncClient.wake_up)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of AsyncClient."""
        self._loop = BackgroundLoop("client")
        try:
            self._client = self._loop.run(_open(args, kwargs))
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the background thread; calls in progress raise AbortedError."""
        self._loop.close(self._client.close())

    def iteration_stats(self) -> list[dict[str, object]]:
        """Return the latest iteration's statistics, one entry per cell."""
        return self._loop.run(_collect(self._client))


async def _open(args: Any, kwargs: Any) -> AsyncClient:
    # Channels belong to the event loop on which they were created.
    return AsyncClient(*args, **kwargs)


async def _next(stream: AsyncStream) -> Chunk | None:
    # A future cannot carry StopAsyncIteration.
    return await anext(stream, None)


async def _collect(client: AsyncClient) -> list[dict[str, object]]:
    return [stats async for stats in client.iteration_stats()]
