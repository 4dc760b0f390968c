"""The synchronous client, which runs the asynchronous one in a background thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from midstream.chunk import Chunk
from midstream.client.async_client import AsyncClient
from midstream.client.result import Result
from midstream.client.stream import AsyncStream

_T = TypeVar("_T")
_P = ParamSpec("_P")


class Stream:
    """The output of a request: iterate over its chunks, or call `result()`; see AsyncStream."""

    def __init__(self, stream: AsyncStream, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._stream = stream
        self._run = run
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while (chunk := self._run(_next(self._stream))) is not None:
                yield chunk
        finally:
            self._run(_cancel(self._stream))

    def result(self) -> Result:
        """Wait for the end of the request and return its complete output."""
        result: Result = self._run(self._stream.result())
        return result

    def text(self) -> str:
        """Wait for the end of the request and return the text of the first sequence."""
        return self.result().text

    def cancel(self) -> None:
        """Leave the stream; the request is aborted unless it is detached."""
        self._run(_cancel(self._stream))


def _streaming(
    method: Callable[Concatenate[AsyncClient, _P], AsyncStream],
) -> Callable[Concatenate[Client, _P], Stream]:
    @functools.wraps(method)
    def call(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Stream:
        return Stream(method(client._client, *args, **kwargs), client._run)

    return call


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Client, _P], _T]:
    @functools.wraps(method)
    def call(client: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return client._run(method(client._client, *args, **kwargs))

    return call


class Client:
    """Talks to the routers of a service; use it as a context manager. Its methods are those of AsyncClient."""

    generate = _streaming(AsyncClient.generate)
    resume = _streaming(AsyncClient.resume)
    stream = _streaming(AsyncClient.stream)
    embed = _blocking(AsyncClient.embed)
    abort = _blocking(AsyncClient.abort)
    model_info = _blocking(AsyncClient.model_info)
    server_info = _blocking(AsyncClient.server_info)
    loads = _blocking(AsyncClient.loads)
    request_stats = _blocking(AsyncClient.request_stats)
    load_lora = _blocking(AsyncClient.load_lora)
    unload_lora = _blocking(AsyncClient.unload_lora)
    loras = _blocking(AsyncClient.loras)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of AsyncClient."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="midstream-client", daemon=True)
        self._thread.start()
        self._client: AsyncClient = self._run(_open(args, kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the background thread."""
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def iteration_stats(self) -> list[dict[str, object]]:
        """Return the latest iteration's statistics, one entry per cell."""
        return self._run(_collect(self._client))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _open(args: Any, kwargs: Any) -> AsyncClient:
    # Channels belong to the event loop on which they were created.
    return AsyncClient(*args, **kwargs)


async def _next(stream: AsyncStream) -> Chunk | None:
    # A future cannot carry StopAsyncIteration.
    return await anext(stream, None)


async def _cancel(stream: AsyncStream) -> None:
    stream.cancel()


async def _collect(client: AsyncClient) -> list[dict[str, object]]:
    return [stats async for stats in client.iteration_stats()]
