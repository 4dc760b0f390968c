"""Readers of one stream through a proxy, for each API; each calls again, as its API allows, until it has all text."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import anthropic
import grpc.aio
import httpx2
import openai

from midstream.client import AsyncClient, SamplingParams
from midstream.errors import MidstreamError
from midstream.rpc.channel import open_channel
from protos import kserve_pb2, kserve_pb2_grpc
from tests.integration.api_clients import plain_http, texts_of
from tests.proxies.proxy import Proxy

if TYPE_CHECKING:
    from protos.kserve_pb2_grpc import GRPCInferenceServiceAsyncStub

PROMPT = "Count on."
_MESSAGES = [{"role": "user", "content": PROMPT}]
# How long a reader waits for bytes; longer than any wait in the tests.
TIMEOUT_S = 1800.0
_RETRY_S = 0.1


class StreamCutError(Exception):
    """A stream of a reader that does not call again ended too early."""


@dataclass
class Reader:
    """One stream.

    Attributes:
        num_tokens: Number of tokens of its output.
        calls_again: Whether to call again after an error.
        text: The text so far.
        breaks: Descriptions of the errors that ended calls before the end of the stream.
    """

    proxy: Proxy
    num_tokens: int
    calls_again: bool = True
    text: str = ""
    breaks: list[str] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def broke(self, description: str) -> None:
        """Record an error; return when the call should be repeated.

        Raises:
            StreamCutError: The reader does not call again.
        """
        self.breaks.append(description)
        if not self.calls_again:
            raise StreamCutError(description)
        await asyncio.sleep(_RETRY_S)


Read = Callable[[Reader], Coroutine[Any, Any, None]]


async def read_chat(reader: Reader) -> None:
    """Continue after the id of the last event."""
    body = {"model": "", "messages": _MESSAGES, "max_tokens": reader.num_tokens, "temperature": 0, "ignore_eos": True}
    await _read_events(reader, "/v1/chat/completions", body, lambda choice: choice["delta"].get("content") or "")


async def read_completion(reader: Reader) -> None:
    """Continue after the id of the last event."""
    body = {"model": "", "prompt": PROMPT, "max_tokens": reader.num_tokens, "temperature": 0, "ignore_eos": True}
    await _read_events(reader, "/v1/completions", body, lambda choice: choice["text"])


async def _read_events(
    reader: Reader, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str]
) -> None:
    headers: dict[str, str] = {}
    async with httpx2.AsyncClient(timeout=TIMEOUT_S) as client:
        while True:
            try:
                async with client.stream(
                    "POST", reader.proxy.url + path, json=body | {"stream": True}, headers=headers
                ) as response:
                    if response.is_server_error:
                        await reader.broke(f"status {response.status_code}")
                        continue
                    response.raise_for_status()
                    # If this is announced, Node.js 20 takes a stream that is cut for a complete one.
                    assert response.headers.get("connection", "").lower() != "close"
                    event_id = ""
                    async for line in response.aiter_lines():
                        name, _, value = line.partition(": ")
                        if name == "id":
                            event_id = value
                        elif name == "data" and value == "[DONE]":
                            return
                        elif name == "data":
                            fields = json.loads(value)
                            assert "error" not in fields, fields
                            reader.text += "".join(text_of(choice) for choice in fields["choices"])
                            headers["last-event-id"] = event_id
                    await reader.broke("the stream ended without [DONE]")
            except httpx2.TransportError as error:
                await reader.broke(f"{type(error).__name__}: {error}")


async def read_response(reader: Reader, *, is_background: bool = False) -> None:
    """Continue after the number of the last event."""
    headers = {"Idempotency-Key": reader.key}
    events: list[Any] = []
    async with openai.AsyncOpenAI(
        base_url=reader.proxy.url + "/v1", api_key="-", max_retries=0, timeout=TIMEOUT_S, http_client=plain_http()
    ) as client:
        while True:
            try:
                if events:
                    stream = await client.responses.retrieve(
                        events[0].response.id, stream=True, starting_after=events[-1].sequence_number
                    )
                else:
                    stream = await client.responses.create(
                        model="", input=PROMPT, stream=True, background=is_background, temperature=0,
                        max_output_tokens=reader.num_tokens, extra_headers=headers,
                    )  # fmt: skip
                async for event in stream:
                    if event.type == "keepalive":
                        continue
                    assert event.sequence_number == len(events)
                    events.append(event)
                    reader.text += event.delta if event.type == "response.output_text.delta" else ""
                if events[-1].type in ("response.incomplete", "response.completed"):
                    return
                await reader.broke("the stream ended before the response")
            except (openai.InternalServerError, openai.APIConnectionError) as error:
                await reader.broke(f"{type(error).__name__}: {error}")
            except openai.APIError as error:  # an `error` event
                await reader.broke(f"{type(error).__name__}: {error}")


async def read_background_response(reader: Reader) -> None:
    """Read the stream of a background response."""
    await read_response(reader, is_background=True)


async def read_message(reader: Reader) -> None:
    """Call again with the same key, and read the message from its beginning."""
    async with anthropic.AsyncAnthropic(
        base_url=reader.proxy.url, api_key="-", max_retries=0, timeout=TIMEOUT_S,
        default_headers={"Idempotency-Key": reader.key},
    ) as client:  # fmt: skip
        while True:
            reader.text = ""
            try:
                async with client.messages.stream(
                    model="", messages=cast("Any", _MESSAGES), max_tokens=reader.num_tokens,
                    extra_body={"temperature": 0},
                ) as stream:  # fmt: skip
                    async for text in stream.text_stream:
                        reader.text += text
                    await stream.get_final_message()
                    return
            except (anthropic.InternalServerError, anthropic.APIConnectionError, httpx2.TransportError) as error:
                await reader.broke(f"{type(error).__name__}: {error}")


async def read_kserve(reader: Reader) -> None:
    """Call again with the same key, and read the stream from its beginning."""
    request = kserve_pb2.ModelInferRequest(model_name="ensemble")
    for name, datatype, field_name, value in (
        ("text_input", "BYTES", "bytes_contents", PROMPT.encode()),
        ("max_tokens", "INT32", "int_contents", reader.num_tokens),
        ("stream", "BOOL", "bool_contents", True),
        ("temperature", "FP32", "fp32_contents", 0.0),
    ):
        tensor = request.inputs.add(name=name, datatype=datatype, shape=(1, 1))
        getattr(tensor.contents, field_name).append(value)
    async with open_channel(reader.proxy.address) as channel:
        stub = cast("GRPCInferenceServiceAsyncStub", kserve_pb2_grpc.GRPCInferenceServiceStub(channel))
        while True:
            reader.text = ""
            try:
                metadata = (("idempotency-key", reader.key),)
                async for answer in stub.ModelStreamInfer(iter([request]), metadata=metadata, timeout=TIMEOUT_S):
                    assert not answer.error_message, answer.error_message
                    response = answer.infer_response
                    for output, data in zip(response.outputs, response.raw_output_contents, strict=True):
                        reader.text += "".join(texts_of(data)) if output.name == "text_output" else ""
                    if response.parameters["triton_final_response"].bool_param:
                        return
                await reader.broke("the stream ended without a final response")
            except grpc.aio.AioRpcError as error:
                await reader.broke(f"{error.code().name}: {error.details()}")


async def read_native(reader: Reader) -> None:
    """Read with our client, which resumes by itself."""
    sampling = SamplingParams(max_tokens=reader.num_tokens, temperature=0.0, ignore_eos=True)
    async with AsyncClient(reader.proxy.address) as client:
        stream = client.generate(PROMPT, sampling=sampling)
        try:
            async for chunk in stream:
                reader.text += chunk.text
        except MidstreamError as error:
            await reader.broke(f"{type(error).__name__}: {error}")
        if stream.num_resumes and not reader.calls_again:
            await reader.broke(f"resumed {stream.num_resumes} times")


READERS: dict[str, Read] = {
    "chat": read_chat,
    "completions": read_completion,
    "responses": read_response,
    "messages": read_message,
    "kserve": read_kserve,
}


async def read_all(proxy: Proxy, num_tokens: int) -> dict[str, str]:
    """Return the text of each API's stream, whose calls must not break."""
    readers = {name: Reader(proxy, num_tokens) for name in READERS}
    async with asyncio.TaskGroup() as group:
        for name, read in READERS.items():
            group.create_task(read(readers[name]))
    assert not [reader.breaks for reader in readers.values() if reader.breaks]
    return {name: reader.text for name, reader in readers.items()}
