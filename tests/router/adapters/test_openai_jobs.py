"""Conversion of request bodies to jobs, and of output to responses, without a service."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest

from midstream.chunk import Chunk, FinishReason
from midstream.errors import InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.extras import Extras, LogProbs
from protos import generation_pb2 as pb
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat
from router.protocols.conversation import ChatModel
from router.protocols.openai.body import Body
from router.protocols.openai.echo import EchoedPrompt
from router.protocols.openai.jobs import Job, Vocabulary, chat_job, completion_job
from router.protocols.openai.positions import Position, event_prefix, read_event_id
from router.protocols.openai.reply import mean_log_prob

VOCABULARY = Vocabulary(lambda token: bytes([97 + token]), ChatModel(ModelFormat(TOOL_FORMATS["hermes"])))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def chat(**fields: object) -> Job:
    return chat_with(VOCABULARY, **fields)


def chat_with(vocabulary: Vocabulary, **fields: object) -> Job:
    job = chat_job(Body({"messages": [{"role": "user", "content": "Hi"}]} | fields), vocabulary)
    assert job.conversation is not None
    job.conversation.add_guide()
    return job


def test_every_form_of_a_prompt_is_taken() -> None:
    good: list[tuple[object, int]] = [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2), (["a", [1]], 2)]
    for prompt, count in good:
        job = completion_job(Body({"prompt": prompt, "n": 2}), VOCABULARY)
        assert (len(job.requests), job.num_choices) == (count, 2)
        assert len({request.request_id for request in job.requests}) == count
    bad: list[object] = [None, [], [None], {"a": 1}, [1, "a"], [[1.5]], True]
    for prompt in bad:
        with pytest.raises(InvalidArgumentError) as raised:
            completion_job(Body({"prompt": prompt}), VOCABULARY)
        assert raised.value.field == "prompt"


@pytest.mark.parametrize("field", ["suffix", "prompt_embeds", "logits_processors"])
def test_unsupported_fields_that_change_the_output_are_rejected(field: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        completion_job(Body({"prompt": "a", field: "x"}), VOCABULARY)
    assert raised.value.field == field
    completion_job(Body({"prompt": "a", field: None}), VOCABULARY)


def test_log_probabilities_are_valid_json_even_where_a_token_cannot_be() -> None:
    rows = LogProbs((-math.inf, math.nan), 1, (3, 4), (-0.5, -math.inf), (1, 2))
    end = {"is_sequence_final": True, "is_final": True, "finish_reason": FinishReason.LENGTH}
    for job in (completion_job(Body({"prompt": "a", "logprobs": 1}), VOCABULARY), chat(logprobs=True, top_logprobs=1)):
        chunk = Chunk(0, 0, [1, 2], "bc", extras=Extras(rows), **end)  # type: ignore[arg-type]
        text = json.dumps(job.shape.whole(0, chunk), allow_nan=False)
        # In a completion, the most likely tokens include the generated token itself.
        assert text.count("-9999.0") == (5 if "text_offset" in text else 3)
        assert "-0.5" in text


def test_an_echoed_prompt_has_its_log_probabilities_before_the_output() -> None:
    job = completion_job(Body({"prompt": [0, 1], "echo": True, "logprobs": 1}), VOCABULARY)
    assert job.requests[0].output.prompt_log_probs == 1
    extras = Extras(LogProbs((-1.0,), 1, (2,), (-1.0,), (1,)), LogProbs((-2.0,), 1, (7,), (-0.1,), (3,)))
    choice = job.shape.whole(0, Chunk(0, 0, [0, 1, 2], "abc", extras=extras))
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -2.0, -1.0],
        "top_logprobs": [None, {"h": -0.1, "b": -2.0}, {"c": -1.0}],
        "text_offset": [0, 1, 2],
    }


def test_every_choice_has_its_prompts_log_probabilities() -> None:
    """The log probabilities arrive with sequence 0, in pieces, after the text of the prompts."""
    rows = [LogProbs((value,), 0, (), (), (1,)) for value in (-2.0, -3.0, -1.0, -1.5)]
    echoed, sent = EchoedPrompt(), list[Chunk]()
    for number in (0, 1):
        assert echoed.release(Chunk(number, 0, [0, 1, 2], "abc")) == []
    assert echoed.release(Chunk(1, 3, [4], "e", extras=Extras(rows[3]))) == []
    assert echoed.release(Chunk(0, 3, (), "", extras=Extras(None, rows[0]))) == []
    sent += echoed.release(Chunk(0, 3, [3], "d", extras=Extras(rows[2], rows[1])))
    assert [chunk.sequence_index for chunk in sent] == [1, 0]
    job = completion_job(Body({"prompt": [0, 1, 2], "echo": True, "logprobs": 0, "n": 2}), VOCABULARY)
    shape: Any = job.shape
    values = [shape.part(chunk.sequence_index, chunk)["logprobs"] for chunk in sent]
    assert [value["token_logprobs"] for value in values] == [[None, -2.0, -3.0, -1.5], [None, -2.0, -3.0, -1.0]]
    (third,) = echoed.release(Chunk(2, 0, [0, 1, 2, 3], "abcd", extras=Extras(rows[3])))
    assert shape.part(2, third)["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, -1.5]
    later = Chunk(0, 4, [5], "f", extras=Extras(rows[0]))
    assert echoed.release(later) == [later]
    assert shape.part(0, later)["logprobs"]["text_offset"] == [4]


def test_a_token_with_a_partial_character_is_shown_as_bytes() -> None:
    """Different tokens have different names, and the concatenated bytes of all tokens are the bytes of the text."""
    pieces = [b"a", b" \xf0\x9f", b"\x98\x80", b"b"]
    vocabulary = Vocabulary(pieces.__getitem__)
    rows = LogProbs((-1.0,) * 4, 2, (1, 2) * 4, (-1.0, -2.0) * 4, (1,) * 4)
    chunk = Chunk(0, 0, [0, 1, 2, 3], "a 😀b", extras=Extras(rows))
    completion: Any = completion_job(Body({"prompt": "a", "logprobs": 2}), vocabulary).shape.whole(0, chunk)
    assert completion["logprobs"]["tokens"] == ["a", r"bytes: \xf0\x9f", r"bytes:\x98\x80", "b"]
    assert completion["logprobs"]["top_logprobs"][1] == {r"bytes: \xf0\x9f": -1.0, r"bytes:\x98\x80": -2.0}
    assert completion["logprobs"]["text_offset"] == [0, 1, 2, 3]
    message: Any = chat_with(vocabulary, logprobs=True).shape.whole(0, chunk)
    entries = message["logprobs"]["content"]
    assert entries[1]["token"] == r" \xf0\x9f"
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "a 😀b"


def test_text_offsets_omit_special_tokens_as_the_text_does() -> None:
    pieces = [b"<s>", b"ab", b"<x>", b"c"]
    vocabulary = Vocabulary(pieces.__getitem__, special_ids={0, 2})
    chunk = Chunk(0, 0, [0, 1, 2, 3], "abc", extras=Extras(LogProbs((-1.0,) * 4, 0, (), (), (1,) * 4)))
    for fields, offsets in (({}, [0, 0, 2, 2]), ({"skip_special_tokens": False}, [0, 3, 5, 8])):
        job = completion_job(Body({"prompt": "a", "logprobs": 0, **fields}), vocabulary)
        choice: Any = job.shape.whole(0, chunk)
        assert choice["logprobs"]["text_offset"] == offsets


def test_text_offsets_continue_in_a_resumed_stream() -> None:
    """After each token, even in the middle of a character, another router can continue from the event's id."""
    pieces = [b"a", b" \xf0\x9f", b"\x98", b"\x80", b"\xc3", b"\xa9b", b"\xff", b"c"]
    vocabulary, body = Vocabulary(pieces.__getitem__), Body({"prompt": "a", "logprobs": 0, "stream": True})

    def offsets(job: Job, tokens: range) -> list[int]:
        rows = LogProbs((-1.0,) * len(tokens), 0, (), (), (1,) * len(tokens))
        part: Any = job.shape.part(0, Chunk(0, tokens.start, list(tokens), "", extras=Extras(rows)))
        return list(part["logprobs"]["text_offset"])

    whole = offsets(completion_job(body, vocabulary), range(8))
    assert whole == [0, 1, 2, 2, 3, 3, 5, 6]
    for cut in range(1, 8):
        first, second = completion_job(body, vocabulary), completion_job(body, vocabulary)
        known, position = offsets(first, range(cut)), Position()
        reached = first.shape.text_offset(0)
        assert reached is not None
        position.advance(Chunk(0, 0, list(range(cut)), ""), counts_characters=False)
        position.characters[0], position.partial[0] = reached
        _, (read,) = read_event_id(event_prefix("r") + str(position), 1)
        second.shape.begin_at(0, read.characters[0], read.partial.get(0, b""))
        assert known + offsets(second, range(cut, 8)) == whole


def test_best_of_needs_log_probabilities_and_does_not_show_them() -> None:
    job = completion_job(Body({"prompt": "a", "best_of": 3}), VOCABULARY)
    assert (job.requests[0].sampling.num_return_sequences, job.num_choices) == (3, 1)
    assert job.requests[0].output.HasField("log_probs")
    extras = Extras(LogProbs((-1.0,), 0, (), (), (1,)))
    assert job.shape.whole(0, Chunk(0, 0, [1], "b", extras=extras))["logprobs"] is None


def test_a_required_call_uses_a_grammar_and_an_optional_one_does_not() -> None:
    auto = chat(tools=TOOLS)
    assert json.loads(auto.requests[0].chat.tools_json) == TOOLS
    assert not auto.requests[0].HasField("guided_decoding")
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.requests[0].guided_decoding.guide_type == pb.GUIDE_TYPE_JSON_SCHEMA
    assert json.loads(named.requests[0].guided_decoding.guide) == {**SCHEMA, "x-guidance": {"lenient": True}}
    required = json.loads(
        chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).requests[0].guided_decoding.guide
    )
    assert (required["minItems"], required["maxItems"]) == (1, 1)
    assert required["items"]["anyOf"][0]["properties"] == {"name": {"const": "weather"}, "parameters": SCHEMA}
    none = chat(tools=TOOLS, tool_choice="none")
    assert (none.requests[0].chat.tools_json, none.reads_text) == ("", False)


def test_only_allowed_tools_are_offered() -> None:
    other = {"type": "function", "function": {"name": "time", "strict": True}}
    for mode in ("auto", "required"):
        job = chat(tools=[*TOOLS, other], tool_choice=allowed("weather", mode=mode))
        assert json.loads(job.requests[0].chat.tools_json) == TOOLS
        guide = job.requests[0].guided_decoding.guide
        assert ("weather" in guide, "time" in guide) == (mode == "required", False)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("kind", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}])
def test_a_format_of_the_answer_has_no_effect_if_a_call_is_required(choice: object, kind: dict[str, object]) -> None:
    job = chat(tools=TOOLS, tool_choice=choice, response_format=kind)
    assert job.ignored == ["response_format"]
    assert job.requests[0].guided_decoding == chat(tools=TOOLS, tool_choice=choice).requests[0].guided_decoding
    assert job.names["guided_decoding"] == "tools[0].function.parameters"
    assert chat(tools=TOOLS, tool_choice=choice, response_format={"type": "text"}).ignored == []


def allowed(name: str, **fields: object) -> dict[str, object]:
    tool = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool], **fields}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("weather", mode="x")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("x")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": TOOLS, "tool_choice": allowed("x", tools=[{"type": "custom"}])},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": allowed("x", mode="required", tools=[])}, "tool_choice.allowed_tools.tools"),
        ({"functions": [1]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ],
)
def test_contradictory_fields_are_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(MidstreamError) as raised:
        chat(**fields)
    assert raised.value.field == field


def test_a_call_is_a_tool_call_of_the_message_and_the_reason_of_its_end() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>'
    end = Chunk(0, 0, [1], text, is_sequence_final=True, is_final=True, finish_reason=FinishReason.STOP)
    choice = json.loads(json.dumps(chat(tools=TOOLS).shape.whole(0, end)))
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "x"}'})
    assert call["id"].startswith("call_")
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert json.loads(json.dumps(chat().shape.whole(0, end)))["message"]["content"] == text


THINKING = ChatModel(
    ModelFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]),
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
)


def test_reasoning_is_a_field_of_its_own() -> None:
    job = chat_with(Vocabulary(VOCABULARY.spell, THINKING), tools=TOOLS)
    job.shape.request_id = "r"
    text = "<think>\nHm.\n</think>\n\nYes."
    parts = [part for i, character in enumerate(text) if (part := job.shape.part(0, Chunk(0, i, [1], character)))]
    end = job.shape.part(0, Chunk(0, len(text), is_sequence_final=True, finish_reason=FinishReason.STOP))
    assert end is not None
    deltas = [part["delta"] for part in (*parts, end)]
    # No event is sent while the parser waits for the rest of a tag; only the last event has an empty delta.
    assert [delta for delta in deltas if not delta] == [{}]
    assert all(isinstance(delta, dict) for delta in deltas)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."  # type: ignore[attr-defined]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."  # type: ignore[attr-defined]
    message = chat_with(Vocabulary(VOCABULARY.spell, THINKING)).shape.whole(0, Chunk(0, 0, [1], text))["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hm."}


def test_effort_is_what_the_template_knows() -> None:
    for effort, is_on in (("none", False), ("high", True), ("max", True)):
        job = chat_with(Vocabulary(VOCABULARY.spell, THINKING), reasoning_effort=effort)
        assert json.loads(job.requests[0].chat.template_variables_json) == {"enable_thinking": is_on}
    given = {"enable_thinking": True}
    job = chat_with(Vocabulary(VOCABULARY.spell, THINKING), reasoning_effort="none", chat_template_kwargs=given)
    assert json.loads(job.requests[0].chat.template_variables_json) == given
    gpt = Vocabulary(VOCABULARY.spell, ChatModel(template="Reasoning: {{ reasoning_effort }}"))
    job = chat_with(gpt, reasoning_effort="minimal")
    assert json.loads(job.requests[0].chat.template_variables_json) == {"reasoning_effort": "low"}
    with pytest.raises(UnsupportedError) as raised:
        chat(reasoning_effort="high")
    assert raised.value.field == "reasoning_effort"
    assert not chat(reasoning_effort="none").requests[0].chat.template_variables_json
    always = ChatModel(ModelFormat(None, REASONING_FORMATS["deepseek_r1"]))
    with pytest.raises(UnsupportedError):
        chat_with(Vocabulary(VOCABULARY.spell, always), reasoning_effort="none")


def test_messages_that_clients_send_back_are_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}
    answer = {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    body = Body({"messages": [{"role": "user", "content": "Hi"}, answer]})
    message = chat_job(body, VOCABULARY).requests[0].chat.messages[1]
    assert not [path for path, _ in body.unread() if "reasoning" in path]
    assert message.reasoning_content == "Hm."
    assert json.loads(message.tool_calls_json)[0]["function"]["arguments"] == ""


def test_an_assistant_may_have_said_nothing() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    for fields in ({"tool_calls": [call]}, {"reasoning_content": "Hm."}, {"refusal": "No."}, {"content": ""}):
        job = chat(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", **fields}])
        assert not job.requests[0].chat.messages[1].content


def test_a_role_of_the_template_is_accepted() -> None:
    known = Vocabulary(VOCABULARY.spell, ChatModel(template="{% if message.role == 'ipython' %}"))
    job = chat_job(Body({"messages": [{"role": "ipython", "content": "5"}]}), known)
    assert job.requests[0].chat.messages[0].role == "ipython"


def test_tiers_are_priorities() -> None:
    found = [(chat(service_tier=tier).requests[0].priority) for tier in ("auto", "scale", "flex", "fast", "priority")]
    assert found == [0, 0, -50, 50, 50]
    assert chat(service_tier="flex", priority=3).requests[0].priority == -3


def test_a_strict_tool_is_a_grammar_even_where_the_call_is_the_model_s_choice() -> None:
    strict = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
    guide = chat(tools=strict).requests[0].guided_decoding
    assert guide.guide_type == pb.GUIDE_TYPE_EBNF_GRAMMAR
    assert "<tool_call>" in guide.guide
    assert not chat(tools=TOOLS).requests[0].HasField("guided_decoding")


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"guided_json_object": True}],
)
def test_a_json_object_is_no_array(fields: dict[str, Any]) -> None:
    guide = chat(**fields).requests[0].guided_decoding
    assert guide.guide_type == pb.GUIDE_TYPE_JSON_SCHEMA
    assert json.loads(guide.guide) == {"type": "object"}


def test_reasoning_precedes_text_that_a_grammar_requires() -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ):
        job = chat_job(
            Body({"messages": [{"role": "user", "content": "Hi"}], **fields}), Vocabulary(VOCABULARY.spell, THINKING)
        )
        assert job.conversation is not None
        job.conversation.is_thinking = True
        job.conversation.add_guide()
        guide = job.requests[0].guided_decoding
        assert (guide.guide_type, "</think>" in guide.guide) == (pb.GUIDE_TYPE_EBNF_GRAMMAR, True)
        answer = (
            '[{"name": "weather", "parameters": {"city": "x"}}]' if fields.get("tool_choice") == "required" else "{}"
        )
        message = job.shape.whole(0, Chunk(0, 0, [1], "Hm.</think>\n" + answer))["message"]
        assert isinstance(message, dict)
        assert message["reasoning_content"] == "Hm."
        assert ("tool_calls" in message) == ("tools" in fields)


def test_a_stop_reason_is_what_the_client_asked_for() -> None:
    """As in vLLM, `stop_reason` is null if the model ends the text itself."""
    for fields, matched, reason in (
        ({}, 2, None),
        ({"stop_token_ids": [5]}, 2, None),
        ({"stop_token_ids": [5]}, 5, 5),
        ({"stop": "END"}, "END", "END"),
    ):
        end = Chunk(0, 0, [1], "b", is_sequence_final=True, finish_reason=FinishReason.STOP, matched_stop=matched)
        choice = completion_job(Body({"prompt": "a", **fields}), VOCABULARY).shape.whole(0, end)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_log_probabilities_of_a_prompt_have_the_form_of_vllm() -> None:
    body: dict[str, object] = {"prompt": [0, 1, 2], "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1}
    job = completion_job(Body(body), VOCABULARY)
    assert (job.requests[0].output.prompt_log_probs, job.echoes_log_probs) == (1, False)
    rows = LogProbs((-2.0, -0.1), 2, (7, 1, 2, 3), (-0.1, -2.0, -0.1, -3.0), (2, 1))
    assert job.shape.prompt([0, 1, 2], rows) == {
        "prompt_token_ids": [0, 1, 2],
        "prompt_logprobs": [
            None,
            {
                "1": {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
                "7": {"logprob": -0.1, "rank": 1, "decoded_token": "h"},
            },
            {"2": {"logprob": -0.1, "rank": 1, "decoded_token": "c"}},
        ],
    }
    with pytest.raises(InvalidArgumentError) as raised:
        completion_job(Body({**body, "stream": True}), VOCABULARY)
    assert raised.value.field == "prompt_logprobs"


def test_tokens_can_be_named_by_their_ids() -> None:
    rows = LogProbs((-1.0,), 1, (3,), (-0.5,), (2,))
    chunk, fields = Chunk(0, 0, [1], "b", extras=Extras(rows)), {"return_tokens_as_token_ids": True}
    completion: Any = completion_job(Body({"prompt": "a", "logprobs": 1, **fields}), VOCABULARY).shape.part(0, chunk)
    assert completion["logprobs"]["tokens"] == ["token_id:1"]
    assert completion["logprobs"]["top_logprobs"] == [{"token_id:3": -0.5, "token_id:1": -1.0}]
    message: Any = chat(logprobs=True, top_logprobs=1, **fields).shape.part(0, chunk)
    (entry,) = message["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:1", "token_id:3")


def test_a_developer_is_the_system_unless_the_template_knows_developers() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    known = Vocabulary(VOCABULARY.spell, ChatModel(template="{% if role == 'developer' %}"))
    for vocabulary, role in ((VOCABULARY, "system"), (known, "developer")):
        job = chat_job(Body({"messages": messages}), vocabulary)
        assert [message.role for message in job.requests[0].chat.messages] == [role, "user"]


def test_the_best_sequence_is_chosen_by_its_own_tokens_and_not_by_an_echoed_prompt() -> None:
    # Mean log probabilities of -1 and -1.5 for 2 and 10 tokens after a prompt of 8.
    short, long = Chunk(0, 0, [0] * 10, cumulative_log_prob=-2.0), Chunk(1, 0, [0] * 18, cumulative_log_prob=-15.0)
    assert sorted([long, short], key=partial(mean_log_prob, 8), reverse=True) == [short, long]
    assert mean_log_prob(8, short) == -1.0
    assert mean_log_prob(8, long) == -1.5


def test_the_prompt_for_the_answer_can_be_left_out_by_a_template_variable() -> None:
    native = chat(chat_template_kwargs={"add_generation_prompt": False, "mood": "good"}).requests[0].chat
    assert native.HasField("add_generation_prompt")
    assert not native.add_generation_prompt
    assert json.loads(native.template_variables_json) == {"mood": "good"}
    for fields, name in (
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}, "add_generation_prompt": True},
            "chat_template_kwargs.add_generation_prompt",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ):
        with pytest.raises(InvalidArgumentError) as raised:
            chat(**fields)
        assert raised.value.field == name


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"grammar": 5}, "grammar"),
        ({"json_schema": ["x"]}, "json_schema"),
        ({"ebnf": 'root ::= "a"', "regex": "a"}, "regex"),
        ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format.schema"),
    ],
)
def test_only_one_guide_is_taken(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        chat(**fields)
    assert raised.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": "[ ]?"},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "guided_whitespace_pattern": "[ ]?",
        },
    ],
)
def test_the_white_space_in_json_can_be_set(fields: dict[str, object]) -> None:
    guide = json.loads(chat(**fields).requests[0].guided_decoding.guide)
    assert guide == {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ ]?"}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": ""}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_only_json_has_white_space_to_set(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        chat(**fields)
    assert raised.value.field == field
