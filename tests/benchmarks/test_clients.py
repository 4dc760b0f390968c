"""The scripted servers of benchmarks/clients speak the forms that official clients read, and the tables say what the
clients did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import grpc
import grpc.aio
import openai
import pytest

from benchmarks.clients.__main__ import CLIENTS, Findings, Outcome, after_cut, obeyed, retries_of, silence, tables
from benchmarks.clients.grpc_server import GrpcServer
from benchmarks.clients.server import APIS, PROMPT, TEXT, Answer, Break, Scenario, Server, Status, Wait
from tests.integration.api_clients import plain_http

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FORMS = [(api, form) for api, shape in APIS.items() for form in shape.forms]
OUTCOME = Outcome(is_whole=True, error="", delays_s=(), num_unstreamed=0, left_after_s=None)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server().running() as server:
        yield server


async def read(server: Server, api: str, *answers: Answer) -> str:
    """Return the text that the official client of an API reads."""
    server.scenarios["s"] = Scenario(answers)
    url, texts = f"{server.url}/s", list[str]()
    if api == "messages":
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="-") as claude,
            claude.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream,
        ):
            texts += [text async for text in stream.text_stream]
            assert (await stream.get_final_message()).stop_reason == "end_turn"
        return "".join(texts)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", http_client=plain_http()) as client:
        if api == "chat/completions":
            async for chunk in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                texts += [choice.delta.content or "" for choice in chunk.choices]
        elif api == "completions":
            async for part in await client.completions.create(model="m", prompt=PROMPT, stream=True):
                texts += [choice.text for choice in part.choices]
        else:
            async for event in await client.responses.create(model="m", input=PROMPT, stream=True):
                texts += [event.delta] if event.type == "response.output_text.delta" else []
    return "".join(texts)


@pytest.mark.parametrize(("api", "form"), FORMS)
async def test_official_clients_read_every_form_of_waiting(server: Server, api: str, form: str) -> None:
    assert await read(server, api, Wait(form, wait_s=0.1, interval_s=0.03, num_texts=1)) == "".join(TEXT)


async def test_a_refused_call_is_counted_and_repeated(server: Server) -> None:
    assert await read(server, "chat/completions", Status(429, "0.1"), Wait()) == "".join(TEXT)
    assert len(server.scenarios["s"].starts) == 2


async def test_a_cut_stream_is_an_error_for_the_client(server: Server) -> None:
    with pytest.raises(openai.APIConnectionError):
        await read(server, "chat/completions", Break())


async def test_a_grpc_call_is_cut_after_its_first_text() -> None:
    async with GrpcServer().running() as server:
        server.scenarios["s"] = Scenario([Break()])
        address = (await server.url("s")).removeprefix("http://")
        async with grpc.aio.insecure_channel(address) as channel:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/scripted.Streams/s")
            call = method(b"")
            assert await call.read() == TEXT[0].encode()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_words_of_the_tables() -> None:
    def after(*delays: float, **fields: Any) -> Outcome:
        return dataclasses.replace(OUTCOME, delays_s=delays, **fields)

    assert retries_of(after()) == "not repeated"
    assert retries_of(after(0.52, 1.04)) == "2 more, after 0.5, 1.0 s"
    assert silence(after(left_after_s=300.4)) == "300 s; error"
    assert silence(after(300.5, left_after_s=300.4, num_unstreamed=1)) == "300 s; calls again, without a stream"
    assert silence(after()) == "waits (tested to 660 s)"
    assert after_cut(after(error="terminated")) == "error"
    assert after_cut(after()) == "no error"
    assert after_cut(after(0.04, num_unstreamed=1)) == "calls again after 0.0 s, without a stream"
    found = Findings(CLIENTS[0], after(), after(), after(), after(), {}, {}, None, {})

    def waits(*pairs: tuple[int, Outcome]) -> str:
        return obeyed(dataclasses.replace(found, retry_after=dict(pairs)))

    assert waits((2, after()), (59, after())) == "not read"
    assert waits((2, after(2.0)), (59, after(59.1))) == "any value (tested to 59 s)"
    assert waits((59, after(59.0)), (61, after())) == "to 59 s; from 61 s on it gives up"
    assert waits((59, after(59.0)), (61, after(2.0))) == "to 59 s; from 61 s on it waits for its own time instead"


def test_a_client_that_calls_again_did_not_count_the_form_as_activity() -> None:
    refused = {429: OUTCOME, 503: OUTCOME, 529: OUTCOME}
    forms = {
        ("messages", "`ping`"): dataclasses.replace(OUTCOME, delays_s=(300.0,)),
        ("messages", "comment"): OUTCOME,
    }
    client = next(client for client in CLIENTS if client.name == "Claude Code")
    made = tables([Findings(client, OUTCOME, OUTCOME, OUTCOME, OUTCOME, refused, {}, OUTCOME, forms)]).splitlines()
    assert made[2].endswith("| not repeated |")
    assert "| `/v1/messages` | `ping` |  | Claude Code |" in made
    assert "| `/v1/messages` | comment | Claude Code |  |" in made
