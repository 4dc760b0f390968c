"""How each field of the HTTP APIs is handled: what they accept, and the table in docs/adapters.md.

`python -m router.protocols.fields` prints the table. Fields that are not in it are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from midstream.errors import InvalidArgumentError, UnsupportedError
from router.protocols.openai.body import Body

Status = Literal["works", "refused", "ignored"]
# Path, without indexes -> how it is handled, and why.
Table = Mapping[str, tuple[Status, str]]

# What completions and chat completions share: OpenAI's fields, then vLLM's, then ours.
_COMMON: Table = {
    "n": ("works", ""),
    "temperature": ("works", ""),
    "top_p": ("works", ""),
    "presence_penalty": ("works", ""),
    "frequency_penalty": ("works", ""),
    "logit_bias": ("works", ""),
    "seed": ("works", ""),
    "stop": ("works", ""),
    "stream": ("works", ""),
    "stream_options": ("works", "`include_usage`"),
    "stream_options.include_obfuscation": ("ignored", "events are not padded"),
    "stream_options.continuous_usage_stats": ("ignored", "the usage comes at the end"),
    "response_format": ("works", "after the reasoning, where the model reasons"),
    "response_format.json_schema": ("ignored", "where the format is text or any JSON"),
    "response_format.json_schema.name": ("ignored", "schemas need no name"),
    "response_format.json_schema.description": ("ignored", "the schema alone counts"),
    "response_format.json_schema.strict": ("ignored", "schemas always hold"),
    "service_tier": ("works", "`flex` and `priority` are priorities -50 and 50"),
    "user": ("works", "`client_id`, for fairness"),
    "safety_identifier": ("works", "as `user`, where that is not set"),
    "metadata": ("ignored", "nothing is stored that it could describe"),
    "prompt_cache_key": ("ignored", "requests go to the cache that has their prefix; `cache_salt` separates them"),
    "top_k": ("works", ""),
    "min_p": ("works", ""),
    "repetition_penalty": ("works", ""),
    "min_tokens": ("works", ""),
    "use_beam_search": ("works", ""),
    "length_penalty": ("works", "with `use_beam_search`, else ignored"),
    "stop_token_ids": ("works", ""),
    "bad_words": ("works", ""),
    "ignore_eos": ("works", ""),
    "include_stop_str_in_output": ("works", ""),
    "skip_special_tokens": ("works", ""),
    "guided_json": ("works", ""),
    "guided_json_object": ("works", ""),
    "guided_regex": ("works", ""),
    "guided_grammar": ("works", ""),
    "guided_choice": ("works", ""),
    "structured_outputs": ("works", "but for `structural_tag`, which is refused"),
    "return_token_ids": ("works", ""),
    "spaces_between_special_tokens": ("ignored", "text is the tokenizer's"),
    "add_special_tokens": ("ignored", "text prompts have the tokenizer's own special tokens"),
    "allowed_token_ids": ("refused", ""),
    "logits_processors": ("refused", ""),
    "prompt_logprobs": ("refused", ""),
    "return_tokens_as_token_ids": ("refused", ""),
    "truncate_prompt_tokens": ("refused", ""),
    "request_id": ("works", "of the native request"),
    "priority": ("works", "lower runs first, as in vLLM; before `service_tier`"),
    "cache_salt": ("works", ""),
    "detached": ("works", "the request goes on when its client leaves"),
    "timeout_ms": ("works", ""),
}
COMPLETIONS: Table = {
    "model": ("works", "the served model, or an adapter that is loaded on it"),
    "prompt": ("works", "text, token ids, or an array of either"),
    "max_tokens": ("works", "16, unless it is set"),
    "best_of": ("works", "not above `n` with `stream`"),
    "logprobs": ("works", ""),
    "echo": ("works", ""),
    "suffix": ("refused", ""),
    "prompt_embeds": ("refused", ""),
    **_COMMON,
}
CHAT: Table = {
    "model": ("works", "the served model, or an adapter that is loaded on it"),
    "messages": ("works", "text; `reasoning_content` of earlier turns goes to the template"),
    "max_completion_tokens": ("works", "before `max_tokens`"),
    "max_tokens": ("works", ""),
    "logprobs": ("works", ""),
    "top_logprobs": ("works", "with `logprobs`"),
    "tools": ("works", "functions; `strict` holds arguments to the schema in the formats that have a grammar"),
    "tool_choice": ("works", ""),
    "parallel_tool_calls": ("works", "false: what follows the first call is dropped"),
    "reasoning_effort": ("works", "as the model's template knows it; refused where it does not"),
    "prompt_cache_retention": ("works", "`24h` keeps the prompt's KV blocks"),
    "store": ("refused", "true: chat completions are not stored"),
    "prediction": ("works", "drafts are looked up in it; the usage says how many were right"),
    "audio": ("refused", ""),
    "modalities": ("refused", "other than text"),
    "verbosity": ("refused", "other than medium"),
    "web_search_options": ("refused", ""),
    "functions": ("refused", "`tools` replaced it"),
    "function_call": ("refused", "`tool_choice` replaced it"),
    "moderation": ("refused", ""),
    "echo": ("refused", ""),
    "documents": ("refused", ""),
    "chat_template": ("refused", "the model's own is used"),
    "continue_final_message": ("refused", ""),
    "chat_template_kwargs": ("works", ""),
    "add_generation_prompt": ("works", ""),
    "messages.refusal": ("ignored", "an earlier turn's"),
    "messages.annotations": ("ignored", "an earlier turn's"),
    "messages.audio": ("ignored", "an earlier turn's"),
    "messages.function_call": ("ignored", "an earlier turn's, `tool_calls` counts"),
    "messages.tool_calls.index": ("ignored", "calls are in order"),
    "messages.tool_calls.type": ("ignored", "calls are functions"),
    "messages.content.annotations": ("ignored", "an earlier turn's"),
    **_COMMON,
}
# Of a conversation whose tokens are wanted.
TOKENIZE: Table = {name: CHAT[name] for name in CHAT if CHAT[name][0] == "ignored" or name in ("tools", "tool_choice")}
MESSAGES: Table = {
    "model": ("works", "the served model, or an adapter that is loaded on it"),
    "max_tokens": ("works", "required"),
    "messages": ("works", "the last turn is the user's: an answer cannot be prefilled"),
    "messages.role": ("works", "user, assistant or system"),
    "messages.content": ("works", ""),
    "messages.content.type": ("works", "text, thinking, redacted_thinking, tool_use, tool_result; others are refused"),
    "messages.content.text": ("works", ""),
    "messages.content.thinking": ("works", "goes to the template as earlier reasoning"),
    "messages.content.signature": ("ignored", "thinking is not signed"),
    "messages.content.data": ("ignored", "of redacted thinking, which nobody can read here"),
    "messages.content.id": ("works", ""),
    "messages.content.name": ("works", ""),
    "messages.content.input": ("works", ""),
    "messages.content.caller": ("ignored", "calls come from the model alone"),
    "messages.content.tool_use_id": ("works", ""),
    "messages.content.content": ("works", "text"),
    "messages.content.content.type": ("works", "text; others are refused"),
    "messages.content.content.text": ("works", ""),
    "messages.content.content.cache_control": ("ignored", "that of the block holds"),
    "messages.content.toolset_name": ("refused", ""),
    "messages.content.is_error": ("ignored", "templates do not know it; the content says so"),
    "messages.content.citations": ("refused", ""),
    "messages.content.content.citations": ("refused", ""),
    "messages.content.cache_control": ("works", "as `cache_control`"),
    "system": ("works", ""),
    "system.type": ("works", "text"),
    "system.text": ("works", ""),
    "system.citations": ("refused", ""),
    "system.cache_control": ("works", "as `cache_control`"),
    "stop_sequences": ("works", ""),
    "stream": ("works", ""),
    "temperature": ("works", ""),
    "top_p": ("works", ""),
    "top_k": ("works", ""),
    "tools": ("works", "the client's own; tools of the server are refused"),
    "tools.type": ("works", "custom"),
    "tools.name": ("works", ""),
    "tools.description": ("works", ""),
    "tools.input_schema": ("works", ""),
    "tools.strict": ("works", "in the formats that have a grammar"),
    "tools.cache_control": ("works", "as `cache_control`"),
    "tools.input_examples": ("refused", ""),
    "tools.defer_loading": ("refused", ""),
    "tools.allowed_callers": ("refused", "other than direct"),
    "tools.eager_input_streaming": ("ignored", "a call comes when it is whole"),
    "tool_choice": ("works", ""),
    "tool_choice.type": ("works", ""),
    "tool_choice.name": ("works", ""),
    "tool_choice.disable_parallel_tool_use": ("works", "what follows the first call is dropped"),
    "thinking": ("works", "shows the model's reasoning; without it a template that can is told not to reason"),
    "thinking.type": ("works", "enabled, adaptive or between_tools, which are one here; disabled"),
    "thinking.budget_tokens": ("ignored", "checked; `max_tokens` limits reasoning and answer together"),
    "thinking.display": ("works", "summarized shows the reasoning as it is, omitted leaves it out"),
    "output_config": ("works", ""),
    "output_config.effort": ("works", "as the model's template knows it"),
    "output_config.format": ("works", "a JSON schema"),
    "metadata": ("works", ""),
    "metadata.user_id": ("works", "`client_id`, for fairness"),
    "cache_control": ("works", "keeps the KV blocks of the prefix for `ttl`"),
    "service_tier": ("ignored", "there is one tier"),
    "inference_geo": ("refused", ""),
    "container": ("refused", ""),
    "context_management": ("refused", "other than keeping all thinking"),
    "mcp_servers": ("refused", ""),
    "fallbacks": ("refused", ""),
    "speed": ("refused", "other than standard"),
    "diagnostics": ("ignored", "no reports on the cache"),
    "user_profile_id": ("ignored", "of Anthropic's accounts"),
    "workspace_id": ("ignored", "of Anthropic's accounts"),
    "request_id": ("works", "our own: the id of the native request"),
}
RESPONSES: Table = {
    "model": ("works", "the served model, or an adapter that is loaded on it"),
    "input": ("works", "text, or items"),
    "input.type": (
        "works",
        "message, reasoning, calls of functions and custom tools, their outputs; others are refused",
    ),
    "input.role": ("works", "developer is system, where the template does not know it"),
    "input.content": ("works", "text, also of reasoning"),
    "input.content.type": ("works", "text; others are refused"),
    "input.content.text": ("works", ""),
    "input.content.refusal": ("works", "is text"),
    "input.content.annotations": ("ignored", "an earlier turn's"),
    "input.content.logprobs": ("ignored", "an earlier turn's"),
    "input.content.detail": ("ignored", "of images"),
    "input.id": ("ignored", "items are taken by what is in them"),
    "input.status": ("ignored", "an earlier turn's"),
    "input.phase": ("ignored", "templates do not know it"),
    "input.call_id": ("works", ""),
    "input.name": ("works", ""),
    "input.arguments": ("works", ""),
    "input.input": ("works", "of a custom tool"),
    "input.output": ("works", "text"),
    "input.output.type": ("works", "text; others are refused"),
    "input.output.text": ("works", ""),
    "input.summary": ("works", "stands for reasoning without content"),
    "input.summary.type": ("ignored", ""),
    "input.summary.text": ("works", ""),
    "input.encrypted_content": ("works", "stands for reasoning without content"),
    "instructions": ("works", "of this response alone, before what it continues"),
    "previous_response_id": ("works", "one that is stored and has ended"),
    "store": ("works", "true, unless it is set: for `--response-ttl-s`"),
    "background": ("works", "with `store`"),
    "stream": ("works", ""),
    "stream_options": ("ignored", "events are not padded (`include_obfuscation`)"),
    "max_output_tokens": ("works", ""),
    "temperature": ("works", ""),
    "top_p": ("works", ""),
    "reasoning": ("works", ""),
    "reasoning.effort": ("works", "as the model's template knows it; refused where it does not"),
    "reasoning.summary": ("ignored", "reasoning is shown as it is"),
    "reasoning.generate_summary": ("ignored", "reasoning is shown as it is"),
    "text": ("works", ""),
    "text.format": ("works", "text, json_object or json_schema"),
    "text.verbosity": ("refused", "other than medium"),
    "tools": ("works", "of the client"),
    "tools.type": ("works", "function, and custom with text; web_search and namespace are left out, others refused"),
    "tools.name": ("works", ""),
    "tools.description": ("works", ""),
    "tools.parameters": ("works", ""),
    "tools.strict": ("works", "in the formats that have a grammar"),
    "tools.format": ("refused", "other than text"),
    "tools.tools": ("ignored", "namespaces are not offered to the model"),
    "tools.external_web_access": ("ignored", "a search is not offered to the model"),
    "tool_choice": ("works", "none, auto, required, a tool, or allowed_tools"),
    "tool_choice.type": ("works", ""),
    "tool_choice.name": ("works", ""),
    "tool_choice.mode": ("works", ""),
    "tool_choice.tools": ("works", ""),
    "tool_choice.tools.type": ("ignored", "the name tells"),
    "tool_choice.tools.name": ("works", ""),
    "parallel_tool_calls": ("works", "false: what follows the first call is dropped"),
    "max_tool_calls": ("ignored", "it counts calls of the server's tools, of which there are none"),
    "include": (
        "works",
        "`reasoning.encrypted_content`; log probabilities are refused, what is of other tools ignored",
    ),
    "metadata": ("works", "comes back with the response"),
    "client_metadata": ("ignored", "notes of Codex"),
    "prompt_cache_key": ("ignored", "requests go to the cache that has their prefix"),
    "prompt_cache_retention": ("works", "`24h` keeps the prompt's KV blocks"),
    "service_tier": ("works", "`flex` and `priority` are priorities -50 and 50"),
    "safety_identifier": ("works", "as `user`, where that is not set"),
    "user": ("works", "`client_id`, for fairness"),
    "truncation": ("refused", "other than disabled"),
    "top_logprobs": ("refused", ""),
    "conversation": ("refused", "use `previous_response_id`"),
    "prompt": ("refused", ""),
    "context_management": ("refused", ""),
    "moderation": ("refused", ""),
}
# What embeddings, scores and reranking share.
_EMBEDDING_COMMON: Table = {
    "model": ("works", "the served model, or an adapter that is loaded on it"),
    "user": ("works", "`client_id`, for fairness"),
    "request_id": ("works", "of the native requests, with a number for each text"),
    "priority": ("works", "lower runs first, as in vLLM; before `service_tier`"),
    "service_tier": ("works", "`flex` and `priority` are priorities -50 and 50"),
    "cache_salt": ("works", ""),
    "timeout_ms": ("works", ""),
    "truncate_prompt_tokens": ("refused", ""),
}
EMBEDDINGS: Table = {
    "input": ("works", "text, token ids, or an array of either; at most 2,048"),
    "encoding_format": ("works", "float or base64"),
    "dimensions": ("works", "the first values, scaled to length 1 again"),
    "normalize": ("works", "false: the hidden state as the model has it"),
    "messages": ("refused", ""),
    "add_special_tokens": ("ignored", "text has the tokenizer's own special tokens"),
    **_EMBEDDING_COMMON,
}
SCORE: Table = {
    "text_1": ("works", "a text, or as many as in `text_2`"),
    "text_2": ("works", "a text or several"),
    "queries": ("works", "as `text_1`"),
    "documents": ("works", "as `text_2`"),
    "use_activation": ("refused", "a score is a cosine"),
    **_EMBEDDING_COMMON,
}
RERANK: Table = {
    "query": ("works", ""),
    "documents": ("works", "texts, or objects with `text`"),
    "documents.text": ("works", ""),
    "top_n": ("works", "0 or unset: all"),
    "return_documents": ("works", "true, unless it is set"),
    "rank_fields": ("refused", ""),
    "max_chunks_per_doc": ("refused", ""),
    "max_tokens_per_doc": ("refused", ""),
    "use_activation": ("refused", "a score is a cosine"),
    **_EMBEDDING_COMMON,
}
RESPONSES_OPAQUE = (
    "tools.parameters",
    "tools.tools",
    "client_metadata",
    "tools.format",
    "text.format",
    "metadata",
    "stream_options",
)
# Values defined by the client, which are not checked.
_OPAQUE = (
    "tools.input_schema",
    "messages.content.input",
    "output_config.format",
    "cache_control",
    "caller",
    "context_management",
    "diagnostics",
)
# Values of refused fields that match the behaviour anyway, and are accepted.
_DEFAULTS: dict[str, object] = {
    "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools.allowed_callers": ["direct"],
    "text.verbosity": "medium",
    "truncation": "disabled",
    "tools.format": {"type": "text"},
}
TABLES: dict[str, Table] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
    "/score": SCORE,
    "/rerank": RERANK,
}
_INDEX = re.compile(r"\[\d+\]")


def check_fields(body: Body, table: Table, opaque: tuple[str, ...] = _OPAQUE) -> None:
    """Check that every field of a body, but for what is in those that are `opaque`, is in `table` and not refused.

    Raises:
        InvalidArgumentError: A field is not known.
        UnsupportedError: One is refused.
    """
    for path, value in _paths(body.fields, "", opaque):
        name = _INDEX.sub("", path)
        known = table.get(name)
        if known is None:
            raise InvalidArgumentError("is not a field of this endpoint", field=path[:128])
        if known[0] == "refused" and value and value != _DEFAULTS.get(name):
            raise UnsupportedError(known[1] or "is not supported", field=path)


def ignored_fields(body: Body, table: Table) -> list[str]:
    """Return the fields of a body that had no effect; to be called once it has been read.

    Fields that work may have no effect beside others, such as `tool_choice` without tools.

    Raises:
        InvalidArgumentError: A field is unknown.
    """
    ignored: dict[str, None] = {}
    for path in body.unread():
        name = _INDEX.sub("", path)
        if name not in table:
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=path[:128])
        ignored[name] = None
    return list(ignored)


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the response header that names ignored fields."""
    return {"x-midstream-ignored": ", ".join(ignored)} if ignored else {}


def _paths(fields: Mapping[str, object], prefix: str, opaque: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        path = prefix + name
        if value is not None:
            yield path, value
        if _INDEX.sub("", path).endswith(opaque):
            continue
        items = value if isinstance(value, list) else ()
        for index, item in enumerate(items):
            if isinstance(item, dict):
                yield from _paths(item, f"{path}[{index}].", opaque)
        if isinstance(value, dict):
            yield from _paths(value, f"{path}.", opaque)


def markdown() -> str:
    """Return the tables, for docs/adapters.md."""
    lines = []
    for endpoint, table in TABLES.items():
        lines += [f"| `{endpoint}` | | |", "| --- | --- | --- |"]
        lines += [f"| `{path}` | {status} | {note} |" for path, (status, note) in table.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
