"""How each field of the HTTP APIs is handled, and the generator of the tables in docs/adapters.md.

`python -m router.protocols.fields` prints the tables. Fields that are not in them are rejected.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.protocols.openai.body import Body

Status = Literal["works", "refused", "ignored"]
# Path of a field, without indexes -> how the field is handled, and why. `x.*` stands for all fields in x, at any depth,
# that are not in the table.
Table = Mapping[str, tuple[Status, str]]
# Path of objects, without indexes -> the values that their `type` may have.
Types = Mapping[str, Sequence[str]]

_OTHERS = "fields that are not in this table, such as those of other services"
# Fields of both completions and chat completions: first OpenAI's, then vLLM's, then those of this service.
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
    "stream_options": ("works", "`include_usage`, `continuous_usage_stats`; only with `stream`"),
    "stream_options.include_obfuscation": ("ignored", "events are not padded"),
    "response_format": ("works", "also `structural_tag`; JSON applies after any reasoning"),
    "response_format.schema": ("works", "of `json_object`, as in llama.cpp"),
    "response_format.json_schema": ("ignored", "if the format is text or any JSON"),
    "response_format.json_schema.name": ("ignored", "schemas do not need a name"),
    "response_format.json_schema.description": ("ignored", "only the schema is used"),
    "response_format.json_schema.strict": ("works", "`false` validates afterwards what cannot be enforced"),
    "service_tier": ("works", "`flex` means priority -50; `priority` and `fast` mean 50"),
    "user": ("works", "sets `client_id`, for fairness"),
    "safety_identifier": ("works", "used like `user`, if `user` is unset"),
    "metadata": ("ignored", "metadata is not stored"),
    "prompt_cache_key": ("ignored", "requests are routed by their prefix; `cache_salt` separates caches"),
    "top_k": ("works", ""),
    "min_p": ("works", ""),
    "repetition_penalty": ("works", ""),
    "min_tokens": ("works", ""),
    "use_beam_search": ("works", ""),
    "length_penalty": ("works", "with `use_beam_search`, otherwise ignored"),
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
    "guided_whitespace_pattern": ("works", "with a JSON schema: the white space between values"),
    "structured_outputs": ("works", "with `structural_tag` and `whitespace_pattern` as well"),
    "grammar": ("works", "GBNF, as in llama.cpp"),
    "json_schema": ("works", "as in llama.cpp and SGLang: a schema, or its JSON text"),
    "ebnf": ("works", "as in SGLang"),
    "regex": ("works", "as in SGLang"),
    "return_token_ids": ("works", "adds `token_ids` of the output and `prompt_token_ids`, also with `echo`"),
    "spaces_between_special_tokens": ("ignored", "the tokenizer decides"),
    "add_special_tokens": ("works", "true by default for `prompt`, false for `messages`"),
    "allowed_token_ids": ("works", "no others are generated, end tokens included"),
    "logits_processors": ("refused", ""),
    "prompt_logprobs": ("works", "not with `stream`"),
    "return_tokens_as_token_ids": ("works", "names tokens `token_id:5` in log probabilities"),
    "truncate_prompt_tokens": ("works", "keeps the end of the prompt; -1 leaves room for `max_tokens`"),
    "request_id": ("works", "id of the native request"),
    "priority": ("works", "lower runs first, as in vLLM; overrides `service_tier`"),
    "cache_salt": ("works", ""),
    "detached": ("works", "the request continues if its client disconnects"),
    "timeout_ms": ("works", ""),
    "return_receipt": ("works", "adds `receipt` to the choice that ends last"),
}
COMPLETIONS: Table = {
    "model": ("works", "the served model, or a loaded adapter"),
    "prompt": ("works", "text, token ids, or an array of either"),
    "max_tokens": ("works", "16 by default; 0 requires `echo` and returns only the prompt, for scoring"),
    "best_of": ("works", "must be at most `n` with `stream`"),
    "logprobs": ("works", ""),
    "echo": ("works", ""),
    "suffix": ("refused", ""),
    "prompt_embeds": ("refused", ""),
    **_COMMON,
}
CHAT: Table = {
    "model": ("works", "the served model, or a loaded adapter"),
    "messages": (
        "works",
        (
            "text, and images as data URLs; `reasoning_content` is passed to the template; `developer` becomes "
            "`system` in templates without it"
        ),
    ),
    "max_completion_tokens": ("works", "overrides `max_tokens`"),
    "max_tokens": ("works", ""),
    "logprobs": ("works", ""),
    "top_logprobs": ("works", "with `logprobs`"),
    "tools": ("works", "functions; `strict` enforces the schema of arguments, in formats with a grammar"),
    "tool_choice": ("works", "none, auto, required, a function, or allowed_tools"),
    "parallel_tool_calls": ("works", "if false, only the first call is returned"),
    "reasoning_effort": ("works", "as supported by the model's template; otherwise refused"),
    "prompt_cache_retention": ("works", "`24h` keeps the prompt's KV blocks"),
    "prompt_cache_options": ("works", "`ttl`: the prompt's KV blocks are kept this long"),
    "prompt_cache_options.mode": ("ignored", "any cached prefix is reused"),
    "store": ("refused", "chat completions are not stored"),
    "prediction": ("works", "searched for drafts; the usage reports how many were accepted"),
    "audio": ("refused", ""),
    "modalities": ("refused", "only text is supported"),
    "verbosity": ("refused", "only medium is supported"),
    "web_search_options": ("refused", ""),
    "functions": ("refused", "is deprecated; use `tools`"),
    "function_call": ("refused", "is deprecated; use `tool_choice`"),
    "moderation": ("refused", ""),
    "echo": ("refused", ""),
    "documents": ("refused", ""),
    "chat_template": ("refused", "the model's own template is used"),
    "continue_final_message": ("works", "the output continues the last message"),
    "chat_template_kwargs": ("works", ""),
    "add_generation_prompt": ("works", ""),
    "messages.*": ("ignored", _OTHERS),
    "messages.refusal": ("ignored", "from an earlier response"),
    "messages.annotations": ("ignored", "from an earlier response"),
    "messages.parsed": ("ignored", "from an earlier response; `content` is used"),
    "messages.audio": ("ignored", "from an earlier response"),
    "messages.function_call": ("ignored", "from an earlier response; `tool_calls` is used"),
    "messages.tool_calls.index": ("ignored", "tool calls are taken in order"),
    "messages.tool_calls.type": ("ignored", "all tool calls are treated as function calls"),
    "messages.tool_calls.function.parsed_arguments": ("ignored", "from an earlier response; `arguments` is used"),
    "messages.content.annotations": ("ignored", "from an earlier response"),
    "messages.content.cache_control": ("ignored", "any cached prefix is reused"),
    "messages.content.image_url.detail": ("ignored", "the model's image processor decides"),
    "messages.content.prompt_cache_breakpoint": ("ignored", "any cached prefix is reused"),
    "tools.cache_control": ("ignored", "any cached prefix is reused"),
    "tools.function.cache_control": ("ignored", "any cached prefix is reused"),
    **_COMMON,
}
# Fields of /tokenize for a body with messages.
TOKENIZE: Table = {name: CHAT[name] for name in CHAT if CHAT[name][0] == "ignored" or name in ("tools", "tool_choice")}
MESSAGES: Table = {
    "model": ("works", "the served model, or a loaded adapter"),
    "max_tokens": ("works", "required"),
    "messages": ("works", "if the last one is the assistant's, the answer continues it"),
    "messages.role": ("works", "user, assistant or system"),
    "messages.*": ("ignored", _OTHERS),
    "messages.clear_at": ("refused", ""),
    "messages.output_config": ("refused", ""),
    "messages.content": ("works", ""),
    "messages.content.type": (
        "works",
        "text, image, thinking, redacted_thinking, tool_use, tool_result; others are refused",
    ),
    "messages.content.text": ("works", ""),
    "messages.content.thinking": ("works", "passed to the template as earlier reasoning"),
    "messages.content.signature": ("ignored", "thinking is not signed"),
    "messages.content.data": ("ignored", "redacted thinking cannot be read"),
    "messages.content.id": ("works", ""),
    "messages.content.name": ("works", ""),
    "messages.content.input": ("works", ""),
    "messages.content.caller": ("ignored", "only the model calls tools"),
    "messages.content.tool_use_id": ("works", ""),
    "messages.content.source": ("works", "an image in base64"),
    "messages.content.source.type": ("works", "base64"),
    "messages.content.source.data": ("works", ""),
    "messages.content.source.media_type": ("ignored", "the data determine the type"),
    "messages.content.source.url": ("refused", "URLs are not fetched; use base64"),
    "messages.content.source.file_id": ("refused", "use base64"),
    "messages.content.transformations": ("refused", ""),
    "messages.content.content": ("works", "text and images"),
    "messages.content.content.type": ("works", "text, image; others are refused"),
    "messages.content.content.source": ("works", "as above"),
    "messages.content.content.source.type": ("works", "base64"),
    "messages.content.content.source.data": ("works", ""),
    "messages.content.content.source.media_type": ("ignored", "the data determine the type"),
    "messages.content.content.source.url": ("refused", "URLs are not fetched; use base64"),
    "messages.content.content.source.file_id": ("refused", "use base64"),
    "messages.content.content.transformations": ("refused", ""),
    "messages.content.content.text": ("works", ""),
    "messages.content.content.cache_control": ("ignored", "the block's own `cache_control` applies"),
    "messages.content.toolset_name": ("refused", ""),
    "messages.content.is_error": ("ignored", "not supported by templates"),
    "messages.content.citations": ("refused", ""),
    "messages.content.content.citations": ("refused", ""),
    "messages.content.cache_control": ("works", "as `cache_control`"),
    "messages.content.cache_control.type": ("works", "ephemeral"),
    "messages.content.cache_control.ttl": ("works", "as `cache_control.ttl`"),
    "system": ("works", ""),
    "system.type": ("works", "text"),
    "system.*": ("ignored", _OTHERS),
    "system.text": ("works", ""),
    "system.citations": ("refused", ""),
    "system.cache_control": ("works", "as `cache_control`"),
    "system.cache_control.type": ("works", "ephemeral"),
    "system.cache_control.ttl": ("works", "as `cache_control.ttl`"),
    "stop_sequences": ("works", ""),
    "stream": ("works", ""),
    "temperature": ("works", ""),
    "top_p": ("works", ""),
    "top_k": ("works", ""),
    "tools": ("works", "client tools; server tools are refused"),
    "tools.type": ("works", "custom"),
    "tools.name": ("works", ""),
    "tools.description": ("works", ""),
    "tools.input_schema": ("works", ""),
    "tools.strict": ("works", "in formats with a grammar"),
    "tools.cache_control": ("works", "as `cache_control`"),
    "tools.cache_control.type": ("works", "ephemeral"),
    "tools.cache_control.ttl": ("works", "as `cache_control.ttl`"),
    "tools.input_examples": ("refused", ""),
    "tools.defer_loading": ("refused", ""),
    "tools.allowed_callers": ("refused", "only direct is supported"),
    "tools.eager_input_streaming": ("ignored", "a call is sent when it is complete"),
    "tool_choice": ("works", ""),
    "tool_choice.type": ("works", ""),
    "tool_choice.name": ("works", ""),
    "tool_choice.disable_parallel_tool_use": ("works", "only the first call is returned"),
    "thinking": (
        "works",
        "returns the model's reasoning; if unset, disabled where the template allows; ignored where impossible",
    ),
    "thinking.type": ("works", "enabled, adaptive, between_tools (all equivalent), or disabled"),
    "thinking.budget_tokens": ("ignored", "validated; `max_tokens` limits reasoning and answer together"),
    "thinking.block_binding": ("refused", ""),
    "thinking.display": ("works", "`summarized` returns the full reasoning, `omitted` returns none"),
    "output_config": ("works", ""),
    "output_config.effort": (
        "works",
        "with and without `thinking`, if the model's template has an effort; otherwise ignored",
    ),
    "output_config.format": ("works", "a JSON schema"),
    "output_config.format.type": ("works", "json_schema"),
    "output_config.format.schema": ("works", ""),
    "output_config.task_budget": ("refused", ""),
    "metadata": ("works", ""),
    "metadata.user_id": ("works", "sets `client_id`, for fairness"),
    "cache_control": ("works", "retains the KV blocks of the prefix for `ttl`"),
    "cache_control.type": ("works", "ephemeral"),
    "cache_control.ttl": ("works", "5m (default) or 1h"),
    "service_tier": ("ignored", "there is only one tier"),
    "inference_geo": ("refused", ""),
    "container": ("refused", ""),
    "context_management": ("refused", "only keeping all thinking blocks is supported"),
    "mcp_servers": ("refused", ""),
    "fallbacks": ("refused", ""),
    "speed": ("refused", "only standard is supported"),
    "compaction": ("refused", ""),
    "thread": ("refused", "conversations are not stored; send all messages"),
    "fallback_credit_token": ("refused", ""),
    "billing_policy": ("ignored", "applies only to Anthropic accounts"),
    "diagnostics": ("ignored", "cache diagnostics are not reported"),
    "user_profile_id": ("ignored", "applies only to Anthropic accounts"),
    "workspace_id": ("ignored", "applies only to Anthropic accounts"),
    "request_id": ("works", "extension: the id of the native request"),
    "return_receipt": ("works", "extension: adds `receipt` to the message, or to `message_delta`"),
}
# Fields of vLLM's API that responses take as well.
_RESPONSES_SAMPLING = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "seed", "logit_bias",
    "allowed_token_ids", "stop", "stop_token_ids", "bad_words", "ignore_eos", "include_stop_str_in_output",
    "chat_template_kwargs", "priority", "cache_salt",
)  # fmt: skip
RESPONSES: Table = {
    "model": ("works", "the served model, or a loaded adapter"),
    "input": ("works", "text, or items"),
    "input.type": (
        "works",
        (
            "message, reasoning, function and custom tool calls and their outputs, and item_reference to an item of a "
            "stored response; others are refused"
        ),
    ),
    "input.*": ("ignored", _OTHERS),
    "input.role": ("works", "developer becomes system if the template does not support it"),
    "input.content": ("works", "text, including the text of reasoning items, and images"),
    "input.content.type": ("works", "text, input_image; others are refused"),
    "input.content.text": ("works", ""),
    "input.content.refusal": ("works", "treated as text"),
    "input.content.prompt_cache_breakpoint": ("ignored", "any cached prefix is reused"),
    "input.content.annotations": ("ignored", "from an earlier response"),
    "input.content.logprobs": ("ignored", "from an earlier response"),
    "input.content.image_url": ("works", "a data URL"),
    "input.content.file_id": ("refused", "use a data URL"),
    "input.content.detail": ("ignored", "the model's image processor decides"),
    "input.id": ("ignored", "items are identified by their contents, except in an item_reference"),
    "input.status": ("ignored", "from an earlier response"),
    "input.phase": ("ignored", "not supported by templates"),
    "input.caller": ("ignored", "only the model calls tools"),
    "input.namespace": ("works", "of the called tool"),
    "input.async": ("refused", ""),
    "input.call_id": ("works", ""),
    "input.name": ("works", ""),
    "input.arguments": ("works", ""),
    "input.input": ("works", "input of a custom tool"),
    "input.output": ("works", "text and images"),
    "input.output.type": ("works", "text, input_image; others are refused"),
    "input.output.text": ("works", ""),
    "input.output.prompt_cache_breakpoint": ("ignored", "any cached prefix is reused"),
    "input.output.image_url": ("works", "a data URL"),
    "input.output.file_id": ("refused", "use a data URL"),
    "input.output.detail": ("ignored", "the model's image processor decides"),
    "input.summary": ("works", "used when a reasoning item has no `content`"),
    "input.summary.type": ("ignored", ""),
    "input.summary.text": ("works", ""),
    "input.encrypted_content": ("works", "used when a reasoning item has no `content`"),
    "instructions": ("works", "apply to this response only; they precede the previous conversation"),
    "previous_response_id": ("works", "the previous response must be stored and have ended"),
    "store": ("works", "true by default; kept for `--response-ttl-s`"),
    "background": ("works", "with `store`"),
    "stream": ("works", ""),
    "stream_options": ("ignored", "events are not padded"),
    "stream_options.include_obfuscation": ("ignored", "events are not padded"),
    "max_output_tokens": ("works", ""),
    "temperature": ("works", ""),
    "top_p": ("works", ""),
    "reasoning": ("works", ""),
    "reasoning.effort": ("works", "as supported by the model's template; otherwise refused"),
    "reasoning.mode": ("refused", "only standard is supported"),
    "reasoning.context": ("ignored", "the model's template decides which earlier reasoning it shows"),
    "reasoning.summary": ("ignored", "reasoning is returned unchanged"),
    "reasoning.generate_summary": ("ignored", "reasoning is returned unchanged"),
    "text": ("works", ""),
    "text.format": ("works", "text, json_object or json_schema"),
    "text.format.type": ("works", ""),
    "text.format.schema": ("works", "ignored if the format is text or any JSON"),
    "text.format.name": ("ignored", "schemas do not need a name"),
    "text.format.description": ("ignored", "only the schema is used"),
    "text.format.strict": ("works", "`false` validates afterwards what cannot be enforced"),
    "text.verbosity": ("refused", "only medium is supported"),
    "tools": ("works", "client tools"),
    "tools.type": ("works", "function, custom with text, and namespace; web_search is omitted, others refused"),
    "tools.name": ("works", ""),
    "tools.description": ("works", ""),
    "tools.parameters": ("works", ""),
    "tools.strict": ("works", "in formats with a grammar"),
    "tools.format": ("refused", "only text is supported"),
    "tools.output_schema": ("ignored", "not supported by templates"),
    "tools.allowed_callers": ("refused", "only direct is supported"),
    "tools.defer_loading": ("refused", ""),
    "tools.async": ("refused", ""),
    "tools.tools": (
        "works",
        (
            "of a namespace; the model sees `NAMESPACE__NAME`, and the namespace's description before that of its "
            "first tool"
        ),
    ),
    "tools.tools.type": ("works", "function, and custom with text; others are refused"),
    "tools.tools.name": ("works", ""),
    "tools.tools.description": ("works", ""),
    "tools.tools.parameters": ("works", ""),
    "tools.tools.strict": ("works", "in formats with a grammar"),
    "tools.tools.format": ("refused", "only text is supported"),
    "tools.tools.output_schema": ("ignored", "not supported by templates"),
    "tools.tools.allowed_callers": ("refused", "only direct is supported"),
    "tools.tools.defer_loading": ("refused", ""),
    "tools.tools.async": ("refused", ""),
    "tools.external_web_access": ("ignored", "web search is not offered to the model"),
    "tools.filters": ("ignored", "web search is not offered to the model"),
    "tools.search_context_size": ("ignored", "web search is not offered to the model"),
    "tools.user_location": ("ignored", "web search is not offered to the model"),
    "tool_choice": ("works", "none, auto, required, a tool, or allowed_tools"),
    "tool_choice.type": ("works", ""),
    "tool_choice.name": ("works", "a tool of a namespace is also found by its own name, if no other tool has it"),
    "tool_choice.mode": ("works", ""),
    "tool_choice.tools": ("works", ""),
    "tool_choice.tools.type": ("ignored", "the name is sufficient"),
    "tool_choice.tools.name": ("works", "as `tool_choice.name`"),
    "parallel_tool_calls": ("works", "if false, only the first call is returned"),
    "max_tool_calls": ("ignored", "limits calls of server tools, which are not supported"),
    "include": (
        "works",
        (
            "`reasoning.encrypted_content`, and `message.output_text.logprobs` for the log probabilities of the tokens "
            "of messages; output of other tools is ignored"
        ),
    ),
    "metadata": ("works", "returned with the response"),
    "client_metadata": ("ignored", "sent by Codex"),
    "prompt_cache_key": ("ignored", "requests are routed by their prefix"),
    "prompt_cache_retention": ("works", "`24h` keeps the prompt's KV blocks"),
    "prompt_cache_options": ("works", ""),
    "prompt_cache_options.ttl": ("works", "the prompt's KV blocks are kept this long"),
    "prompt_cache_options.mode": ("ignored", "any cached prefix is reused"),
    "prompt_cache_options.comparison_response_id": ("ignored", "cache diagnostics are not reported"),
    "prompt_cache_options.prewarm": ("refused", ""),
    "service_tier": ("works", "`flex` means priority -50; `priority` and `fast` mean 50"),
    "safety_identifier": ("works", "used like `user`, if `user` is unset"),
    "user": ("works", "sets `client_id`, for fairness"),
    "access_programs": ("refused", ""),
    "image": ("refused", ""),
    "truncation": ("refused", "only disabled is supported"),
    "top_logprobs": ("works", "with `message.output_text.logprobs` in `include`, otherwise ignored"),
    **dict.fromkeys(_RESPONSES_SAMPLING, ("works", "as in chat completions")),
    "conversation": (
        "works",
        "an id, or an object with one; needs `store`, and excludes `previous_response_id`",
    ),
    "conversation.id": ("works", ""),
    "prompt": ("refused", ""),
    "context_management": ("refused", ""),
    "moderation": ("refused", ""),
    "return_receipt": ("works", "extension: adds `receipt` to the response"),
}
# For each path of objects that have a type, the supported types.
RESPONSES_TYPES: Types = {
    "input": (
        "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
        "item_reference",
    ),
    "input.content": ("input_text", "output_text", "text", "refusal", "reasoning_text", "input_image"),
    "input.output": ("input_text", "output_text", "text", "refusal", "input_image"),
    "tools": ("function", "custom", "web_search", "namespace"),
    "tools.tools": ("function", "custom"),
    "tool_choice": ("function", "custom", "allowed_tools"),
}  # fmt: skip
MESSAGES_TYPES: Types = {
    "messages.content": ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    "messages.content.content": ("text", "image"),
    "messages.content.source": ("base64", "url", "file"),
    "messages.content.content.source": ("base64", "url", "file"),
    "system": ("text",),
    "tools": ("custom",),
}
# Fields of embeddings, scores and reranking.
_EMBEDDING_COMMON: Table = {
    "model": ("works", "the served model, or a loaded adapter"),
    "user": ("works", "sets `client_id`, for fairness"),
    "request_id": ("works", "ids of the native requests, with a number appended per text"),
    "priority": ("works", "lower runs first, as in vLLM; overrides `service_tier`"),
    "service_tier": ("works", "`flex` means priority -50; `priority` and `fast` mean 50"),
    "cache_salt": ("works", ""),
    "timeout_ms": ("works", ""),
    "pooling": (
        "works",
        (
            "`last` or `mean`, and for encoders also `cls`, `max`, `mean_sqrt_len_tokens` or `weightedmean`; by "
            "default the model's own (sentence-transformers' Pooling), else `mean` for encoders and `last` for others"
        ),
    ),
    "truncate_prompt_tokens": ("works", "keeps the start of texts; -1 means the model's limit"),
    "truncate": ("works", "true means the same as `truncate_prompt_tokens` -1"),
    "truncation_direction": ("refused", "only `right` is supported, which keeps the start"),
}
EMBEDDINGS: Table = {
    "input": ("works", "text, token ids, or an array of either; at most 2,048"),
    "encoding_format": ("works", "float or base64"),
    "dimensions": ("works", "truncates the vector and rescales it to unit length"),
    "normalize": ("works", "if false, returns the unscaled hidden state"),
    "prompt_name": (
        "works",
        "a prompt of `config_sentence_transformers.json`, put before texts; by default `default_prompt_name`",
    ),
    "messages": ("refused", ""),
    "add_special_tokens": ("ignored", "text gets the tokenizer's special tokens"),
    **_EMBEDDING_COMMON,
}
SCORE: Table = {
    "text_1": ("works", "one text, or as many as in `text_2`"),
    "text_2": ("works", "one or more texts"),
    "queries": ("works", "as `text_1`"),
    "documents": ("works", "as `text_2`"),
    "use_activation": ("works", "if false, returns logits; refused for cosine similarities"),
    **_EMBEDDING_COMMON,
    "pooling": (
        "works",
        "`last` or `mean`; the score is then a cosine similarity, even if the model was trained to answer yes or no",
    ),
}
CLASSIFY: Table = {
    "input": ("works", "text, token ids, or an array of either; at most 2,048"),
    "use_activation": ("works", "if false, returns logits"),
    "activation": ("refused", "is the older name of `use_activation`"),
    "messages": ("refused", ""),
    "add_special_tokens": ("ignored", "text gets the tokenizer's special tokens"),
    **_EMBEDDING_COMMON,
    "pooling": ("refused", "the classification head defines it"),
}
RERANK: Table = {
    "query": ("works", ""),
    "documents": ("works", "texts, or objects with `text`"),
    "documents.text": ("works", ""),
    "texts": (
        "works",
        "instead of `documents`, as in Text Embeddings Inference: the answer is an array with `index` and `score`",
    ),
    "return_text": ("works", "with `texts`; false by default"),
    "raw_scores": ("works", "logits instead of probabilities; refused for cosine similarities"),
    "top_n": ("works", "0 or unset returns all documents"),
    "return_documents": ("works", "true by default; only with `documents`"),
    "rank_fields": ("refused", ""),
    "max_chunks_per_doc": ("refused", ""),
    "max_tokens_per_doc": ("refused", ""),
    "use_activation": ("works", "if false, returns logits; refused for cosine similarities"),
    **_EMBEDDING_COMMON,
    "pooling": (
        "works",
        "`last` or `mean`; the score is then a cosine similarity, even if the model was trained to answer yes or no",
    ),
}
RESPONSES_OPAQUE = (
    "logit_bias",
    "chat_template_kwargs",
    "tools.parameters",
    "tools.output_schema",
    "tools.filters",
    "tools.user_location",
    "prompt_cache_breakpoint",
    "input.caller",
    "client_metadata",
    "tools.format",
    "text.format.schema",
    "metadata",
)
# Fields of messages that are passed on, compared or ignored as a whole, so that their contents are not checked.
MESSAGES_OPAQUE = (
    "tools.input_schema",
    "messages.content.input",
    "output_config.format.schema",
    "messages.content.content.cache_control",
    "messages.content.caller",
    "context_management",
    "diagnostics",
)
# Values of refused fields that are accepted because they match the behavior anyway.
_DEFAULTS: Mapping[str, Sequence[object]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "speed": ("standard",),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "tools.allowed_callers": (["direct"],),
    "tools.tools.allowed_callers": (["direct"],),
    "text.verbosity": ("medium",),
    "reasoning.mode": ("standard",),
    "truncation": ("disabled",),
    "truncation_direction": ("right", "Right"),
    "tools.format": ({"type": "text"},),
    "tools.tools.format": ({"type": "text"},),
}
TABLES: dict[str, Table] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
    "/score": SCORE,
    "/rerank": RERANK,
    "/classify": CLASSIFY,
}
_INDEX = re.compile(r"\[\d+\]")
# Names of ignored fields may come from clients, and are sent in a header.
_MAX_NAME, _MAX_LISTED, _PRINTED = 128, 2000, ".*"


def check_fields(body: Body, table: Table, types: Types | None = None, opaque: tuple[str, ...] = ()) -> list[str]:
    """Check that every object in a body, except those inside `opaque` fields, has one of `types`, and that every field
    is in `table` and not refused. Return the fields that are set and have no effect. Raises InvalidArgumentError if a
    field is unknown and may not be ignored, or UnsupportedError if a type is not supported, or a field is refused.
    """
    ignored: dict[str, None] = {}
    fields = [(path, _INDEX.sub("", path), value) for path, value in _paths(body.fields, "", opaque)]
    # The types come first: an object of another type has other fields.
    for path, name, value in fields:
        supported = (types or {}).get(name.removesuffix(".type")) if name.endswith(".type") else None
        if supported is not None and isinstance(value, str) and value not in supported:
            raise UnsupportedError(f"{value[:64]!r} is not supported; use {', '.join(supported)}", field=path)
    other = ""  # the last unknown field that is ignored, with everything in it
    for path, name, value in fields:
        if other and path.startswith((f"{other}.", f"{other}[")):
            continue
        known = table.get(name)
        if known is None:
            if not _may_be_unknown(name, table):
                raise InvalidArgumentError("is not a field of this endpoint", field=path[:128])
            other = path
            if value:
                ignored[name] = None
            continue
        if known[0] == "refused":
            _check_default(name, value, known[1], path)
        if known[0] == "ignored" and value:
            ignored[name] = None
    return list(ignored)


def check_supported(body: Body, table: Table) -> None:
    """Raise UnsupportedError if a body sets a top-level field that `table` refuses."""
    for name in body.fields:
        status, note = table.get(name, ("works", ""))
        if status == "refused":
            _check_default(name, body.get(name), note, name)


def _check_default(name: str, value: object, note: str, path: str) -> None:
    """Raise UnsupportedError if a refused field has a value that may request something, such as `{}`."""
    if (value or isinstance(value, dict)) and value not in _DEFAULTS.get(name, ()):
        raise UnsupportedError(note or "is not supported", field=path)


def ignored_fields(body: Body, table: Table) -> list[str]:
    """Return the fields of a body that are set and have no effect; call this after the body was read.

    Supported fields may have no effect in combination with others, such as `tool_choice` without tools. Raises
    InvalidArgumentError if a field is unknown and may not be ignored.
    """
    ignored: dict[str, None] = {}
    for path, value in body.unread():
        name = _INDEX.sub("", path)
        if name not in table and not _may_be_unknown(name, table):
            raise InvalidArgumentError("is not a field of this endpoint; leave it out", field=path[:128])
        if value:
            ignored[name] = None
    return list(ignored)


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the response header that lists ignored fields; of a long list, the first ones and the number of others."""
    shown: list[str] = []
    size = 0
    for name in ignored:
        text = urllib.parse.quote(name[:_MAX_NAME], safe=_PRINTED, errors="replace")
        size += len(text) + 2
        if size > _MAX_LISTED:
            shown.append(f"and {len(ignored) - len(shown)} others")
            break
        shown.append(text)
    return {"x-midstream-ignored": ", ".join(shown)} if shown else {}


def _may_be_unknown(name: str, table: Table) -> bool:
    """Return whether a field that is not in `table` is ignored instead of refused."""
    top, _, rest = name.partition(".")
    return bool(rest) and f"{top}.*" in table


def limit_without_effect(request: pb.GenerateRequest, model: ModelFolder, name: str = "max_tokens") -> list[str]:
    """Return the field with the limit on output tokens if no output can reach it, since the model's context is shorter;
    the output then ends with the context. Otherwise return an empty list.
    """
    return [name] if request.max_tokens > model.max_sequence_length else []


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
    """Return the tables in Markdown, for docs/adapters.md."""
    lines = []
    for endpoint, table in TABLES.items():
        lines += [f"| `{endpoint}` | | |", "| --- | --- | --- |"]
        lines += [f"| `{path}` | {status} | {note} |" for path, (status, note) in table.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
