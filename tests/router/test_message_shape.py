"""Each template gets messages in the form that it reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.prompt import PromptBuilder
from router.protocols.anthropic.request import read_messages
from router.protocols.conversation import ChatModel
from router.protocols.openai.body import Body
from router.protocols.openai.messages import chat_messages
from router.protocols.responses.items import Turns
from tests.router.parsers.transcripts import model_format

Render = Callable[..., Awaitable[list[str]]]
ARGUMENTS = '{"city": "Köln"}'
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


def object_call(arguments: object) -> dict[str, Any]:
    return {**CALL, "function": {"name": "weather", "arguments": arguments}}


@pytest.fixture
def rendered(folder: ModelFolder) -> Render:
    """Return the texts that the model's tokenizer gets for conversations with a template."""

    async def render(source: str, *conversations: Sequence[pb.ChatMessage], tools: str = "") -> list[str]:
        with closing(PromptBuilder(dataclasses.replace(folder, chat_template=source), 1)) as builder:
            texts = []
            for messages in conversations:
                chat = pb.ChatInput(messages=messages, tools_json=tools)
                ids = await builder.token_ids(pb.GenerateRequest(chat=chat))
                texts.append(builder.tokenizer.decode(ids, skip_special_tokens=False))
            return texts

    return render


def of_openai(messages: list[dict[str, Any]]) -> list[pb.ChatMessage]:
    turns, _ = chat_messages(Body({"messages": messages}))
    return turns


def of_transformers(source: str, messages: list[dict[str, Any]]) -> str:
    texts, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True)
    return str(texts[0])


EMPTY: tuple[object, ...] = (None, "", [])
# Templates by what they do with a call whose message has no text; each is an excerpt of the kind's logic, not a copy.
OF_CALLS = {
    "tests none": (
        (
            "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
            "[{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}]"
            "{% elif m.content is not none %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
        ),
        None,
        ARGUMENTS,
    ),
    "joins text": (
        (
            "{% for m in messages %}{{ m.role + ':' + m.content }}"
            "{% for c in m.tool_calls %}[{{ c.function | tojson }}]{% endfor %}{% endfor %}"
        ),
        "",
        json.loads(ARGUMENTS),
    ),
    "prints none": (
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
            "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}{% endfor %}"
        ),
        "",
        json.loads(ARGUMENTS),
    ),
    "prints Python": (
        (
            "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{% for c in m.tool_calls %}"
            "[{{ c.function.name }}{{ c.function.arguments }}]{% endfor %}{% endfor %}"
        ),
        None,
        ARGUMENTS,
    ),
    "refuses results": (
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
            "{{ m.content or '' }}{{ m.tool_calls[0].function.arguments.city if m.tool_calls }}{% endfor %}"
        ),
        None,
        json.loads(ARGUMENTS),
    ),
}


@pytest.mark.parametrize("kind", OF_CALLS)
async def test_calls_without_text_are_in_the_prompt(rendered: Render, kind: str) -> None:
    source, content, wanted = OF_CALLS[kind]
    user = {"role": "user", "content": "Wie ist es?"}
    answer = {"role": "assistant", "content": content, "tool_calls": [object_call(wanted)]}
    expected = of_transformers(source, [user, answer])
    assert "Köln" in expected
    conversations = [
        of_openai([user, {"role": "assistant", "content": empty, "tool_calls": [object_call(arguments)]}])
        for empty in EMPTY
        for arguments in (ARGUMENTS, json.loads(ARGUMENTS))
    ]
    assert await rendered(source, *conversations) == [expected] * 6


async def test_a_call_without_text_before_its_result_is_read_as_there(rendered: Render) -> None:
    """The content of the last message may be null, but that of an earlier one is divided."""
    source = (
        "{% for m in messages %}{{ m.role }}{% if m.content or not loop.last %}:{{ m.content.split('</think>')[-1] }}"
        "{% endif %}{% for c in m.tool_calls %}[{{ c.function | tojson }}]{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "warm"}
    (text,) = await rendered(source, of_openai([{"role": "user", "content": "Hi"}, call, result]))
    assert text == 'user:Hiassistant:[{"name": "weather", "arguments": {"city": "Köln"}}]tool:warm'


@pytest.mark.parametrize("kind", OF_CALLS)
async def test_every_api_gives_the_same_prompt(rendered: Render, kind: str) -> None:
    source, _, _ = OF_CALLS[kind]
    openai = of_openai(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    )
    turns = Turns(has_developer=False)
    call = {"type": "function_call", "call_id": CALL["id"], "name": "weather", "arguments": ARGUMENTS}
    turns.add(Body({"input": [{"role": "user", "content": "Hi"}, call]}).objects("input"))
    block = {"type": "tool_use", "id": CALL["id"], "name": "weather", "input": json.loads(ARGUMENTS)}
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": "warm"}
    messages = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    body = Body({"messages": [{"role": "user", "content": "Hi"}, *messages], "max_tokens": 9})
    anthropic = read_messages(body, ChatModel(model_format("none", "none"), "")).conversation.request.chat.messages[:2]
    grpc = [
        pb.ChatMessage(role="user", content="Hi"),
        pb.ChatMessage(role="assistant", tool_calls_json=json.dumps([object_call(json.loads(ARGUMENTS))])),
    ]
    texts = await rendered(source, openai, turns.turns, anthropic, grpc)
    assert len(set(texts)) == 1
    assert "Köln" in texts[0]


async def test_a_call_without_arguments_has_an_empty_object(rendered: Render) -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    calls: list[dict[str, Any]] = [object_call(None), object_call(""), object_call({}), object_call(None)]
    del calls[-1]["function"]["arguments"]
    grpc = [[pb.ChatMessage(role="assistant", tool_calls_json=json.dumps([call]))] for call in calls]
    openai = [of_openai([{"role": "assistant", "tool_calls": [call]}]) for call in calls]
    assert await rendered(source, *grpc, *openai) == ["{}"] * 8


CUT = '{"city": "Kö'
# Templates by how they read arguments, and what they make of arguments that are not an object.
OF_CUT_CALLS = {
    "text": ("{{ c.function.arguments }}", CUT),
    "text or JSON": (
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
        CUT,
    ),
    "JSON": ("{{ c.function.arguments | tojson }}", json.dumps(CUT, ensure_ascii=False)),
    "members": ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", f"arguments={CUT}"),
}


@pytest.mark.parametrize("kind", OF_CUT_CALLS)
@pytest.mark.parametrize("arguments", [CUT, "[1]", "Köln", "{'city': 'Köln'}", '{"a": 1e999}'])
async def test_arguments_that_are_not_an_object_are_in_the_prompt_as_text(
    rendered: Render, kind: str, arguments: str
) -> None:
    term, wanted = OF_CUT_CALLS[kind]
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}" + term + "{% endfor %}{% endfor %}"
    openai = of_openai([{"role": "assistant", "content": "", "tool_calls": [object_call(arguments)]}])
    turns = Turns(has_developer=False)
    call = {"type": "function_call", "call_id": CALL["id"], "name": "weather", "arguments": arguments}
    turns.add(Body({"input": [call]}).objects("input"))
    grpc = [pb.ChatMessage(role="assistant", tool_calls_json=json.dumps([object_call(arguments)]))]
    inner, shown = json.dumps(CUT, ensure_ascii=False), json.dumps(arguments, ensure_ascii=False)
    expected = shown if wanted == inner else wanted.replace(CUT, arguments)
    assert await rendered(source, openai, turns.turns, grpc) == [expected] * 3


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


EACH_PART = "{% for p in m.content %}{{ p.text | trim if p.type == 'text' }}{% endfor %}"
# Templates by what they read, and what they make of `Hi` and of the parts `Hi ` and `you`.
OF_PARTS = {
    "text": ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", "userHi", "userHi \nyou"),
    "both": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + EACH_PART + "{% endif %}"
        "{% endfor %}",
        "Hi",
        "Hiyou",
    ),
    "parts": ("{% for m in messages %}" + EACH_PART + "{% endfor %}", "Hi", "Hiyou"),
    "one part": ("{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}", "Hi", "Hi \nyou"),
    "prints Python": ("{% for m in messages %}{{ m.content }}{% endfor %}", "Hi", "Hi \nyou"),
    "prints JSON": (
        "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}{% endfor %}",
        "Hi",
        "Hi \nyou",
    ),
    "drops parts": ("{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}", "Hi", "Hi \nyou"),
    "fails": ("{% for m in messages %}{{ raise_exception('no') if 'Hi' not in m.content else m.content }}{% endfor %}",
              "Hi", "Hi \nyou"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_PARTS)
async def test_texts_are_joined_as_the_template_joins_them(rendered: Render, kind: str) -> None:
    source, text, joined = OF_PARTS[kind]
    conversations = [of_openai([{"role": "user", "content": content}]) for content in ("Hi", parts("Hi ", "you"))]
    assert await rendered(source, *conversations) == [text, joined]
    if kind in ("both", "parts"):
        assert joined == of_transformers(source, [{"role": "user", "content": parts("Hi ", "you")}])


async def test_roles_may_differ(rendered: Render) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '|' }}"
    source += "{% else %}" + EACH_PART + "{% endif %}{% endfor %}"
    messages = [{"role": role, "content": parts("a", "b")} for role in ("system", "developer", "user", "tool")]
    assert await rendered(source, of_openai(messages[:4]), of_openai(messages[:3])) == ["a\nb|ababab", "a\nb|abab"]
    only_developer = source.replace("'system'", "'developer'")
    assert await rendered(only_developer, of_openai(messages[:3])) == ["aba\nb|ab"]


async def test_tools_may_change_what_a_template_reads(rendered: Render) -> None:
    source = "{% for m in messages %}{% if tools %}{{ m.content + '!' }}"
    source += "{% else %}" + EACH_PART + "{% endif %}{% endfor %}"
    message = of_openai([{"role": "user", "content": parts("a", "b")}])
    assert [await rendered(source, message, tools=tools) for tools in ("", "[{}]")] == [["ab"], ["a\nb!"]]
