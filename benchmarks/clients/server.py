"""A scripted server that speaks the wire forms of OpenAI's and Anthropic's streams, and records every call.

The path of a call begins with the name of its scenario, so that many clients can run against one server:
`/SCENARIO/v1/chat/completions`. A scenario is a list of answers: the first call gets the first answer and so on, and
the last answer is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Calls that do not contain this text in their body are not counted: agents also ask for models and titles.
PROMPT = "Say hello to the plover."
TEXT = ("Hello", " plover")
NO_HEADERS = "no headers"


@dataclass(frozen=True)
class Status:
    """An error status instead of a stream; `retry_after` (in seconds) and `should_retry` are values of headers."""

    code: int
    retry_after: str = ""
    should_retry: str = ""


@dataclass(frozen=True)
class Break:
    """The connection is cut: after the first text, or without any answer."""

    has_begun: bool = True


@dataclass(frozen=True)
class Wait:
    """A stream that waits for its first text for `wait_s` seconds, and sends `form` every `interval_s` meanwhile.

    `form` is a key of the API's `forms`, empty for silence, or NO_HEADERS if even the headers come after the wait. With
    `num_texts`, the wait is after that many texts.
    """

    form: str = ""
    wait_s: float = 0.0
    interval_s: float = 1.0
    num_texts: int = 0


Answer = Status | Break | Wait
WHOLE = Wait()


@dataclass
class Scenario:
    """What the calls of one client are answered.

    Attributes:
        called: Set by the first call.
        starts: When each call came, in seconds of `time.monotonic()`.
        num_unstreamed: Number of calls that did not ask for a stream.
        left_after_s: How long after its call the client closed the connection of a stream that waited.
    """

    answers: Sequence[Answer]
    called: asyncio.Event = field(default_factory=asyncio.Event)
    starts: list[float] = field(default_factory=list)
    num_unstreamed: int = 0
    left_after_s: float | None = None

    def next_answer(self) -> Answer:
        """Record a call; return its answer."""
        self.called.set()
        self.starts.append(time.monotonic())
        return self.answers[min(len(self.starts), len(self.answers)) - 1]


class Server:
    """Serves scenarios on a port of its own.

    Attributes:
        url: Where it listens; a client's base URL is `url/SCENARIO`.
        scenarios: What to answer, by name.
    """

    def __init__(self) -> None:
        self.scenarios: dict[str, Scenario] = {}
        self.url = ""
        self._writers = set[asyncio.StreamWriter]()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        """Serve until the end of the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for writer in list(self._writers):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                if "content-length" in headers:
                    body = await reader.readexactly(int(headers["content-length"]))
                else:
                    body = await _chunked(reader) if "transfer-encoding" in headers else b""
                await self._answer(method, path.partition("?")[0], body, reader, writer)
        self._writers.discard(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(
        self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name, _, path = path.removeprefix("/").partition("/")
        api = next((api for api in APIS if path.endswith(api)), "")
        scenario = self.scenarios.get(name)
        if scenario is None or method != "POST" or not api or PROMPT.encode() not in body:
            writer.write(_response(404, b"{}"))
            return
        answer = scenario.next_answer()
        if not json.loads(body).get("stream"):
            scenario.num_unstreamed += 1
            writer.write(_response(200, json.dumps(WHOLE_MESSAGE).encode()))
            return
        match answer:
            case Status(code, retry_after, should_retry):
                error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy", "code": "busy"}}
                extra = f"retry-after: {retry_after}\r\n" if retry_after else ""
                extra += f"x-should-retry: {should_retry}\r\n" if should_retry else ""
                writer.write(_response(code, json.dumps(error).encode(), extra))
            case Break(has_begun):
                if has_begun:
                    writer.write(STREAM_HEAD)
                    for event in (*APIS[api].opening, *APIS[api].texts[:1]):
                        writer.write(_chunk(event))
                    await writer.drain()
                writer.close()
            case Wait():
                gone = asyncio.create_task(reader.read(1))
                await _stream(APIS[api], answer, gone, writer)
                if gone.done() and answer.wait_s:
                    scenario.left_after_s = time.monotonic() - scenario.starts[-1]
                    writer.close()
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await writer.drain()


async def _stream(api: Api, answer: Wait, gone: asyncio.Task[bytes], writer: asyncio.StreamWriter) -> None:
    """Write the stream; return when it ends, or when the client leaves during the wait."""
    begin = STREAM_HEAD + b"".join(_chunk(event) for event in (*api.opening, *api.texts[: answer.num_texts]))
    if answer.form != NO_HEADERS:
        writer.write(begin)
    ends_at, number = time.monotonic() + answer.wait_s, 1000
    while (left := ends_at - time.monotonic()) > 0:
        await asyncio.wait([gone], timeout=min(left, answer.interval_s))
        if gone.done():
            return
        if answer.form in api.forms:
            writer.write(_chunk(api.forms[answer.form].replace("NUMBER", str(number))))
            number += 1
    if answer.form == NO_HEADERS:
        writer.write(begin)
    for event in (*api.texts[answer.num_texts :], *api.closing):
        writer.write(_chunk(event))
    writer.write(b"0\r\n\r\n")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _response(code: int, body: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {code} Answer\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}"
    return f"{head}\r\n".encode() + body


def _chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body


@dataclass(frozen=True)
class Api:
    """The events of a stream of one API, each with its empty line.

    Attributes:
        opening: Before the first text.
        texts: One per text of TEXT.
        closing: After the last text.
        forms: What a server can send while there is no text, by name; NUMBER is replaced by a sequence number.
    """

    opening: tuple[str, ...]
    texts: tuple[str, ...]
    closing: tuple[str, ...]
    forms: dict[str, str]


COMMENT = {"comment": ": waiting\n\n"}


def _data(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\n" + _data({"type": kind, **fields}).replace('"NUMBER"', "NUMBER")


def _chat(delta: dict[str, str], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _data({"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def _completion(text: str, reason: str | None = None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    return _data({"id": "c1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


def _openai() -> tuple[Api, Api]:
    no_choices = _data({"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []})
    chat = Api(
        opening=(_chat({"role": "assistant", "content": ""}),),
        texts=tuple(_chat({"content": text}) for text in TEXT),
        closing=(_chat({}, "stop"), "data: [DONE]\n\n"),
        forms=COMMENT
        | {
            "delta with empty content": _chat({"content": ""}),
            "delta without fields": _chat({}),
            "chunk without choices": no_choices,
        },
    )
    completions = Api(
        opening=(),
        texts=tuple(_completion(text) for text in TEXT),
        closing=(_completion("", "stop"), "data: [DONE]\n\n"),
        forms=COMMENT
        | {
            "choice with empty text": _completion(""),
            "chunk without choices": no_choices.replace("chat.completion.chunk", "text_completion"),
        },
    )
    return chat, completions


def _responses() -> Api:
    text = "".join(TEXT)
    place = {"item_id": "i1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    item = {"id": "i1", "type": "message", "role": "assistant"}
    whole = {**item, "status": "completed", "content": [{**part, "text": text}]}
    usage = {
        "input_tokens": 1, "output_tokens": 2, "total_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip

    def response(status: str, **fields: Any) -> dict[str, Any]:
        base = {"id": "r1", "object": "response", "created_at": 1, "status": status, "model": "m", "output": []}
        return {
            **base, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "usage": None, **fields,
        }  # fmt: skip

    def delta(text: str, number: object) -> str:
        return _event("response.output_text.delta", sequence_number=number, **place, delta=text, logprobs=[])

    running = response("in_progress")
    return Api(
        opening=(
            _event("response.created", sequence_number=0, response=running),
            _event("response.in_progress", sequence_number=1, response=running),
            _event(
                "response.output_item.added", sequence_number=2, output_index=0,
                item={**item, "status": "in_progress", "content": []},
            ),
            _event("response.content_part.added", sequence_number=3, **place, part={**part, "text": ""}),
        ),
        texts=tuple(delta(text, 5000 + number) for number, text in enumerate(TEXT)),
        closing=(
            _event("response.output_text.done", sequence_number=5010, **place, text=text, logprobs=[]),
            _event("response.content_part.done", sequence_number=5011, **place, part={**part, "text": text}),
            _event("response.output_item.done", sequence_number=5012, output_index=0, item=whole),
            _event(
                "response.completed", sequence_number=5013, response=response("completed", output=[whole], usage=usage)
            ),
        ),
        forms=COMMENT
        | {
            "empty `output_text.delta`": delta("", "NUMBER"),
            "`keepalive`": _event("keepalive", sequence_number="NUMBER"),
            "`response.in_progress`": _event("response.in_progress", sequence_number="NUMBER", response=running),
        },
    )  # fmt: skip


_MESSAGE: dict[str, Any] = {
    "id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip
# The answer to a call of Anthropic's API that does not ask for a stream.
WHOLE_MESSAGE: dict[str, Any] = {
    **_MESSAGE,
    "content": [{"type": "text", "text": "".join(TEXT)}],
    "stop_reason": "end_turn",
}


def _messages() -> Api:

    def delta(text: str) -> str:
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    still_running = {"stop_reason": None, "stop_sequence": None}
    return Api(
        opening=(_event("message_start", message=_MESSAGE),),
        texts=(
            _event("content_block_start", index=0, content_block={"type": "text", "text": ""}) + delta(TEXT[0]),
            delta(TEXT[1]),
        ),
        closing=(
            _event("content_block_stop", index=0),
            _event(
                "message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 2}
            ),
            _event("message_stop"),
        ),
        forms=COMMENT
        | {
            "`ping`": _event("ping"),
            "empty `text_delta`": delta(""),
            "`message_delta` without a stop reason": _event(
                "message_delta", delta=still_running, usage={"output_tokens": 0}
            ),
        },
    )


_CHAT, _COMPLETIONS = _openai()
# By the end of the path.
APIS = {
    "chat/completions": _CHAT,
    "completions": _COMPLETIONS,
    "responses": _responses(),
    "messages": _messages(),
}
