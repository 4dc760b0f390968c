"""The official clients of OpenAI and Anthropic in a session with tools, with a model that writes each tool-call
format.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, TypeVar

import anthropic
import openai
import pytest

from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from router.parsers.formats import TOOL_FORMATS
from router.protocols.conversation import ChatModel
from tests.router.conftest import Cluster, Part
from tests.router.parsers.transcripts import GOOD, SCHEMAS, Transcript, model_format

_T = TypeVar("_T")
# The most complex transcript of each format.
CALLING = [item for item in GOOD if item.calls and (not item.is_thinking or item.reasons_by == "deepseek_r1")]
TRANSCRIPTS = {
    name: max(
        (item for item in CALLING if item.tools == name),
        key=lambda item: (bool(item.reasoning), len(item.calls), len(item.text)),
    )
    for name in TOOL_FORMATS
}
ASKED = "What is the weather?"
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": "d", "input_schema": schema} for name, schema in SCHEMAS.items()
]


async def scripted(
    cluster: Cluster,
    call: Awaitable[_T],
    request_id: str,
    ids: list[int],
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP,
) -> _T:
    """Return the result of a call while the model writes `ids`, one at a time."""

    async def write() -> None:
        await cluster.scheduler.until(lambda: request_id in cluster.scheduler.requests)
        for token in ids:
            cluster.scheduler.emit(request_id, [token])
        cluster.scheduler.end(request_id, reason=reason)

    return (await asyncio.gather(call, write()))[0]


async def router_of(cluster: Cluster, transcript: Transcript) -> Part:
    chat = ChatModel(model_format(transcript.tools, transcript.reasons_by))
    return await cluster.add_router(await cluster.add_detokenizer(), chat=chat)


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_openai(cluster: Cluster, tokenizer: Tokenizer, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    router = await router_of(cluster, transcript)
    assert router.http is not None
    ids = tokenizer.encode(transcript.text)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    url = f"http://127.0.0.1:{router.http.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def streamed() -> Any:
            parameters: dict[str, Any] = {"messages": messages, "tools": OPENAI_TOOLS}
            async with client.chat.completions.stream(
                model="smollm2", extra_body={"request_id": "s"}, **parameters
            ) as stream:
                reasoning = ""
                async for event in stream:
                    if event.type == "chunk" and event.chunk.choices:
                        reasoning += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                final = await stream.get_final_completion()
                assert reasoning == transcript.reasoning
                return final

        whole = client.chat.completions.create(
            model="smollm2", messages=messages, tools=OPENAI_TOOLS, extra_body={"request_id": "w"}
        )
        answers: list[Any] = [
            await scripted(cluster, whole, "w", ids),
            await scripted(cluster, streamed(), "s", ids),
        ]
        for answer in answers:
            choice = answer.choices[0]
            calls = choice.message.tool_calls
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == transcript.calls
            assert (choice.message.content or "", choice.finish_reason) == (transcript.content, "tool_calls")
            assert len({call.id for call in calls}) == len(calls)
        assert (answers[0].choices[0].message.model_extra.get("reasoning_content") or "") == transcript.reasoning
        message = answers[0].choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
        follow = client.chat.completions.create(
            model="smollm2", messages=messages, tools=OPENAI_TOOLS, extra_body={"request_id": "f"}
        )
        last = await scripted(cluster, follow, "f", tokenizer.encode("It is sunny."))
        assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_anthropic(cluster: Cluster, tokenizer: Tokenizer, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    router = await router_of(cluster, transcript)
    assert router.http is not None
    ids = tokenizer.encode(transcript.text)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 4000,
        "tools": ANTHROPIC_TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [{"type": "text", "text": "Be brief."}],
    }
    url = f"http://127.0.0.1:{router.http.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        async def streamed() -> Any:
            async with client.messages.stream(messages=messages, extra_body={"request_id": "s"}, **asked) as stream:
                texts = "".join([text async for text in stream.text_stream])
                assert texts == transcript.content
                return await stream.get_final_message()

        whole = client.messages.create(messages=messages, extra_body={"request_id": "w"}, **asked)
        answers: list[Any] = [await scripted(cluster, whole, "w", ids), await scripted(cluster, streamed(), "s", ids)]
        for answer in answers:
            blocks = answer.content
            assert [(block.name, block.input) for block in blocks if block.type == "tool_use"] == transcript.calls
            assert "".join(block.text for block in blocks if block.type == "text") == transcript.content
            assert "".join(block.thinking for block in blocks if block.type == "thinking") == transcript.reasoning
            assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", len(ids))
            assert answer.usage.input_tokens > 10
        messages.append({"role": "assistant", "content": answers[1].content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
            for block in answers[1].content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]})
        follow = client.messages.create(messages=messages, extra_body={"request_id": "f"}, **asked)
        last = await scripted(cluster, follow, "f", tokenizer.encode("It is sunny."))
        assert (last.stop_reason, last.content[-1].type) == (
            ("end_turn", "thinking") if transcript.reasons_by == "deepseek_r1" else ("end_turn", "text")
        )


async def test_a_call_that_was_cut_off_can_be_sent_back(cluster: Cluster, tokenizer: Tokenizer) -> None:
    router = await cluster.add_router(await cluster.add_detokenizer())
    assert router.http is not None
    name, url, cut = next(iter(SCHEMAS)), f"http://127.0.0.1:{router.http.port}", tokenizer.encode('{"city": "K')
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    answer: Any
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def chat(request_id: str, **fields: Any) -> Any:
            extra = {"request_id": request_id}
            return client.chat.completions.create(model="smollm2", messages=messages, extra_body=extra, **fields)

        choice = {"type": "function", "function": {"name": name}}
        forced = chat("a", tools=OPENAI_TOOLS, tool_choice=choice)
        answer = await scripted(cluster, forced, "a", cut, reason=pb.FINISH_REASON_LENGTH)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.arguments == '{"city": "K'
        messages += [answer.choices[0].message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "cut"}]
        answer = await scripted(cluster, chat("b"), "b", tokenizer.encode("Again."))
        assert answer.choices[0].message.content == "Again."
    del messages[1:]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:

        def create(request_id: str, **fields: Any) -> Any:
            extra = {"request_id": request_id}
            return claude.messages.create(
                model="smollm2", max_tokens=99, messages=messages, tools=ANTHROPIC_TOOLS, extra_body=extra, **fields
            )

        forced = create("c", tool_choice={"type": "tool", "name": name})
        answer = await scripted(cluster, forced, "c", cut, reason=pb.FINISH_REASON_LENGTH)
        (block,) = answer.content
        assert answer.stop_reason == "max_tokens"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "cut"}
        messages += [{"role": "assistant", "content": [block.to_dict()]}, {"role": "user", "content": [result]}]
        answer = await scripted(cluster, create("d"), "d", tokenizer.encode("Again."))
        assert answer.content[0].text == "Again."
