"""All APIs of the real service: official clients receive the tokens of the native call, and clients may disconnect."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from protos import openengine_pb2 as oe
from tests.integration.api_clients import ApiClients, Case, infer_request
from tests.integration.service import Service, chat, collect, eventually, latest_stats, tokens
from tests.router.adapters.sse import post_stream

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

NUM_CASES = 12
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    name: Literal["Paris", "Oslo"]
    is_capital: bool


@pytest.fixture(scope="module")
def addresses(service: Service) -> dict[str, str]:
    addresses: dict[str, str] = service.processes("router")[0]["addresses"]
    return addresses


@pytest.fixture
async def clients(addresses: dict[str, str]) -> AsyncIterator[ApiClients]:
    clients = ApiClients(addresses["grpc"], addresses["http"])
    yield clients
    await clients.close()


async def test_every_api_gives_the_native_calls_tokens(clients: ApiClients) -> None:
    rng = random.Random(9)
    cases = [Case.draw(rng) for _ in range(NUM_CASES)]
    expected = await asyncio.gather(*map(clients.ask_native, cases))
    ways = (
        clients.ask_openai,
        clients.ask_openai_stream,
        clients.ask_kserve,
        clients.ask_kserve_stream,
        clients.ask_openengine,
    )
    assert {sequence.reason for sequences in expected for sequence in sequences} == {"stop", "length"}
    assert len({tuple(sequence.token_ids) for sequences in expected for sequence in sequences}) > NUM_CASES
    for way in ways:
        for case, answer, right in zip(cases, await asyncio.gather(*map(way, cases)), expected, strict=True):
            assert [sequence.text for sequence in answer] == [sequence.text for sequence in right], (way, case)
            for sequence, native in zip(answer, right, strict=True):
                assert sequence.log_probs[: len(native.log_probs)] == native.log_probs, (way, case)
                if way not in (clients.ask_kserve, clients.ask_kserve_stream):
                    assert (sequence.token_ids, sequence.reason) == (native.token_ids, native.reason), (way, case)


async def test_every_choice_echoes_the_prompts_log_probabilities_streamed_or_not(clients: ApiClients) -> None:
    native = tokens([504, 3575, 282, 4649, 314], max_tokens=3)
    native.output.prompt_log_probs = 0
    known: list[float] = []
    async for chunk in clients.native.Generate(native, timeout=240):
        known += chunk.prompt_log_probs.token_log_probs
    fields: dict[str, Any] = {"model": "smollm2", "prompt": list(native.token_ids.values), "max_tokens": 3, "seed": 5}
    fields |= {"n": 2, "echo": True, "logprobs": 0}
    whole = await clients.openai.completions.create(**fields)
    streamed: dict[int, list[float | None]] = {0: [], 1: []}
    async for event in await clients.openai.completions.create(**fields, stream=True):
        for choice in event.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.token_logprobs or []
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == streamed[choice.index]
        assert streamed[choice.index][:5] == [None, *known]
        assert len(streamed[choice.index]) == 8
    # A client that only scores prompts requests no output tokens.
    scored = await clients.openai.completions.create(**fields | {"max_tokens": 0})
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (5, 0)
    for choice in scored.choices:
        assert choice.logprobs is not None
        assert (choice.logprobs.token_logprobs, choice.finish_reason) == ([None, *known], "length")
        assert choice.text == "".join(choice.logprobs.tokens or [])


async def test_token_ids_are_those_of_the_output_although_the_prompt_is_echoed(clients: ApiClients) -> None:
    """As in vLLM, also in streams; log probabilities name all tokens by their ids."""
    prompts = [[504, 3575, 282], [504, 3575, 282, 4649, 314]]
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    fields: dict[str, Any] = {"model": "smollm2", "prompt": prompts, "max_tokens": 4, "seed": 5, "extra_body": extra}
    plain = await clients.openai.completions.create(**fields)
    fields |= {"echo": True, "logprobs": 0}
    whole = await clients.openai.completions.create(**fields)
    streamed: dict[int, dict[str, list[int]]] = {0: {}, 1: {}}
    async for event in await clients.openai.completions.create(**fields, stream=True):
        for choice in event.choices:
            for name in ("token_ids", "prompt_token_ids"):
                streamed[choice.index].setdefault(name, []).extend((choice.model_extra or {}).get(name) or [])
    for prompt, without, choice in zip(prompts, plain.choices, whole.choices, strict=True):
        output = (without.model_extra or {})["token_ids"]
        assert len(output) == 4
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == streamed[choice.index]["token_ids"] == output
        assert choice.model_extra["prompt_token_ids"] == streamed[choice.index]["prompt_token_ids"] == prompt
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in prompt + output]


async def test_a_conversation_gives_the_same_tokens_as_the_native_call(clients: ApiClients) -> None:
    native = await collect(clients.native, chat(str(QUESTION[0].get("content")), max_tokens=12))
    extra = {"return_token_ids": True}
    whole = await clients.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_completion_tokens=12, extra_body=extra
    )
    assert whole.choices[0].message.content == native.text
    assert (whole.choices[0].model_extra or {})["token_ids"] == native.token_ids
    stream = await clients.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    events = [event async for event in stream]
    choices = [choice for event in events for choice in event.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == native.text
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert len(entries) == len(native.token_ids)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == len(native.token_ids)


async def test_responses_have_the_fields_and_log_probabilities_of_chat_completions(clients: ApiClients) -> None:
    """They are the same in a stream, and in a response that is read again later."""
    fields: dict[str, Any] = {"seed": 7, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 12}
    chat = await clients.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=1, max_tokens=12, logprobs=True, top_logprobs=2,
        extra_body=fields,
    )  # fmt: skip
    (choice,) = chat.choices
    assert choice.logprobs is not None
    wanted = [entry.to_dict() for entry in choice.logprobs.content or ()]
    assert len(wanted) == 12
    arguments: dict[str, Any] = {"model": "smollm2", "input": QUESTION, "temperature": 1, "max_output_tokens": 12}
    arguments |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": fields}
    events = [event async for event in await clients.openai.responses.create(**arguments, stream=True)]
    streamed = [entry for event in events if event.type.endswith("text.delta") for entry in event.to_dict()["logprobs"]]
    stored = await clients.openai.responses.retrieve(events[-1].response.id)
    for response in (await clients.openai.responses.create(**arguments), events[-1].response, stored):
        assert (response.output_text, response.top_logprobs) == (choice.message.content, 2)
        assert response.output[0].content[0].to_dict()["logprobs"] == wanted == streamed


async def test_a_response_takes_variables_of_the_template_and_allowed_tokens(clients: ApiClients) -> None:
    digits = Tokenizer(open_model_folder("smollm2").path).encode("0123456789")
    response = await clients.openai.responses.create(
        model="smollm2", input="Count.", max_output_tokens=8,
        extra_body={"allowed_token_ids": digits, "chat_template_kwargs": {"add_generation_prompt": True}},
    )  # fmt: skip
    assert len(response.output_text) == 8
    assert response.output_text.isdigit()


async def test_the_official_client_asks_for_tools_and_schemas(clients: ApiClients) -> None:
    named = await clients.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=[WEATHER], max_tokens=64, temperature=0,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    calls = named.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    stream = await clients.openai.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=[WEATHER], max_tokens=64, temperature=0, tool_choice="required",
        parallel_tool_calls=False, stream=True,
    )  # fmt: skip
    choices = [event.choices[0] async for event in stream]
    (part,) = [part for choice in choices for part in choice.delta.tool_calls or ()]
    assert part.function is not None
    assert part.function.name == "weather"
    assert json.loads(part.function.arguments or "")["city"] in ("Paris", "Oslo")
    assert choices[-1].finish_reason == "tool_calls"
    parsed = await clients.openai.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=City, max_tokens=64, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    extra = {"guided_regex": r"\d{3}-\d{2}"}
    guided = await clients.openai.completions.create(model="smollm2", prompt="Call", max_tokens=16, extra_body=extra)
    assert [len(part) for part in guided.choices[0].text.split("-")] == [3, 2]


GBNF = """# Llama.cpp's dialect
root ::= sign? digit{2,3} ("." digit+)? unit | "none"
sign ::= [-+]
digit ::= [0-9]
unit ::= " " ("kg" | "m" [^a-z0-9 ])
"""
PRICE = {"type": "object", "properties": {"price": {"type": "integer", "maximum": 99}}, "required": ["price"]}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": GBNF}, r"[-+]?\d{2,3}(\.\d+)? (kg|m[^a-z0-9 ])|none"),
        ({"ebnf": GBNF}, r"[-+]?\d{2,3}(\.\d+)? (kg|m[^a-z0-9 ])|none"),
        ({"regex": r"(one|two){2}!"}, r"(one|two){2}!"),
        ({"json_schema": PRICE}, r'\{"price": -?\d+\}'),
        ({"json_schema": json.dumps(PRICE)}, r'\{"price": -?\d+\}'),
        ({"response_format": {"type": "json_object", "schema": PRICE}}, r'\{"price": -?\d+\}'),
    ],
    ids=["gbnf", "ebnf", "regex", "schema", "schema_text", "json_object"],
)
async def test_grammars_in_the_fields_of_other_servers(
    clients: ApiClients, fields: dict[str, Any], pattern: str
) -> None:
    settings: dict[str, Any] = {"model": "smollm2", "max_tokens": 40, "temperature": 0, "extra_body": fields}
    completion = await clients.openai.completions.create(prompt="The weight is", **settings)
    chat = await clients.openai.chat.completions.create(messages=QUESTION, **settings)
    for text, reason in (
        (completion.choices[0].text, completion.choices[0].finish_reason),
        (chat.choices[0].message.content, chat.choices[0].finish_reason),
    ):
        assert reason == "length" or re.fullmatch(pattern, text or ""), text
        assert text


async def test_the_official_synchronous_client(clients: ApiClients) -> None:
    def ask() -> tuple[list[str], str]:
        url = f"http://127.0.0.1:{clients.http_port}/v1"
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            assert next(iter(client.models.list())).id == "smollm2"
            whole = client.completions.create(
                model="smollm2", prompt=["One", "Two"], n=2, best_of=3, seed=4, max_tokens=6, echo=True
            )
            with client.completions.create(model="smollm2", prompt="One", max_tokens=6, stream=True) as stream:
                streamed = "".join(event.choices[0].text for event in stream)
            return [choice.text for choice in whole.choices], streamed

    texts, streamed = await asyncio.to_thread(ask)
    assert [text[:3] for text in texts] == ["One", "One", "Two", "Two"]
    assert streamed


LONG = Case("Once upon a time", 4000, 1, 5, 0, 4000, 1.0, 1.0, 1.0, 0.0, 0.0, ())
Leave = Callable[[ApiClients], Awaitable[None]]


async def leave_native(clients: ApiClients) -> None:
    call = clients.native.Generate(tokens([5, 6], max_tokens=4000), timeout=240)
    assert isinstance(await call.read(), pb.GenerateResponse)
    call.cancel()


async def leave_openai_stream(clients: ApiClients) -> None:
    body: dict[str, object] = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with post_stream(clients.http_port, "/v1/completions", body) as stream:
        await anext(stream.events())


async def leave_openai(clients: ApiClients) -> None:
    body: dict[str, object] = {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True}
    async with post_stream(clients.http_port, "/v1/completions", body):
        await until_active(clients)


async def leave_kserve(clients: ApiClients) -> None:
    call = clients.kserve.ModelInfer(infer_request(LONG), timeout=240)
    await until_active(clients)
    call.cancel()


async def leave_kserve_stream(clients: ApiClients) -> None:
    call = clients.kserve.ModelStreamInfer(iter([infer_request(LONG, stream=True)]), timeout=240)
    await call.read()
    call.cancel()


async def leave_openengine(clients: ApiClients) -> None:
    stopping = oe.StoppingOptions(max_tokens=4000, ignore_eos=True)
    call = clients.openengine.Generate(oe.GenerateRequest(prompt="Once", stopping=stopping), timeout=240)
    assert isinstance(await call.read(), oe.GenerateResponse)
    call.cancel()


async def until_active(clients: ApiClients) -> None:
    active = await eventually(lambda: latest_stats(clients.native), lambda stats: stats.num_active_requests > 0, 60)
    assert active.num_active_requests


@pytest.mark.parametrize(
    "leave",
    [leave_native, leave_openai, leave_openai_stream, leave_kserve, leave_kserve_stream, leave_openengine],
)
async def test_a_disconnect_frees_the_blocks_soon(clients: ApiClients, leave: Leave) -> None:
    """Without the disconnect, the request would run for much longer. The fastest of three attempts counts, since the
    machine may be busy.
    """
    took = []
    for _ in range(3):
        await leave(clients)
        left_at = time.monotonic()
        stats = await eventually(
            lambda: latest_stats(clients.native), lambda stats: not stats.kv_cache_stats.used_num_blocks, 60
        )
        took.append(time.monotonic() - left_at)
        assert (stats.kv_cache_stats.used_num_blocks, stats.num_active_requests) == (0, 0)
        if took[-1] < 5:
            return
    raise AssertionError(f"the blocks were free only after {took} s")
