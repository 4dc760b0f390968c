"""Replace this process's clock, random numbers and transports with simulated ones."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.routing import Route

import detokenizer.__main__
import midstream.rpc.http2.server
import router.__main__
import scheduler.journal.log_folder
import scheduler.journal.threaded
import scheduler.service
from midstream.model.folder import ModelFolder
from midstream.rpc.local_connection import LocalConnection
from tests.simulation import http2_client, sockets, threads, zmq_transport
from tests.simulation.journal import JournalDisk, WeightsDocuments
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import END_ID, VOCAB_SIZE, decoders, fingerprint
from tests.simulation.network import Network, running

_MONOTONIC_OFFSET_S = 1_000.0


def folder(tokenizer: str = "") -> ModelFolder:
    """Return the served model folder, or one with another tokenizer."""
    return ModelFolder(
        path=Path("/nowhere"),
        name="simulated",
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        num_layers=1,
        max_sequence_length=1024,
        end_ids=(END_ID,),
        pad_id=None,
        bos_id=None,
        chat_template=None,
        fingerprint=fingerprint(),
        weights_format="gguf",
        weight_files=(),
        config={},
        tokenizer_fingerprint=f"tokenizer {tokenizer}",
    )


class _NoServer:
    """A stand-in for the HTTP server."""

    port = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> tuple[()]:
        return ()

    def stop(self, *_: object) -> Any:
        return _nothing()

    def close(self) -> None:
        """Do nothing, since there is no port to close."""

    def app(self) -> Starlette:
        return Starlette()

    def routes(self) -> list[Route]:
        return []


class _nothing:  # noqa: N801
    """Do nothing; callers may or may not await the result."""

    def __await__(self) -> Iterator[None]:
        return iter(())


class _Prompts:
    """A stand-in for prompt processing whose prompts are already token ids."""

    tokenizer = None

    def __init__(self, *_: object) -> None:
        pass

    async def token_ids(self, request: Any) -> list[int]:
        return list(request.token_ids.values)

    async def look_through(self, request: object, look: Callable[[], object]) -> object:
        return look()

    def close(self) -> None:
        pass


class ErrorLog(logging.Handler):
    """Errors logged by the components.

    Attributes:
        lines: All lines.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {_leaf(record.exc_info[1])!r}"
        self.lines.append(text)


def _leaf(error: BaseException) -> BaseException:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _sleep(sleep: Callable[[float], None]) -> Callable[[float], None]:
    """Return `time.sleep` for simulated threads as well as for others."""
    return lambda seconds: threads.current().wait(seconds) if threads.is_current() else sleep(seconds)


def _shown(network: Network) -> Callable[[LocalConnection, Message], None]:
    """Return `LocalConnection.send`, which also passes each message to the checker."""
    send = LocalConnection.send

    def send_shown(connection: LocalConnection, message: Message) -> None:
        network.on_write(connection, message)
        send(connection, message)

    return send_shown


@contextlib.contextmanager
def simulated(
    loop: VirtualLoop, network: Network, disk: JournalDisk, seed: int, make_engine: Any
) -> Iterator[ErrorLog]:
    """Replace all external input by simulated input within this context."""
    dice_state = random.getstate()
    random.seed(seed)
    errors, root = ErrorLog(), logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers[:] = [errors]
    root.setLevel(logging.ERROR)
    was_collecting = gc.isenabled()
    gc.disable()
    patches = [
        mock.patch.multiple(
            time,
            time=lambda: loop.unix_ns() / 1e9,
            time_ns=loop.unix_ns,
            monotonic=lambda: loop.now + _MONOTONIC_OFFSET_S,
            monotonic_ns=lambda: int((loop.now + _MONOTONIC_OFFSET_S) * 1e9),
            perf_counter=lambda: loop.now,
            sleep=_sleep(time.sleep),
        ),
        mock.patch("secrets.randbits", network.dice.getrandbits),
        mock.patch("midstream.telemetry.ProcessCollector"),
        mock.patch("grpc.aio.insecure_channel", lambda target, **_: http2_client.Channel(network, target)),
        mock.patch.object(LocalConnection, "send", _shown(network)),
        mock.patch.object(LocalConnection, "post", _shown(network)),
        mock.patch.multiple(midstream.rpc.http2.server, socket=loop.sockets.module),
        mock.patch("midstream.rpc.frames.TunnelTransport", partial(sockets.ShownTunnel, network)),
        mock.patch("zmq.asyncio.Context", partial(zmq_transport.Context, network)),
        mock.patch.multiple(
            scheduler.service, Path=disk.path_type(), LogStore=disk.make_store, Engine=make_engine, HttpServer=_NoServer
        ),
        mock.patch.multiple(scheduler.journal.log_folder, os=disk.os, fcntl=disk.fcntl),
        mock.patch.multiple(
            scheduler.journal.threaded,
            threading=SimpleNamespace(Thread=threads.SimulatedThread),
            queue=SimpleNamespace(SimpleQueue=threads.SimulatedQueue, Empty=queue.Empty),
            Documents=lambda *_: WeightsDocuments(disk),
        ),
        mock.patch.multiple(
            detokenizer.__main__,
            open_model_folder=lambda _: folder(network.tokenizers.get(running().name, "")),
            open_tokenizer=lambda *_: None,
            decoder_factory=lambda _: decoders(network.tokenizers.get(running().name, "")),
            HttpServer=_NoServer,
        ),
        mock.patch.multiple(
            router.__main__,
            open_model_folder=lambda _: folder(network.tokenizers.get(running().name, "")),
            PromptBuilder=_Prompts,
            ChatModel=SimpleNamespace(of=lambda *_: SimpleNamespace(tokens={})),
            MessagesApi=_NoServer,
            OpenAiApi=_NoServer,
            HttpPort=_NoServer,
            dashboard_routes=lambda _: [],
        ),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield errors
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        random.setstate(dice_state)
        if was_collecting:
            gc.enable()
