"""Tools in combination with a response format, required calls that are cut off, and `strict` where it has no effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal

import llguidance
import pytest

from midstream.errors import InvalidArgumentError
from midstream.grammar.compile import GuideTokenizer, compile_guide
from midstream.grammar.messages import Guide
from protos import generation_pb2 as pb
from router.parsers.events import CallArguments, CallBegin, CallEnd, ReasoningDelta, joined
from router.pipeline.prompt import PromptOptions
from router.protocols.anthropic.request import read_messages
from router.protocols.conversation import ChatModel, Conversation, SequenceReader, Tools
from router.protocols.openai.body import Body
from router.protocols.openai.jobs import Vocabulary, chat_job
from router.protocols.responses.request import read_response
from tests.router.parsers.transcripts import Named, model_format, summary

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"summary": {"type": "string"}},
    "required": ["summary"],
    "additionalProperties": False,
}
WEATHER: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
DEFINITION = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
TOOLS = Tools({"weather": WEATHER, "time": {"type": "object"}}, {"weather": DEFINITION})
TEMPLATE = "{{ tools }}"
# In a JSON string, text that looks like a call is not a call.
SUNNY = '{"summary": "<tool_call>{\\"name\\": \\"time\\"}</tool_call>"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO: Named = ("weather", {"city": "Oslo"})
GUIDE = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=json.dumps(SCHEMA))


def model(tools: str = "hermes", reasoning: str = "none", template: str = TEMPLATE) -> ChatModel:
    return ChatModel(model_format(tools, reasoning), template)


def conversation(
    chat: ChatModel,
    tools: Tools = TOOLS,
    guide: pb.GuidedDecodingConfig | None = GUIDE,
    *,
    is_thinking: bool = False,
) -> Conversation:
    """Return a conversation after its prompt was rendered."""
    request = pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hi")]))
    if guide is not None:
        request.guided_decoding.CopyFrom(guide)
    found = Conversation(request, tools, chat)
    found.is_thinking = is_thinking
    found.add_guide()
    return found


def read(found: Conversation, text: str) -> tuple[str, str, list[Named]]:
    """Return the content, the reasoning and the calls in a text."""
    return summary(joined(SequenceReader(found, "r", 0).read(text, is_final=True)))


@pytest.mark.parametrize(
    "guide", [GUIDE, pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON)], ids=("schema", "any JSON")
)
def test_beside_a_json_format_the_model_may_call_tools(guide: pb.GuidedDecodingConfig) -> None:
    found = conversation(model(), guide=guide)
    grammar = found.request.guided_decoding
    assert grammar.guide_type == pb.GUIDE_TYPE_EBNF_GRAMMAR
    assert "<tool_call>" in grammar.guide
    assert found.reads_text
    assert read(found, f"{CALL}\n{CALL}") == ("", "", [OSLO, OSLO])
    assert read(found, SUNNY) == (SUNNY, "", [])
    assert read(conversation(model(), Tools(TOOLS.schemas, is_parallel=False)), f"{CALL}\n{CALL}") == ("", "", [OSLO])


def test_reasoning_comes_before_the_calls_or_the_json() -> None:
    for is_thinking, before in ((False, "<think>Hm.</think>\n\n"), (True, "Hm.\n</think>\n\n")):
        found = conversation(model(reasoning="think"), is_thinking=is_thinking)
        assert "</think>" in found.request.guided_decoding.guide
        assert read(found, before + CALL) == ("", "Hm.", [OSLO])
        assert read(found, before + SUNNY) == (SUNNY, "Hm.", [])
    assert read(conversation(model(reasoning="think")), SUNNY) == (SUNNY, "", [])


def test_json_and_calls_are_written_in_channels_after_any_reasoning() -> None:
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = f"<|channel|>final<|message|>{SUNNY}"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    chat = model("openai", "openai")
    for tools in (TOOLS, Tools()):
        found = conversation(chat, tools)
        assert found.request.guided_decoding.guide_type == pb.GUIDE_TYPE_EBNF_GRAMMAR
        assert ("functions.weather" in found.request.guided_decoding.guide) == bool(tools.schemas)
        assert read(found, analysis + final) == (SUNNY, "Hm.", [])
    assert read(conversation(chat), analysis + call) == ("", "Hm.", [OSLO])
    strict = conversation(chat, Tools(TOOLS.schemas, strict=frozenset(TOOLS.schemas)), None)
    assert "functions.weather" in strict.request.guided_decoding.guide
    assert read(strict, f"{analysis}<|channel|>final<|message|>Yes.") == ("Yes.", "Hm.", [])


def test_a_continued_message_and_a_regular_expression_have_no_channels() -> None:
    chat = model("openai", "openai")
    regex = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="a+")
    assert conversation(chat, Tools(), regex).request.guided_decoding == regex
    found = Conversation(pb.GenerateRequest(guided_decoding=GUIDE), Tools(), chat)
    found.options = PromptOptions(continues_last=True)
    found.add_guide()
    assert found.request.guided_decoding == GUIDE
    assert read(found, SUNNY) == (SUNNY, "", [])


def test_an_answer_that_resembles_a_call_is_an_answer() -> None:
    answer = '{"name": "weather", "arguments": {}}'
    assert read(conversation(model("mistral")), answer) == (answer, "", [])
    assert read(conversation(model("mistral")), f"[TOOL_CALLS][{answer}]") == ("", "", [("weather", {})])


def test_beside_a_format_calls_without_their_beginning_are_the_answer() -> None:
    call = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    assert read(conversation(model("llama3_json")), call) == (call, "", [])
    assert read(conversation(model("llama3_json")), f"<|python_tag|>{call}") == ("", "", [OSLO])
    assert read(conversation(model("pythonic")), '<|python_start|>[weather(city="Oslo")]<|python_end|>') == (
        "",
        "",
        [OSLO],
    )


@pytest.mark.parametrize(("choice", "names"), [("required", ["weather", "time"]), ("named", ["time"])])
def test_a_required_call_of_gpt_oss_may_follow_reasoning(
    choice: Literal["required", "named"], names: list[str]
) -> None:
    tokenizer = GuideTokenizer(llguidance.LLTokenizer("byte"), {})
    strict = frozenset({"time"})
    time: dict[str, object] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schemas = {"weather": WEATHER, "time": time}
    tools = Tools(schemas, choice=choice, named="time", strict=strict)
    found = conversation(model("openai", "openai"), tools, None)
    matcher = compile_guide(Guide("ebnf", found.request.guided_decoding.guide), tokenizer)
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = f"{analysis}<|channel|>final<|message|>Yes."
    to_time = f'{analysis}<|channel|>commentary to=functions.time <|constrain|>json<|message|>{{"a": 1}}'
    to_weather = to_time.replace("time", "weather").replace('"a": 1', '"city": "Oslo"')
    texts = [(to_time, True), (to_time.replace("1", "2"), False), (to_weather, "weather" in names), (answer, False)]
    for text, is_accepted in texts:
        trial = matcher.deep_copy()
        ids = tokenizer.library.tokenize_str(text)
        assert (trial.validate_tokens(ids) == len(ids) and trial.consume_tokens(ids) and trial.is_accepting()) == (
            is_accepted
        )
    assert read(found, to_time) == ("", "Hm.", [("time", {"a": 1})])
    assert {field.rpartition(".")[2] for field in found.guide_parts()} == set(names)


def test_tools_that_cannot_be_combined_with_a_format_are_refused() -> None:
    regex = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide="a+")
    for chat, guide in ((model("none"), GUIDE), (model(), regex)):
        with pytest.raises(InvalidArgumentError, match="set tool_choice to none") as raised:
            conversation(chat, guide=guide)
        assert raised.value.field == "tools"
        conversation(chat, guide=guide, tools=Tools())


def test_tools_that_the_template_does_not_show_leave_the_format_unchanged() -> None:
    for name in ("hermes", "llama3_json"):
        found = conversation(model(name, template="{{ messages }}"))
        assert found.request.guided_decoding == GUIDE
        assert read(found, SUNNY) == (SUNNY, "", [])


def test_an_invalid_schema_is_left_to_the_check_of_guides() -> None:
    for text in ("{", "3"):
        guide = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=text)
        assert conversation(model(), guide=guide).request.guided_decoding == guide


def test_schemas_of_required_calls_may_have_references() -> None:
    def tree(kind: str) -> dict[str, object]:
        """Return the schema of a tree whose nodes have a value of this type, as pydantic would write it."""
        fields = {"value": {"$ref": "#/$defs/Value"}, "near": {"type": "array", "items": {"$ref": "#"}}}
        known = {"type": "object", "properties": fields, "required": ["value"], "additionalProperties": False}
        return {**known, "$defs": {"Value": {"type": kind, "description": 'see "$ref": "#"'}}}

    required = Tools({"count": tree("integer"), "name": tree("string")}, choice="required")
    for is_thinking, before in ((False, ""), (True, "Hm.</think>")):
        guide = conversation(model(reasoning="think"), required, None, is_thinking=is_thinking).request.guided_decoding
        kind = "ebnf" if is_thinking else "json_schema"
        for call, fits in (
            ('{"name": "count", "parameters": {"value": 1, "near": [{"value": 2}]}}', True),
            ('{"name": "name", "parameters": {"value": "a", "near": [{"value": "b"}]}}', True),
            ('{"name": "count", "parameters": {"value": "a"}}', False),
            ('{"name": "name", "parameters": {"value": "a", "near": [{"value": 2}]}}', False),
        ):
            library = GuideTokenizer(llguidance.LLTokenizer("byte"), {})
            matcher = compile_guide(Guide(kind, guide.guide), library)
            tokens = library.tokenize_str(f"{before}[{call}]")
            assert (all(map(matcher.consume_token, tokens)) and matcher.is_accepting()) == fits


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"city": {"type": "string"}}, "required": ["city"]},
        {"anyOf": [{"required": ["city"]}, {"type": "string"}]},
        {"$ref": "#/$defs/Place", "$defs": {"Place": {"properties": {"city": {"type": "string"}}}}},
    ],
)
def test_arguments_are_an_object_even_if_their_schema_has_no_type(schema: dict[str, object]) -> None:
    named = Tools({"find": schema}, choice="named", named="find")
    required = Tools({"find": schema}, choice="required")
    strict = Tools({"find": schema}, strict=frozenset({"find"}))
    for tools, kind, before, after in (
        (named, "json_schema", "", ""),
        (required, "json_schema", '[{"name": "find", "parameters": ', "}]"),
        (strict, "ebnf", '<tool_call>\n{"name": "find", "arguments": ', "}\n</tool_call>"),
    ):
        guide = conversation(model(), tools, None).request.guided_decoding
        for arguments, fits in (('{"city": "Oslo"}', True), ("3", False), ('"Oslo"', False), ("[]", False)):
            library = GuideTokenizer(llguidance.LLTokenizer("byte"), {})
            matcher = compile_guide(Guide(kind, guide.guide), library)
            tokens = library.tokenize_str(before + arguments + after)
            assert (all(map(matcher.consume_token, tokens)) and matcher.is_accepting()) == fits


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_tool_that_is_not_strict_does_not_refuse_a_strict_one(is_thinking: bool) -> None:
    odd: dict[str, object] = {"properties": {"a": {"type": "string", "pattern": "(?=b)"}}}
    exact: dict[str, object] = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = Tools({"odd": odd, "exact": exact}, choice="required", strict=frozenset({"exact"}))
    found = conversation(model(reasoning="think"), tools, None, is_thinking=is_thinking)
    library = GuideTokenizer(llguidance.LLTokenizer("byte"), {})
    before = "Hm.</think>" if is_thinking else ""
    for call, fits in (
        ('{"name": "odd", "parameters": {"a": "c"}}', True),
        ('{"name": "odd", "parameters": {"a": 1}}', False),
        ('{"name": "exact", "parameters": {"n": 1}}', True),
        ('{"name": "exact", "parameters": {"n": "1"}}', False),
    ):
        for calls in (call, f'{{"name": "exact", "parameters": {{"n": 2}}}}, {call}'):
            matcher = compile_guide(Guide("ebnf", found.request.guided_decoding.guide), library)
            tokens = library.tokenize_str(f"{before}[{calls}]")
            assert (all(map(matcher.consume_token, tokens)) and matcher.is_accepting()) == fits
    assert [name for name, _ in read(found, f'{before}[{{"name": "exact", "parameters": {{"n": 2}}}}]')[2]] == ["exact"]
    for name, part in found.guide_parts().items():
        assert ('"lenient": true' in part.guide) == name.endswith("odd")


@pytest.mark.parametrize(("strict", "is_lenient"), [([], True), (["find"], False)])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_schemas_of_required_calls_are_lenient_without_strict_tools(
    choice: Literal["required", "named"], strict: list[str], is_lenient: bool
) -> None:
    tools = Tools({"find": {"properties": {"a": {"pattern": "(?=b)"}}}}, {}, choice, "find", frozenset(strict))
    asked = conversation(model(), tools, None)
    guides = [asked.request.guided_decoding, *asked.guide_parts().values()]
    settings = [json.loads(guide.guide).get("x-guidance", {}) for guide in guides]
    assert settings == [{"lenient": True} if is_lenient else {}] * 2


def test_complete_calls_are_read_if_required_ones_are_cut_off() -> None:
    required = Tools(TOOLS.schemas, choice="required")
    text = '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "ti'
    for chat, is_thinking, before in ((model(), False, ""), (model(reasoning="think"), True, "Hm.</think>\n\n")):
        found = conversation(chat, required, None, is_thinking=is_thinking)
        events = SequenceReader(found, "r", 0).read(before + text, is_final=True)
        assert [event.index for event in events if isinstance(event, CallBegin | CallEnd)] == [0, 0]
        content, _, calls = summary(joined(events))
        assert (content, calls) == ('{"name": "ti', [OSLO])


def chat_ignored(fields: dict[str, object], chat: ChatModel) -> Sequence[str]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}]
    body = Body({"messages": [{"role": "user", "content": "Hi"}], "tools": tools} | fields)
    return chat_job(body, Vocabulary(lambda token: bytes([97 + token]), chat)).ignored


def response_ignored(fields: dict[str, object], chat: ChatModel) -> Sequence[str]:
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    return read_response(Body({"input": "Hi", "tools": tools} | fields), chat).ignored


def messages_ignored(fields: dict[str, object], chat: ChatModel) -> Sequence[str]:
    tools = [{"name": "weather", "input_schema": WEATHER, "strict": True}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "tools": tools}
    return read_messages(Body(body | fields), chat).ignored


Read = Callable[[dict[str, object], ChatModel], Sequence[str]]


@pytest.mark.parametrize(
    ("read_body", "field", "required"),
    [
        (chat_ignored, "tools.function.strict", "required"),
        (response_ignored, "tools.strict", "required"),
        (messages_ignored, "tools.strict", {"type": "any"}),
    ],
)
def test_strict_without_a_grammar_is_listed_as_ignored(read_body: Read, field: str, required: object) -> None:
    assert read_body({}, model("none")) == [field]
    assert read_body({}, model("none", template="{{ messages }}")) == ["tools"]
    assert read_body({}, model("llama3_json")) == []
    assert read_body({"tool_choice": required}, model("none")) == []


def test_custom_tools_do_not_ask_for_strict() -> None:
    fields: dict[str, object] = {"tools": [{"type": "custom", "name": "patch"}]}
    assert response_ignored(fields, model("none")) == []


@pytest.mark.parametrize(
    ("read_body", "fields", "tool"),
    [
        (
            chat_ignored,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            response_ignored,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            {"type": "function", "name": "weather"},
        ),
        (
            messages_ignored,
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"name": "weather", "input_schema": WEATHER},
        ),
    ],
)
def test_every_api_refuses_what_cannot_be_combined(read_body: Read, fields: dict[str, object], tool: object) -> None:
    body = {**fields, "tools": [tool]}
    read_body(body, model("hermes"))
    with pytest.raises(InvalidArgumentError) as raised:
        read_body(body, model("none"))
    assert raised.value.field == "tools"


def test_a_named_call_that_has_not_begun_is_none() -> None:
    named = Tools({"find": {}}, choice="named", named="find")
    found = conversation(model(reasoning="think"), named, None, is_thinking=True)
    events = SequenceReader(found, "r", 0).read("I should look for", is_final=True)
    assert events == [ReasoningDelta("I should look for")]
    events = SequenceReader(found, "r", 0).read('Hm.</think>{"a": 1', is_final=True)
    assert [type(event) for event in events][:3] == [ReasoningDelta, CallBegin, CallArguments]
