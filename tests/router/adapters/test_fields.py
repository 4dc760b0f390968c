"""Tests of every row in the tables of docs/adapters.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import MidstreamError, UnsupportedError
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat
from router.protocols.anthropic.request import read_messages
from router.protocols.conversation import ChatModel, Conversation
from router.protocols.embeddings.request import read_classify, read_embeddings, read_rerank, read_score
from router.protocols.fields import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    TABLES,
    Table,
    ignored_fields,
    markdown,
)
from router.protocols.openai.body import Body
from router.protocols.openai.jobs import Job, Vocabulary, chat_job, completion_job
from router.protocols.responses.request import read_response

DOCS = Path(__file__).parents[3] / "docs" / "adapters.md"
MODEL = ChatModel(
    ModelFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]),
    "{% if enable_thinking is defined %}{% endif %}{{ tools }}",
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOL = {"name": "f", "input_schema": SCHEMA}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
KEPT = {"type": "ephemeral"}
KEPT_LONG = {"type": "ephemeral", "ttl": "1h"}

CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


def json_format(**fields: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, **fields}}}


def turn(**fields: object) -> dict[str, object]:
    said = {"role": "assistant", "content": "x", **fields}
    return {"messages": [{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "Go"}]}


# For each field of completions and chat completions: a value that has an effect, and the other fields that it requires.
COMMON_EXAMPLES: dict[str, tuple[object, dict[str, object]]] = {
    "n": (2, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "seed": (7, {}),
    "stop": ("x", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "response_format": (JSON, {}),
    "service_tier": ("flex", {}),
    "user": ("u", {}),
    "safety_identifier": ("u", {}),
    "metadata": ({"a": "b"}, {}),
    "prompt_cache_key": ("k", {}),
    "top_k": (5, {}),
    "min_p": (0.1, {}),
    "repetition_penalty": (1.1, {}),
    "min_tokens": (2, {}),
    "use_beam_search": (True, {"n": 2}),
    "length_penalty": (0.5, {"use_beam_search": True}),
    "stop_token_ids": ([5], {}),
    "bad_words": (["x"], {}),
    "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {"stop": "x"}),
    "skip_special_tokens": (False, {}),
    "guided_json": (SCHEMA, {}),
    "guided_json_object": (True, {}),
    "guided_regex": ("a+", {}),
    "guided_grammar": ('start: "a"', {}),
    "guided_choice": (["a", "b"], {}),
    "guided_whitespace_pattern": (" ?", {"guided_json": SCHEMA}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "grammar": ('root ::= "a"', {}),
    "json_schema": (SCHEMA, {}),
    "ebnf": ('root ::= "a"', {}),
    "regex": ("a+", {}),
    "response_format.schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object"}},
    ),
    "return_token_ids": (True, {}),
    "spaces_between_special_tokens": (True, {}),
    "add_special_tokens": (False, {}),
    "allowed_token_ids": ([5], {}),
    "logits_processors": (["x"], {}),
    "prompt_logprobs": (1, {}),
    "return_tokens_as_token_ids": (True, {}),
    "truncate_prompt_tokens": (5, {}),
    "request_id": ("other", {}),
    "priority": (5, {}),
    "cache_salt": ("x", {}),
    "detached": (True, {}),
    "timeout_ms": (5, {}),
    "return_receipt": (True, {}),
    "stream_options.include_obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True},
    ),
    "response_format.json_schema": (
        {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "text"}},
    ),
    "response_format.json_schema.name": (json_format(name="x"), json_format()),
    "response_format.json_schema.description": (json_format(description="x"), json_format()),
    "response_format.json_schema.strict": (json_format(strict=False), json_format()),
}
COMPLETIONS_EXAMPLES = COMMON_EXAMPLES | {
    "model": ("m", {}),
    "prompt": ("b", {}),
    "max_tokens": (5, {}),
    "best_of": (3, {}),
    "logprobs": (0, {}),
    "echo": (True, {}),
    "suffix": ("x", {}),
    "prompt_embeds": ("x", {}),
}
# If the key is a path such as `a.b`, the two values are a body with this field and a body without it.
CHAT_EXAMPLES = COMMON_EXAMPLES | {
    "model": ("m", {}),
    "messages": ([{"role": "user", "content": "Other"}], {}),
    "max_completion_tokens": (5, {}),
    "max_tokens": (5, {}),
    "logprobs": (True, {}),
    "top_logprobs": (3, {"logprobs": True}),
    "tools": ([FUNCTION], {}),
    "tool_choice": ("required", {"tools": [FUNCTION]}),
    "parallel_tool_calls": (False, {"tools": [FUNCTION]}),
    "reasoning_effort": ("none", {}),
    "prompt_cache_retention": ("24h", {}),
    "prompt_cache_options": ({"ttl": "30m"}, {}),
    "prompt_cache_options.mode": ({"prompt_cache_options": {"mode": "explicit"}}, {"prompt_cache_options": {}}),
    "store": (True, {}),
    "prediction": ({"type": "content", "content": "x"}, {}),
    "audio": ({"voice": "x"}, {}),
    "modalities": (["audio"], {}),
    "verbosity": ("low", {}),
    "web_search_options": ({"a": 1}, {}),
    "functions": ([{"name": "f"}], {}),
    "function_call": ("auto", {}),
    "moderation": ({"model": "m"}, {}),
    "echo": (True, {}),
    "documents": ([{}], {}),
    "chat_template": ("x", {}),
    "continue_final_message": (True, {}),
    "chat_template_kwargs": ({"a": 1}, {}),
    "add_generation_prompt": (False, {}),
    "messages.*": (turn(colour="red"), turn()),
    "messages.content.cache_control": (
        turn(content=[{"type": "text", "text": "x", "cache_control": KEPT}]),
        turn(content=[{"type": "text", "text": "x"}]),
    ),
    "tools.cache_control": ({"tools": [{**FUNCTION, "cache_control": KEPT}]}, {"tools": [FUNCTION]}),
    "tools.function.cache_control": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "cache_control": KEPT}}]},
        {"tools": [FUNCTION]},
    ),
    "messages.refusal": (turn(refusal="x"), turn()),
    "messages.annotations": (turn(annotations=[1]), turn()),
    "messages.parsed": (turn(parsed={"a": 1}), turn()),
    "messages.tool_calls.function.parsed_arguments": (
        turn(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}]),
        turn(tool_calls=[CALL]),
    ),
    "messages.audio": (turn(audio={"id": "x"}), turn()),
    "messages.function_call": (turn(function_call={"name": "f"}), turn()),
    "messages.tool_calls.index": (turn(tool_calls=[{**CALL, "index": 1}]), turn(tool_calls=[CALL])),
    "messages.tool_calls.type": (turn(tool_calls=[{**CALL, "type": "function"}]), turn(tool_calls=[CALL])),
    "messages.content.annotations": (
        turn(content=[{"type": "text", "text": "x", "annotations": [1]}]),
        turn(content=[{"type": "text", "text": "x"}]),
    ),
    "messages.content.prompt_cache_breakpoint": (
        turn(content=[{"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}]),
        turn(content=[{"type": "text", "text": "x"}]),
    ),
    "messages.content.image_url.detail": (
        turn(content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}]),
        turn(content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    ),
}


def user(*blocks: dict[str, object]) -> dict[str, object]:
    calls: list[object] = [use(), use(id="u")]
    asked: list[object] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": calls}]
    return {"messages": [*asked, {"role": "user", "content": list(blocks)}]}


def assistant(*blocks: dict[str, object]) -> dict[str, object]:
    said: list[object] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": list(blocks)}]
    return {"messages": [*said, {"role": "user", "content": "Go"}]}


def text(value: str = "x", **fields: object) -> dict[str, object]:
    return {"type": "text", "text": value, **fields}


def result(**fields: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "t", "content": "x", **fields}


def use(**fields: object) -> dict[str, object]:
    return {"type": "tool_use", "id": "t", "name": "f", "input": {}, **fields}


def picture(**source: object) -> dict[str, object]:
    return {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png", **source}}


THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TWO = {"tools": [TOOL, {**TOOL, "name": "g"}]}
# For each field of messages: a body without it, or with another value, and a body with it.
MESSAGES_EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model": "m"}),
    "max_tokens": ({}, {"max_tokens": 3000}),
    "messages": ({}, user(text())),
    "messages.role": (user(text()), {"messages": [{"role": "system", "content": "x"}, *user(text())["messages"]]}),  # type: ignore[misc]
    "messages.*": (user(text()), user(text(colour="red"))),
    "messages.clear_at": ({}, {"messages": [{"role": "system", "content": "x", "clear_at": {"a": 1}}]}),
    "messages.output_config": (
        {},
        {"messages": [{"role": "system", "content": "x", "output_config": {"effort": "low"}}]},
    ),
    "messages.content": (user(text()), {"messages": [{"role": "user", "content": "y"}]}),
    "messages.content.type": (user(text()), user(result())),
    "messages.content.text": (user(text()), user(text("y"))),
    "messages.content.thinking": (
        assistant(text()),
        assistant({"type": "thinking", "thinking": "y", "signature": "s"}, text()),
    ),
    "messages.content.signature": (
        assistant({"type": "thinking", "thinking": "y", "signature": "s"}),
        assistant({"type": "thinking", "thinking": "y", "signature": "t"}),
    ),
    "messages.content.data": (assistant(text()), assistant({"type": "redacted_thinking", "data": "x"}, text())),
    "messages.content.id": (assistant(use()), assistant(use(id="u"))),
    "messages.content.name": (assistant(use()), assistant(use(name="g"))),
    "messages.content.input": (assistant(use()), assistant(use(input={"a": 1}))),
    "messages.content.source": (user(text()), user(picture())),
    "messages.content.source.type": (user(text()), user(picture())),
    "messages.content.source.data": (user(picture()), user(picture(data="AAAB"))),
    "messages.content.source.media_type": (user(picture()), user(picture(media_type="image/gif"))),
    "messages.content.source.url": ({}, user(picture(url="https://example.com/a.png"))),
    "messages.content.source.file_id": ({}, user(picture(file_id="file-1"))),
    "messages.content.transformations": ({}, user({**picture(), "transformations": {"x": 1}})),
    "messages.content.content.source": (user(result()), user(result(content=[picture()]))),
    "messages.content.content.source.type": (user(result()), user(result(content=[picture()]))),
    "messages.content.content.source.data": (
        user(result(content=[picture()])),
        user(result(content=[picture(data="AAAB")])),
    ),
    "messages.content.content.source.media_type": (
        user(result(content=[picture()])),
        user(result(content=[picture(media_type="image/gif")])),
    ),
    "messages.content.content.source.url": ({}, user(result(content=[picture(url="https://example.com/a.png")]))),
    "messages.content.content.source.file_id": ({}, user(result(content=[picture(file_id="file-1")]))),
    "messages.content.content.transformations": (
        {},
        user(result(content=[{**picture(), "transformations": {"x": 1}}])),
    ),
    "messages.content.caller": (assistant(use()), assistant(use(caller={"type": "direct"}))),
    "messages.content.tool_use_id": (user(result()), user(result(tool_use_id="u"))),
    "messages.content.content": (user(result()), user(result(content="y"))),
    "messages.content.content.type": (user(result()), user(result(content=[text("y")]))),
    "messages.content.content.text": (user(result(content=[text()])), user(result(content=[text("y")]))),
    "messages.content.content.cache_control": (
        user(result(content=[text()])),
        user(result(content=[text(cache_control=KEPT)])),
    ),
    "messages.content.content.citations": ({}, user(result(content=[text(citations=[{}])]))),
    "messages.content.toolset_name": ({}, user(result(toolset_name="x"))),
    "messages.content.is_error": (user(result()), user(result(is_error=True))),
    "messages.content.citations": ({}, user(text(citations=[{"type": "x"}]))),
    "messages.content.cache_control": (user(text()), user(text(cache_control=KEPT))),
    "messages.content.cache_control.type": (user(text()), user(text(cache_control=KEPT))),
    "messages.content.cache_control.ttl": (user(text(cache_control=KEPT)), user(text(cache_control=KEPT_LONG))),
    "system": ({}, {"system": "x"}),
    "system.type": ({}, {"system": [text()]}),
    "system.*": ({"system": [text()]}, {"system": [text(colour="red")]}),
    "system.text": ({"system": [text()]}, {"system": [text("y")]}),
    "system.citations": ({}, {"system": [text(citations=[{"type": "x"}])]}),
    "system.cache_control": ({"system": [text()]}, {"system": [text(cache_control=KEPT)]}),
    "system.cache_control.type": ({"system": [text()]}, {"system": [text(cache_control=KEPT)]}),
    "system.cache_control.ttl": (
        {"system": [text(cache_control=KEPT)]},
        {"system": [text(cache_control=KEPT_LONG)]},
    ),
    "stop_sequences": ({}, {"stop_sequences": ["x"]}),
    "stream": ({}, {"stream": True}),
    "temperature": ({}, {"temperature": 0.5}),
    "top_p": ({}, {"top_p": 0.5}),
    "top_k": ({}, {"top_k": 5}),
    "tools": ({}, {"tools": [TOOL]}),
    "tools.type": ({}, {"tools": [{**TOOL, "type": "custom"}]}),
    "tools.name": ({"tools": [TOOL]}, {"tools": [{**TOOL, "name": "g"}]}),
    "tools.description": ({"tools": [TOOL]}, {"tools": [{**TOOL, "description": "x"}]}),
    "tools.input_schema": ({"tools": [TOOL]}, {"tools": [{**TOOL, "input_schema": {"type": "object"}}]}),
    "tools.strict": ({"tools": [TOOL]}, {"tools": [{**TOOL, "strict": True}]}),
    "tools.cache_control": ({"tools": [TOOL]}, {"tools": [{**TOOL, "cache_control": KEPT}]}),
    "tools.cache_control.type": ({"tools": [TOOL]}, {"tools": [{**TOOL, "cache_control": KEPT}]}),
    "tools.cache_control.ttl": (
        {"tools": [{**TOOL, "cache_control": KEPT}]},
        {"tools": [{**TOOL, "cache_control": KEPT_LONG}]},
    ),
    "tools.input_examples": ({}, {"tools": [{**TOOL, "input_examples": [{}]}]}),
    "tools.defer_loading": ({}, {"tools": [{**TOOL, "defer_loading": True}]}),
    "tools.allowed_callers": ({}, {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}),
    "tools.eager_input_streaming": ({"tools": [TOOL]}, {"tools": [{**TOOL, "eager_input_streaming": True}]}),
    "tool_choice": ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "any"}}),
    "tool_choice.type": ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}),
    "tool_choice.name": (
        {**TWO, "tool_choice": {"type": "tool", "name": "f"}},
        {**TWO, "tool_choice": {"type": "tool", "name": "g"}},
    ),
    "tool_choice.disable_parallel_tool_use": (
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ),
    "thinking": ({}, THINKING),
    "thinking.type": ({}, {"thinking": {"type": "adaptive"}}),
    "thinking.budget_tokens": (THINKING, {"thinking": {"type": "enabled", "budget_tokens": 1100}}),
    "thinking.block_binding": ({}, {"thinking": {"type": "adaptive", "block_binding": "x"}}),
    "thinking.display": (THINKING, {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}),
    "output_config": ({}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "output_config.format": ({}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "output_config.format.type": ({}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "output_config.format.schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ),
    "output_config.effort": (THINKING, {**THINKING, "output_config": {"effort": "high"}}),
    "metadata": ({}, {"metadata": {"user_id": "u"}}),
    "metadata.user_id": ({}, {"metadata": {"user_id": "u"}}),
    "cache_control": ({}, {"cache_control": KEPT}),
    "cache_control.type": ({}, {"cache_control": KEPT}),
    "cache_control.ttl": ({"cache_control": KEPT}, {"cache_control": KEPT_LONG}),
    "service_tier": ({}, {"service_tier": "standard_only"}),
    "inference_geo": ({}, {"inference_geo": "eu"}),
    "container": ({}, {"container": "x"}),
    "context_management": ({}, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    "mcp_servers": ({}, {"mcp_servers": [{}]}),
    "fallbacks": ({}, {"fallbacks": ["m"]}),
    "output_config.task_budget": ({}, {"output_config": {"task_budget": {"type": "tokens"}}}),
    "compaction": ({}, {"compaction": {"a": 1}}),
    "thread": ({}, {"thread": {"id": "t"}}),
    "fallback_credit_token": ({}, {"fallback_credit_token": "x"}),
    "billing_policy": ({}, {"billing_policy": "x"}),
    "speed": ({}, {"speed": "fast"}),
    "diagnostics": ({}, {"diagnostics": {"previous_message_id": "x"}}),
    "user_profile_id": ({}, {"user_profile_id": "x"}),
    "workspace_id": ({}, {"workspace_id": "x"}),
    "request_id": ({}, {"request_id": "x"}),
    "return_receipt": ({}, {"return_receipt": True}),
}


def items(*values: object) -> dict[str, object]:
    return {"input": [*values, {"role": "user", "content": "Hi"}]}


def part(**fields: object) -> dict[str, object]:
    return {"role": "user", "content": [{"type": "input_text", "text": "x", **fields}]}


INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def seen(**fields: object) -> dict[str, object]:
    return {"role": "user", "content": [{**INPUT_IMAGE, **fields}]}


def said(**fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": "x", **fields}


def called(**fields: object) -> dict[str, object]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}


def custom(**fields: object) -> dict[str, object]:
    return {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", **fields}


def output(value: object) -> dict[str, object]:
    return {"type": "function_call_output", "call_id": "c", "output": value}


def reasoning(**fields: object) -> dict[str, object]:
    return {"type": "reasoning", **fields}


FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
BOTH = {"tools": [FLAT, {**FLAT, "name": "g"}]}
GROUP = {"type": "namespace", "name": "n", "description": "d"}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def grouped(**fields: object) -> dict[str, object]:
    return {"tools": [{**GROUP, "tools": [{**FLAT, **fields}]}]}


def json_text(**fields: object) -> dict[str, object]:
    return {"format": {"type": "json_schema", "schema": SCHEMA, **fields}}


def allowed(*names: str) -> dict[str, object]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": name} for name in names]}


LOG_PROBS: dict[str, object] = {"include": ["message.output_text.logprobs"]}
# For each field of responses, the same as for messages.
RESPONSES_EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model": ({}, {"model": "m"}),
    "input": ({}, {"input": "Other"}),
    "input.type": (items(custom(), called()), items(custom(), custom())),
    "input.*": (items(said()), items(said(colour="red"))),
    "input.role": (items(said()), items(said(role="user"))),
    "input.content": (items(said()), items(said(content="y"))),
    "input.content.type": (items(), items(part())),
    "input.content.text": (items(part()), items(part(text="y"))),
    "input.content.refusal": (items(said()), items(said(content=[{"type": "refusal", "refusal": "no"}]))),
    "input.content.prompt_cache_breakpoint": (items(part()), items(part(prompt_cache_breakpoint={"mode": "explicit"}))),
    "input.content.annotations": (items(part()), items(part(annotations=[{}]))),
    "input.content.logprobs": (items(part()), items(part(logprobs=[{}]))),
    "input.content.image_url": (items(seen()), items(seen(image_url="data:;base64,AAAB"))),
    "input.content.file_id": ({}, items(seen(file_id="file-1"))),
    "input.content.detail": (items(seen()), items(seen(detail="low"))),
    "input.id": (items(said()), items(said(id="x"))),
    "input.status": (items(said()), items(said(status="completed"))),
    "input.phase": (items(said()), items(said(phase="commentary"))),
    "input.caller": (items(called()), items(called(caller={"type": "direct"}))),
    "input.namespace": (items(called()), items(called(namespace="n"))),
    "input.async": ({}, items(called(**{"async": True}))),
    "input.call_id": (items(called()), items(called(call_id="d"))),
    "input.name": (items(called()), items(called(name="g"))),
    "input.arguments": (items(called()), items(called(arguments='{"a": 1}'))),
    "input.input": (items(custom()), items(custom(input="y"))),
    "input.output": (items(called(), output("x")), items(called(), output("y"))),
    "input.output.type": (items(called()), items(called(), output([{"type": "input_text", "text": "x"}]))),
    "input.output.image_url": (items(called(), output("x")), items(called(), output([INPUT_IMAGE]))),
    "input.output.file_id": ({}, items(called(), output([{**INPUT_IMAGE, "file_id": "file-1"}]))),
    "input.output.detail": (
        items(called(), output([INPUT_IMAGE])),
        items(called(), output([{**INPUT_IMAGE, "detail": "low"}])),
    ),
    "input.output.prompt_cache_breakpoint": (
        items(called(), output([{"type": "input_text", "text": "x"}])),
        items(called(), output([{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}])),
    ),
    "input.output.text": (items(called()), items(called(), output([{"type": "input_text", "text": "x"}]))),
    "input.summary": (items(said()), items(reasoning(summary=[{"type": "summary_text", "text": "x"}]), said())),
    "input.summary.type": (
        items(reasoning(summary=[{"text": "x"}])),
        items(reasoning(summary=[{"type": "summary_text", "text": "x"}])),
    ),
    "input.summary.text": (
        items(reasoning(summary=[{"text": "x"}])),
        items(reasoning(summary=[{"text": "y"}])),
    ),
    "input.encrypted_content": (items(reasoning()), items(reasoning(encrypted_content="eA=="))),
    "instructions": ({}, {"instructions": "x"}),
    "previous_response_id": ({}, {"previous_response_id": "resp_1"}),
    "store": ({}, {"store": False}),
    "background": ({}, {"background": True}),
    "stream": ({}, {"stream": True}),
    "stream_options": ({}, {"stream_options": {"include_obfuscation": False}}),
    "stream_options.include_obfuscation": ({}, {"stream_options": {"include_obfuscation": True}}),
    "max_output_tokens": ({}, {"max_output_tokens": 5}),
    "temperature": ({}, {"temperature": 0.5}),
    "top_p": ({}, {"top_p": 0.5}),
    "reasoning": ({}, {"reasoning": {"effort": "none"}}),
    "reasoning.effort": ({}, {"reasoning": {"effort": "none"}}),
    "reasoning.mode": ({}, {"reasoning": {"mode": "pro"}}),
    "reasoning.context": ({}, {"reasoning": {"context": "all_turns"}}),
    "reasoning.summary": ({}, {"reasoning": {"summary": "auto"}}),
    "reasoning.generate_summary": ({}, {"reasoning": {"generate_summary": "auto"}}),
    "text": ({}, {"text": FORMAT}),
    "text.format": ({}, {"text": FORMAT}),
    "text.format.type": ({}, {"text": {"format": {"type": "json_object"}}}),
    "text.format.schema": ({"text": FORMAT}, {"text": json_text(schema={"type": "object"})}),
    "text.format.name": ({"text": FORMAT}, {"text": json_text(name="x")}),
    "text.format.description": ({"text": FORMAT}, {"text": json_text(description="x")}),
    "text.format.strict": ({"text": FORMAT}, {"text": json_text(strict=False)}),
    "text.verbosity": ({}, {"text": {"verbosity": "low"}}),
    "tools": ({}, {"tools": [FLAT]}),
    "tools.type": ({"tools": [FLAT]}, {"tools": [{"type": "custom", "name": "f"}]}),
    "tools.name": ({"tools": [FLAT]}, {"tools": [{**FLAT, "name": "g"}]}),
    "tools.description": ({"tools": [FLAT]}, {"tools": [{**FLAT, "description": "x"}]}),
    "tools.parameters": ({"tools": [FLAT]}, {"tools": [{**FLAT, "parameters": {"type": "object"}}]}),
    "tools.strict": ({"tools": [FLAT]}, {"tools": [{**FLAT, "strict": True}]}),
    "tools.format": ({}, {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}),
    "tools.output_schema": ({"tools": [FLAT]}, {"tools": [{**FLAT, "output_schema": {"type": "string"}}]}),
    "tools.allowed_callers": ({}, {"tools": [{**FLAT, "allowed_callers": ["programmatic"]}]}),
    "tools.defer_loading": ({}, {"tools": [{**FLAT, "defer_loading": True}]}),
    "tools.async": ({}, {"tools": [{**FLAT, "async": True}]}),
    "tools.filters": ({}, {"tools": [{"type": "web_search", "filters": {"allowed_domains": ["x"]}}]}),
    "tools.search_context_size": ({}, {"tools": [{"type": "web_search", "search_context_size": "low"}]}),
    "tools.user_location": ({}, {"tools": [{"type": "web_search", "user_location": {"city": "Oslo"}}]}),
    "tools.tools": ({}, grouped()),
    "tools.tools.type": (grouped(), {"tools": [{**GROUP, "tools": [{"type": "custom", "name": "f"}]}]}),
    "tools.tools.name": (grouped(), grouped(name="g")),
    "tools.tools.description": (grouped(), grouped(description="x")),
    "tools.tools.parameters": (grouped(), grouped(parameters={"type": "object"})),
    "tools.tools.strict": (grouped(), grouped(strict=True)),
    "tools.tools.format": ({}, grouped(type="custom", format={"type": "grammar"})),
    "tools.tools.output_schema": (grouped(), grouped(output_schema={"type": "string"})),
    "tools.tools.allowed_callers": ({}, grouped(allowed_callers=["programmatic"])),
    "tools.tools.defer_loading": ({}, grouped(defer_loading=True)),
    "tools.tools.async": ({}, grouped(**{"async": True})),
    "tools.external_web_access": ({}, {"tools": [{"type": "web_search", "external_web_access": True}]}),
    "tool_choice": ({"tools": [FLAT]}, {"tools": [FLAT], "tool_choice": "required"}),
    "tool_choice.type": (BOTH, {**BOTH, "tool_choice": {"type": "function", "name": "f"}}),
    "tool_choice.name": (
        {**BOTH, "tool_choice": {"type": "function", "name": "f"}},
        {**BOTH, "tool_choice": {"type": "function", "name": "g"}},
    ),
    "tool_choice.mode": (
        {**BOTH, "tool_choice": allowed("f")},
        {**BOTH, "tool_choice": {**allowed("f"), "mode": "required"}},
    ),
    "tool_choice.tools": ({**BOTH, "tool_choice": allowed("f", "g")}, {**BOTH, "tool_choice": allowed("f")}),
    "tool_choice.tools.type": (
        {**BOTH, "tool_choice": {**allowed(), "tools": [{"name": "f"}]}},
        {**BOTH, "tool_choice": allowed("f")},
    ),
    "tool_choice.tools.name": ({**BOTH, "tool_choice": allowed("g")}, {**BOTH, "tool_choice": allowed("f")}),
    "parallel_tool_calls": ({"tools": [FLAT]}, {"tools": [FLAT], "parallel_tool_calls": False}),
    "max_tool_calls": ({}, {"max_tool_calls": 3}),
    "include": ({}, {"include": ["reasoning.encrypted_content"]}),
    "metadata": ({}, {"metadata": {"a": "b"}}),
    "client_metadata": ({}, {"client_metadata": {"a": {"b": "c"}}}),
    "prompt_cache_key": ({}, {"prompt_cache_key": "k"}),
    "prompt_cache_retention": ({}, {"prompt_cache_retention": "24h"}),
    "service_tier": ({}, {"service_tier": "flex"}),
    "safety_identifier": ({}, {"safety_identifier": "u"}),
    "user": ({}, {"user": "u"}),
    "prompt_cache_options": ({}, {"prompt_cache_options": {"ttl": "30m"}}),
    "prompt_cache_options.ttl": ({"prompt_cache_options": {"ttl": "12h"}}, {"prompt_cache_options": {"ttl": "30m"}}),
    "prompt_cache_options.mode": ({}, {"prompt_cache_options": {"mode": "explicit"}}),
    "prompt_cache_options.comparison_response_id": ({}, {"prompt_cache_options": {"comparison_response_id": "r"}}),
    "prompt_cache_options.prewarm": ({}, {"prompt_cache_options": {"prewarm": True}}),
    "access_programs": ({}, {"access_programs": {"a": 1}}),
    "image": ({}, {"image": {"context_compression": "auto"}}),
    "truncation": ({}, {"truncation": "auto"}),
    "top_logprobs": (LOG_PROBS, {**LOG_PROBS, "top_logprobs": 3}),
    **{
        name: ({}, {name: COMMON_EXAMPLES[name][0]})
        for name in (
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
            "seed",
            "logit_bias",
            "allowed_token_ids",
            "stop",
            "stop_token_ids",
            "bad_words",
            "ignore_eos",
            "priority",
            "cache_salt",
            "include_stop_str_in_output",
        )
    },
    "chat_template_kwargs": ({}, {"chat_template_kwargs": {"a": 1}}),
    "conversation": ({}, {"conversation": "c"}),
    "conversation.id": ({}, {"conversation": {"id": "c"}}),
    "prompt": ({}, {"prompt": {"id": "p"}}),
    "context_management": ({}, {"context_management": [{"type": "compaction"}]}),
    "moderation": ({}, {"moderation": {"model": "m"}}),
    "return_receipt": ({}, {"return_receipt": True}),
}


EMBEDDING_COMMON_EXAMPLES: dict[str, tuple[object, dict[str, object]]] = {
    "model": ("m", {}),
    "user": ("u", {}),
    "request_id": ("other", {}),
    "priority": (5, {}),
    "service_tier": ("flex", {}),
    "cache_salt": ("x", {}),
    "timeout_ms": (5, {}),
    "pooling": ("mean", {}),
    "truncate_prompt_tokens": (5, {}),
    "truncate": (True, {}),
    "truncation_direction": ("Left", {}),
}
EMBEDDINGS_EXAMPLES = EMBEDDING_COMMON_EXAMPLES | {
    "input": (["b", [1, 2]], {}),
    "encoding_format": ("base64", {}),
    "dimensions": (5, {}),
    "normalize": (False, {}),
    "prompt_name": ("query", {}),
    "messages": ([{"role": "user", "content": "x"}], {}),
    "add_special_tokens": (True, {}),
}
SCORE_EXAMPLES = EMBEDDING_COMMON_EXAMPLES | {
    "text_1": ("c", {}),
    "text_2": (["b", "c"], {}),
    "queries": ({"queries": "q", "documents": "d"}, {}),
    "documents": ({"queries": "q", "documents": ["d"]}, {"queries": "q", "documents": "e"}),
    "use_activation": (False, {}),
}
RERANK_EXAMPLES = EMBEDDING_COMMON_EXAMPLES | {
    "query": ("r", {}),
    "documents": (["d"], {}),
    "documents.text": ({"documents": [{"text": "d"}]}, {"documents": [{"text": "e"}]}),
    "texts": ({"texts": ["b", "c"]}, {}),
    "return_text": ({"texts": ["b"], "return_text": True}, {"texts": ["b"]}),
    "raw_scores": (True, {}),
    "top_n": (1, {}),
    "return_documents": (False, {}),
    "rank_fields": (["text"], {}),
    "max_chunks_per_doc": (2, {}),
    "max_tokens_per_doc": (2, {}),
    "use_activation": (False, {}),
}


CLASSIFY_EXAMPLES = EMBEDDING_COMMON_EXAMPLES | {
    "input": (["b", [1, 2]], {}),
    "use_activation": (False, {}),
    "activation": (True, {}),
    "messages": ([{"role": "user", "content": "x"}], {}),
    "add_special_tokens": (True, {}),
}


def run_embeddings(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that an /embeddings request body sets, and its ignored fields."""
    job = read_embeddings(Body({"input": "a", **fields}))
    return str(replace(job, ignored=[])), job.ignored


def run_classify(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that a /classify request body sets, and its ignored fields."""
    job = read_classify(Body({"input": "a", **fields}))
    return str(replace(job, ignored=[])), job.ignored


def run_score(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that a /score request body sets, and its ignored fields."""
    texts = {} if "queries" in fields else {"text_1": "a", "text_2": "b"}
    job = read_score(Body({**texts, **fields}))
    return str(replace(job, ignored=[])), job.ignored


def run_rerank(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that a /rerank request body sets, and its ignored fields."""
    texts = {} if "texts" in fields else {"documents": ["b", "c"]}
    job = read_rerank(Body({"query": "a", **texts, **fields}))
    return str(replace(job, ignored=[])), job.ignored


def run_response(fields: dict[str, Any]) -> tuple[str, list[str]]:
    """Return everything that a /responses request body sets, and its ignored fields. Fields that are only echoed in the
    response are left out, except `metadata`, `previous_response_id` and `conversation`.
    """
    job = read_response(Body({"input": "Hi"} | fields), MODEL)
    shown = {name: job.echo[name] for name in ("metadata", "previous_response_id", "conversation")}
    modes = (job.is_stream, job.is_stored, job.is_background, job.shows_hidden)
    return f"{_conversation(job.conversation)}\n{shown} {job.custom_tools} {modes}", job.ignored


def run_chat(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that a /chat/completions request body sets, and its ignored fields."""
    body = Body({"messages": [{"role": "user", "content": "Hi"}], "request_id": "r", **fields})
    job = chat_job(body, Vocabulary(lambda token: b"%d" % token, MODEL))
    assert job.conversation is not None
    decided = f"{_conversation(job.conversation)}\n{job.conversation.prediction}\n{_job(job)}"
    return decided, ignored_fields(body, CHAT)


def run_completion(fields: dict[str, object]) -> tuple[str, list[str]]:
    """Return everything that a /completions request body sets, and its ignored fields."""
    body = Body({"prompt": "a", "request_id": "r", **fields})
    return _job(completion_job(body, Vocabulary(lambda token: b"%d" % token, MODEL))), ignored_fields(body, COMPLETIONS)


def _job(job: Job) -> str:
    return f"{job.requests} {job.is_stream} {job.includes_usage} {job.num_choices} {job.shape.details} {job.options}"


def run_messages(fields: dict[str, Any]) -> tuple[str, list[str]]:
    """Return everything that a /messages request body sets, and its ignored fields."""
    model = ChatModel(MODEL.format, MODEL.template + "{{ reasoning_effort }}")
    job = read_messages(Body({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000} | fields), model)
    decided = f"{_conversation(job.conversation)}\n{job.is_stream} {job.shows_thinking} {job.breakpoints}"
    return decided, job.ignored


def _conversation(conversation: Conversation) -> str:
    conversation.add_guide()
    return f"{conversation.request}\n{conversation.tools}"


Examples = dict[str, tuple[object, dict[str, object]]]
Run = Callable[[dict[str, object]], tuple[str, list[str]]]


def check_line(name: str, table: Table, examples: Examples, run: Run) -> None:
    value, without = examples[name]
    fields: Any = value if "." in name or (isinstance(value, dict) and name in value) else {**without, name: value}
    status, _ = table[name]
    if status == "refused":
        with pytest.raises(MidstreamError) as raised:
            run(fields)
        assert raised.value.field == name
        return
    (decided, ignored), (before, _) = run(fields), run(without)
    assert (decided != before) == (status == "works")
    assert is_listed(name, ignored) == (status == "ignored")


def is_listed(name: str, ignored: list[str]) -> bool:
    """Return whether a field is among the ignored ones; `x.*` stands for a field that is in no table."""
    if name.endswith(".*"):
        return any(found.startswith(name[:-1]) and found.endswith(".colour") for found in ignored)
    return name in ignored


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(name: str) -> None:
    check_line(name, COMPLETIONS, COMPLETIONS_EXAMPLES, run_completion)


@pytest.mark.parametrize("name", CHAT)
def test_chat_completions(name: str) -> None:
    check_line(name, CHAT, CHAT_EXAMPLES, run_chat)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name: str) -> None:
    check_line(name, EMBEDDINGS, EMBEDDINGS_EXAMPLES, run_embeddings)


@pytest.mark.parametrize("name", CLASSIFY)
def test_classify(name: str) -> None:
    check_line(name, CLASSIFY, CLASSIFY_EXAMPLES, run_classify)


@pytest.mark.parametrize("name", SCORE)
def test_score(name: str) -> None:
    check_line(name, SCORE, SCORE_EXAMPLES, run_score)


@pytest.mark.parametrize("name", RERANK)
def test_rerank(name: str) -> None:
    check_line(name, RERANK, RERANK_EXAMPLES, run_rerank)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    without, fields = MESSAGES_EXAMPLES[name]
    status, _ = MESSAGES[name]
    if status == "refused":
        with pytest.raises(UnsupportedError) as raised:
            run_messages(fields)
        assert raised.value.field.endswith(name.rpartition(".")[2])
    else:
        (decided, ignored), (before, _) = run_messages(fields), run_messages(without)
        assert (decided != before) == (status == "works")
        assert is_listed(name, ignored) == (status == "ignored")


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name: str) -> None:
    without, fields = RESPONSES_EXAMPLES[name]
    status, _ = RESPONSES[name]
    if status == "refused":
        with pytest.raises(UnsupportedError) as raised:
            run_response(fields)
        assert raised.value.field.endswith(name.rpartition(".")[2])
    else:
        (decided, ignored), (before, _) = run_response(fields), run_response(without)
        assert (decided != before) == (status == "works")
        assert is_listed(name, ignored) == (status == "ignored")


def test_every_line_is_tested_and_in_the_docs() -> None:
    assert COMPLETIONS_EXAMPLES.keys() == COMPLETIONS.keys()
    assert CHAT_EXAMPLES.keys() == CHAT.keys()
    assert MESSAGES_EXAMPLES.keys() == MESSAGES.keys()
    assert RESPONSES_EXAMPLES.keys() == RESPONSES.keys()
    assert EMBEDDINGS_EXAMPLES.keys() == EMBEDDINGS.keys()
    assert CLASSIFY_EXAMPLES.keys() == CLASSIFY.keys()
    assert SCORE_EXAMPLES.keys() == SCORE.keys()
    assert RERANK_EXAMPLES.keys() == RERANK.keys()
    served = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    assert set(TABLES) == served | {"/v1/embeddings", "/score", "/rerank", "/classify"}
    begin, end = "<!-- python -m router.protocols.fields -->\n", "\n<!-- end of fields -->"
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(begin)[2].partition(end)[0] == markdown()
