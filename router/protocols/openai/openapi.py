"""The OpenAPI document for the HTTP port."""

from __future__ import annotations

from typing import Any

from midstream import __version__
from midstream.model.folder import ModelFolder
from router.pipeline.embedder import MAX_INPUTS, Pooling
from router.pipeline.request_checks import (
    MAX_FLOAT,
    MAX_LOG_PROBS,
    MAX_NAME,
    MAX_STOP_TOKENS,
    MAX_STOP_WORD_CHARACTERS,
    MAX_STOP_WORDS,
)
from router.protocols.conversation import EFFORTS
from router.protocols.fields import RESPONSES
from router.protocols.live_weights import REFUSED, SGLANG_MODES, VLLM_MODES
from router.protocols.openai.operations import GROUPS, describe
from router.protocols.openai.parameters import TIERS

# A JSON schema, or another part of an OpenAPI document.
Part = dict[str, Any]


def _integer(low: int, high: int) -> Part:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Part:
    return {"type": "number", "minimum": low, "maximum": high}


def _array(items: Part, **limits: int) -> Part:
    return {"type": "array", "items": items, **limits}


def _any(*schemas: Part) -> Part:
    return {"anyOf": list(schemas)}


def _object(properties: Part, *required: str) -> Part:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


_TEXT: Part = {"type": "string"}
_SOME_TEXT: Part = {"type": "string", "minLength": 1}
_FLAG: Part = {"type": "boolean"}
_OBJECT: Part = {"type": "object"}
_NAME: Part = {"type": "string", "maxLength": MAX_NAME}
_INPUT = _any(_TEXT, _array(_OBJECT, minItems=1))
_ANY_TEXTS = _any(_TEXT, _array(_TEXT))
_TEXT_BLOCK = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
_EFFORT: Part = {"enum": list(EFFORTS)}
_TOOL_CHOICE = _any({"enum": ["none", "auto", "required"]}, _OBJECT)
_SERVICE_TIER: Part = {"enum": list(TIERS)}
_CACHING: Part = {
    "prompt_cache_retention": {"enum": ["in_memory", "24h"]},
    "prompt_cache_options": _object({"ttl": {"enum": ["30m", "12h"]}}),
}
_STOP_WORD: Part = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_WORD_CHARACTERS}


def document(model: ModelFolder) -> Part:
    """Return the OpenAPI document of a router that serves `model`."""
    token = _integer(0, model.vocab_size - 1)
    names = _any({"const": model.name}, {"type": "string", "description": "A loaded adapter."})
    common = _common_fields(model, token, names)
    tokens = _array(token, minItems=1)

    def inputs(max_items: int) -> Part:
        lists = [_array(item, minItems=1, maxItems=max_items) for item in (_SOME_TEXT, tokens)]
        return _any(_SOME_TEXT, tokens, *lists)

    completion = {
        **common,
        "prompt": inputs(256),
        "best_of": _integer(1, 128),
        "echo": _FLAG,
        "max_tokens": {**_integer(0, 0xFFFFFFFF), "description": "0 needs echo."},
        "logprobs": _integer(0, MAX_LOG_PROBS),
    }
    chat = {
        **common,
        "messages": _array({"$ref": "#/components/schemas/Message"}, minItems=1),
        "max_completion_tokens": _integer(1, 0xFFFFFFFF),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_LOG_PROBS),
        "prediction": _object({"type": {"const": "content"}, "content": _any(_TEXT, _array(_TEXT_BLOCK))}, "type"),
        "tools": _array({"$ref": "#/components/schemas/Tool"}),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _FLAG,
        "reasoning_effort": _EFFORT,
        **_CACHING,
        "prompt_cache_key": _TEXT,
        "metadata": _OBJECT,
        "add_generation_prompt": _FLAG,
        "continue_final_message": _FLAG,
        "chat_template_kwargs": _OBJECT,
    }
    event_id = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": _TEXT,
        "description": "Id of the last event received; the stream resumes after it, on any router.",
    }
    versions = {"enum": ["2026-10-21", "2023-06-01"]}
    version = {"name": "anthropic-version", "in": "header", "required": True, "schema": versions}
    name, response_id, file_id, batch_id, receipt_id = (
        {"name": n, "in": "path", "required": True, "schema": _SOME_TEXT}
        for n in ("name", "response_id", "file_id", "batch_id", "receipt_id")
    )
    name["example"] = model.name
    included = [_query(name, _array(_TEXT), "Has no effect.") for name in ("include", "include[]")]
    stored = (
        response_id,
        _query("stream", _FLAG),
        _query("starting_after", _integer(0, 10**9 - 1)),
        _query("include_obfuscation", _FLAG, "Has no effect: events are not padded."),
        *included,
    )
    order, purpose = _query("order", {"enum": ["asc", "desc"]}), _query("purpose", _TEXT)
    lifecycle = {"enum": ["active", "deprecated", "retired"]}
    models = (
        {**version, "required": False, "description": "Lists models in the format of Anthropic's API, in pages."},
        _query("limit", _integer(1, 1000), "Applies only with anthropic-version, like the other parameters."),
        _query("after_id", _TEXT, "Id of the last item of the previous page."),
        _query("before_id", _TEXT, "Id of the first item of the next page."),
        _query("lifecycle", _array(lifecycle), "Stages of the models; active and deprecated by default."),
    )
    messages = _messages_fields(names)
    counted = {name: messages[name] for name in ("model", "messages", "system", "tools", "tool_choice", "thinking")}
    tokenize = {"model": names, "prompt": _SOME_TEXT, "messages": chat["messages"], "tools": chat["tools"]}
    tokenize |= {"add_special_tokens": _FLAG, "return_token_strs": _FLAG}
    detokenize = {"model": names, "tokens": tokens}
    paths = {
        "/v1/chat/completions": {
            "post": _post("Complete a conversation (OpenAI's Chat Completions API).", chat, ["messages"], stream=True)
            | _with(event_id)
        },
        "/v1/completions": {"post": _post("Complete prompts.", completion, ["prompt"], stream=True) | _with(event_id)},
        "/v1/messages": {
            "post": _post(
                "Complete a conversation (Anthropic's Messages API).", messages, ["messages", "max_tokens"], stream=True
            )
            | _with(version)
        },
        "/v1/messages/count_tokens": {
            "post": _post("Count the tokens of a conversation.", counted, ["messages"]) | _with(version)
        },
        "/v1/responses": {
            "post": _post("Create a response and store it.", _responses_fields(names, model), ["input"], stream=True)
        },
        "/v1/responses/input_tokens": {
            "post": _post("Count the tokens of an input.", {"model": names, "input": _INPUT}, ["input"])
        },
        "/v1/responses/{response_id}": {
            "get": _get("A stored response, or its events after `starting_after`.") | _with(*stored),
            "delete": _get("Delete a stored response.") | _with(response_id),
        },
        "/v1/responses/{response_id}/cancel": {"post": _get("Cancel a background response.") | _with(response_id)},
        "/v1/responses/{response_id}/input_items": {
            "get": _get("The input items of a response.") | _with(response_id, *_page(100), order, *included)
        },
        **_conversation_paths(order, included),
        **_embedding_paths(names, inputs(MAX_INPUTS)),
        "/v1/files": {
            "get": _get("The caller's files, newest first.") | _with(*_page(1000), order, purpose),
            "post": _upload(),
        },
        "/v1/files/{file_id}": {
            "get": _get("A file's description.") | _with(file_id),
            "delete": _get("Delete a file.") | _with(file_id),
        },
        "/v1/files/{file_id}/content": {"get": _get("A file's contents.", "application/octet-stream") | _with(file_id)},
        "/v1/batches": {
            "get": _get("The caller's batches, newest first.") | _with(*_page(100)),
            "post": _post("Create a batch.", _batch_fields(), ["input_file_id", "endpoint", "completion_window"]),
        },
        "/v1/batches/{batch_id}": {"get": _get("A batch.") | _with(batch_id)},
        "/v1/batches/{batch_id}/cancel": {"post": _get("Cancel a batch.") | _with(batch_id)},
        "/tokenize": {"post": _post("Token ids of a text or a conversation.", tokenize, [])},
        "/detokenize": {"post": _post("The text of token ids.", detokenize, ["tokens"])},
        "/v1/models": {"get": _get("The models, with what they can do, and their loaded adapters.") | _with(*models)},
        "/v1/models/{name}": {"get": _get("A model or adapter by name.") | _with(name, models[0])},
        "/v1/receipts/{receipt_id}": {
            "get": _get("The receipt of an ended request, given the id of a request, completion, message or response.")
            | _with(
                receipt_id,
                _query("include_request", {"enum": ["true", "false"]}, "Whether to return the canonical request."),
                _query("include_outputs", {"enum": ["true", "false"]}, "Whether to return the output tokens."),
            )
        },
        "/v1/receipts/keys": {"get": _get("The public keys of all receipts.", "application/jwk-set+json")},
        "/ledger": {
            "get": _get("The usage record of ended requests, for admins.")
            | _with(
                _query("cell", _TEXT, "Required if there are several cells."),
                _query("after", _TEXT, "`next_after` of the previous page."),
            )
        },
        **_weights_paths(),
        **_kserve_paths(model),
        "/health": {"get": _get("Health of this router; 503 if it cannot serve requests.")},
        "/live": {"get": _get("Whether this process makes progress; 503 if it must be restarted.")},
        "/metrics": {"get": _get("Prometheus' metrics.", "text/plain")},
        "/openapi.json": {"get": _get("This document.")},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Midstream", "version": __version__},
        "tags": [{"name": name, "description": description} for name, description in GROUPS.items()],
        "paths": {
            path: {method: describe(path, method, operation) for method, operation in operations.items()}
            for path, operations in paths.items()
        },
        "components": {"schemas": {"Error": _ERROR, "Message": _MESSAGE, "Tool": _TOOL}},
    }


def _weights_paths() -> Part:
    """Return the routes of vLLM and SGLang for weights that change."""
    sglang_modes: Part = {"enum": [*SGLANG_MODES]}
    update: Part = {
        "model_path": _TEXT,
        "weight_version": {"type": "string", "maxLength": 128},
        "load_format": {"enum": ["auto", "safetensors"]},
        "abort_all_requests": _FLAG,
        "flush_cache": _FLAG,
    }
    flush = "Answers that no cached block has to be flushed."
    version = "The version of the weights."
    pause = _get("Pause generation, as vLLM does.") | _with(
        _query("mode", {"enum": [*VLLM_MODES]}, "What happens to running requests; by default abort."),
        _query("clear_cache", {"enum": ["true", "false"]}, "Has no effect: cached blocks belong to a version."),
    )
    sleep = _get("Let workers give their memory back, as vLLM does.") | _with(
        _query("level", {"enum": ["1", "2"]}, "2 also drops the weights' files from the page cache; by default 1."),
        _query("mode", {"enum": [*VLLM_MODES]}, "What happens to running requests; by default keep: they continue."),
    )
    tags = "`weights` and `kv_cache`, repeatable; by default both. No step runs before `kv_cache`."
    wake = _get("Wake workers up, as vLLM does.") | _with(
        _query("tags", {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}, tags),
    )
    return {
        "/pause": {"post": pause},
        "/resume": {"post": _get("Resume generation.")},
        "/is_paused": {"get": _get("Whether generation is paused in every cell.")},
        "/abort_requests": {"post": _post("Abort requests; all of them without ids.", {"request_ids": _ANY_TEXTS}, [])},
        "/reset_prefix_cache": {"post": _get(flush, "text/plain")},
        "/weight_info": {"get": _get(version)},
        "/sleep": {"post": sleep},
        "/wake_up": {"post": wake},
        "/is_sleeping": {"get": _get("Whether no step runs until /wake_up, in every cell.")},
        "/pause_generation": {"post": _post("Pause generation, as SGLang does.", {"mode": sglang_modes}, [])},
        "/continue_generation": {"post": _get("Resume generation.")},
        "/update_weights_from_disk": {
            "post": _post("Replace the weights by those of another folder.", update, ["model_path"])
        },
        "/abort_request": {"post": _post("Abort a request, or all.", {"rid": _TEXT, "abort_all": _FLAG}, [])},
        "/flush_cache": {"get": _get(flush, "text/plain"), "post": _get(flush, "text/plain")},
        "/get_weight_version": {"get": _get(version), "post": _get(version)},
        **{path: {"post": _get("Not supported; the answer says what to use.")} for path in REFUSED},
    }


def _common_fields(model: ModelFolder, token: Part, names: Part) -> Part:
    """Return the schemas shared by completions and chat completions."""
    guided = {"json": _any(_OBJECT, _TEXT), "regex": _TEXT, "grammar": _TEXT, "choice": _ANY_TEXTS}
    return {
        **_request_fields(names),
        **_sampling_fields(),
        "max_tokens": _integer(1, 0xFFFFFFFF),
        "n": _integer(1, 128),
        "seed": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
        "top_k": _integer(-1, 0xFFFFFFFF),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_FLOAT},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,4}$"},
            "additionalProperties": _number(-100, 100),
        },
        "allowed_token_ids": _array(token, minItems=1),
        "stop": _any(_STOP_WORD, _array(_STOP_WORD, maxItems=MAX_STOP_WORDS)),
        "stop_token_ids": _array(token, maxItems=MAX_STOP_TOKENS),
        "bad_words": _array(_STOP_WORD, maxItems=MAX_STOP_WORDS),
        "min_tokens": _integer(0, model.max_sequence_length),
        "ignore_eos": _FLAG,
        "include_stop_str_in_output": _FLAG,
        "skip_special_tokens": _FLAG,
        "return_token_ids": _FLAG,
        "return_tokens_as_token_ids": _FLAG,
        "prompt_logprobs": _integer(0, MAX_LOG_PROBS),
        "add_special_tokens": _FLAG,
        "truncate_prompt_tokens": _integer(-1, 0xFFFFFFFF),
        "stream_options": _object({"include_usage": _FLAG, "continuous_usage_stats": _FLAG}),
        "response_format": _object(
            {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
                "json_schema": _object({"name": _TEXT, "schema": _OBJECT}),
                "schema": _OBJECT,
                "format": _OBJECT,
                "structures": {"type": "array", "items": _OBJECT},
                "triggers": {"type": "array", "items": _TEXT},
            },
            "type",
        ),
        **{f"guided_{name}": schema for name, schema in guided.items()},
        "guided_json_object": _FLAG,
        "grammar": _TEXT,
        "json_schema": _any(_OBJECT, _TEXT),
        "ebnf": _TEXT,
        "regex": _TEXT,
        "guided_whitespace_pattern": _TEXT,
        "use_beam_search": _FLAG,
        "length_penalty": {"type": "number"},
        "safety_identifier": _NAME,
        "structured_outputs": _object(
            {**guided, "json_object": _FLAG, "structural_tag": {}, "whitespace_pattern": _TEXT}
        ),
        "detached": _FLAG,
        "return_receipt": _FLAG,
    }


def _request_fields(names: Part) -> Part:
    """Return the schemas that the generating endpoints share with embeddings."""
    return {
        "model": names,
        "user": _NAME,
        "request_id": _NAME,
        "cache_salt": _NAME,
        "priority": _integer(-100, 100),
        "service_tier": _SERVICE_TIER,
        "timeout_ms": _integer(1, 1 << 53),
    }


def _sampling_fields() -> Part:
    """Return the schemas shared by all generating endpoints."""
    return {
        "temperature": _number(0, 100),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "stream": _FLAG,
    }


def _embedding_paths(names: Part, inputs: Part) -> Part:
    """Return the paths of the endpoints for embeddings, scores, reranking and classes."""
    texts = _array(_SOME_TEXT, minItems=1, maxItems=MAX_INPUTS - 1)  # the query is one more
    either = _any(_SOME_TEXT, texts)
    cut = {
        "truncate_prompt_tokens": _integer(-1, 0xFFFFFFFF),
        "truncate": _FLAG,
    }
    common = {**_request_fields(names), **cut, "pooling": {"enum": list(Pooling)}}
    classified = {**_request_fields(names), **cut, "input": inputs, "use_activation": _FLAG}
    vectors = {
        **common,
        "input": inputs,
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": _integer(1, 1 << 20),
        "normalize": _FLAG,
        "prompt_name": _TEXT,
    }
    scored = {
        **common,
        "use_activation": _FLAG,
        "text_1": either,
        "text_2": either,
        "queries": either,
        "documents": either,
    }
    ranked = {
        **common,
        "use_activation": _FLAG,
        "raw_scores": _FLAG,
        "query": _SOME_TEXT,
        "documents": texts,
        "texts": texts,
        "return_text": _FLAG,
        "top_n": _integer(0, 0xFFFFFFFF),
        "return_documents": _FLAG,
    }
    return {
        "/v1/embeddings": {"post": _post("Embeddings of texts.", vectors, ["input"])},
        "/score": {
            "post": _post(
                "Similarities of texts: `text_1` and `text_2`, or `queries` and `documents` (also /v1/score).",
                scored,
                [],
            )
        },
        "/classify": {"post": _post("Classes of texts.", classified, ["input"])},
        "/rerank": {
            "post": _post(
                "Sort documents by their similarity to a query (also /v1/rerank, /v2/rerank).",
                ranked,
                ["query"],
            )
        },
    }


def _conversation_paths(order: Part, included: list[Part]) -> Part:
    conversation, item = (
        {"name": name, "in": "path", "required": True, "schema": _SOME_TEXT} for name in ("conversation_id", "item_id")
    )
    items = {"items": _array(_OBJECT, maxItems=20)}
    metadata = {"metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}}}
    one = "/v1/conversations/{conversation_id}"
    return {
        "/v1/conversations": {"post": _post("Create a conversation.", items | metadata, [])},
        one: {
            "get": _get("A conversation.") | _with(conversation),
            "post": _post("Replace a conversation's metadata.", metadata, []) | _with(conversation),
            "delete": _get("Delete a conversation.") | _with(conversation),
        },
        f"{one}/items": {
            "get": _get("The items of a conversation.") | _with(conversation, *_page(100), order, *included),
            "post": _post("Add items to a conversation.", items, ["items"]) | _with(conversation, *included),
        },
        f"{one}/items/{{item_id}}": {
            "get": _get("An item of a conversation.") | _with(conversation, item, *included),
            "delete": _get("Remove an item from a conversation.") | _with(conversation, item),
        },
    }


def _kserve_paths(served: ModelFolder) -> Part:
    """Return the paths of KServe's protocol v2, whose errors are texts."""
    model = {"name": "model", "in": "path", "required": True, "schema": _SOME_TEXT, "example": served.name}
    tensor = _object(
        {
            "name": _TEXT,
            "datatype": _TEXT,
            "shape": _array(_integer(0, 1 << 32)),
            "data": {"type": "array"},
            "parameters": _OBJECT,
        },
        "name",
    )
    infer = {"id": _TEXT, "inputs": _array(tensor, minItems=1), "outputs": _array(tensor), "parameters": _OBJECT}
    # The other fields of TensorRT-LLM's ensemble are tensors, too.
    generate = {"text_input": _SOME_TEXT, "max_tokens": _integer(1, 1 << 31), "id": _TEXT, "parameters": _OBJECT}
    one = "/v2/models/{model}"
    operations = {
        "/v2": {"get": _get("Name, version and extensions of this server (KServe's protocol v2).")},
        "/v2/health/live": {"get": _get("Whether this router is live.")},
        "/v2/health/ready": {"get": _get("Whether this router is ready; 503 if it is not.")},
        one: {"get": _get("The model's tensors (also /v2/models/{model}/versions/1, as below).") | _with(model)},
        f"{one}/ready": {"get": _get("Whether the model is ready.") | _with(model)},
        f"{one}/config": {"get": _get("The model's configuration in Triton's format.") | _with(model)},
        f"{one}/infer": {"post": _post("Run all rows of a batch of tensors.", infer, ["inputs"]) | _with(model)},
        f"{one}/generate": {
            "post": _post("Complete a text (Triton's extension).", generate, ["text_input"]) | _with(model)
        },
        f"{one}/generate_stream": {
            "post": _post("Complete a text, as events.", generate, ["text_input"], stream=True) | _with(model)
        },
    }
    failed = {"application/json": {"schema": _object({"error": _TEXT}, "error")}}
    for path in operations.values():
        for operation in path.values():
            operation["responses"]["default"] = {"description": "Error.", "content": failed}
    return operations


def _responses_sampling(model: ModelFolder) -> Part:
    """Return the schemas of vLLM's fields in responses."""
    common = _common_fields(model, _integer(0, model.vocab_size - 1), _TEXT)
    taken = {name: common[name] for name in RESPONSES if name in common}
    return {**_sampling_fields(), **taken, "chat_template_kwargs": _OBJECT}


def _responses_fields(names: Part, model: ModelFolder) -> Part:
    return {
        "model": names,
        "input": _INPUT,
        "instructions": _TEXT,
        "previous_response_id": _TEXT,
        "conversation": _any(_TEXT, _object({"id": _TEXT}, "id")),
        "return_receipt": _FLAG,
        "store": _FLAG,
        "background": _FLAG,
        **_responses_sampling(model),
        "top_logprobs": _integer(0, MAX_LOG_PROBS),
        "max_output_tokens": _integer(1, 0xFFFFFFFF),
        "tools": _array(_OBJECT),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _FLAG,
        "text": _object({"format": _OBJECT}),
        "reasoning": _object({"effort": _EFFORT}),
        "include": _array(_TEXT),
        "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
        **_CACHING,
        "service_tier": _SERVICE_TIER,
        "safety_identifier": _NAME,
        "user": _NAME,
    }


def _messages_fields(names: Part) -> Part:
    content = _any(_TEXT, _array(_any(_TEXT_BLOCK, _OBJECT)))
    turn = _object({"role": {"enum": ["user", "assistant", "system"]}, "content": content}, "role", "content")
    tool = _object({"name": _SOME_TEXT, "description": _TEXT, "input_schema": _OBJECT}, "name", "input_schema")
    return {
        "model": names,
        "messages": _array(turn, minItems=1),
        "max_tokens": _integer(1, 0xFFFFFFFF),
        "system": _any(_TEXT, _array(_TEXT_BLOCK)),
        "stop_sequences": _array(_STOP_WORD, maxItems=MAX_STOP_WORDS),
        **_sampling_fields(),
        "top_k": _integer(0, 0xFFFFFFFF),
        "tools": _array(tool),
        "tool_choice": _OBJECT,
        "thinking": _OBJECT,
        "output_config": _OBJECT,
        "metadata": _OBJECT,
        "cache_control": _OBJECT,
        "request_id": _NAME,
        "return_receipt": _FLAG,
    }


_MESSAGE = _object(
    {
        "role": _SOME_TEXT,
        "content": _any(_TEXT, {"type": "null"}, _array(_TEXT_BLOCK)),
        "reasoning_content": _TEXT,
        "name": _TEXT,
        "tool_call_id": _TEXT,
        "tool_calls": _array(
            _object(
                {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})},
                "function",
            )
        ),
    },
    "role",
)
_FUNCTION = _object({"name": _SOME_TEXT, "description": _TEXT, "parameters": _OBJECT}, "name")
_TOOL = _object({"type": {"const": "function"}, "function": _FUNCTION}, "type", "function")
_NAMED: Part = {"type": ["string", "null"]}
_ERROR = _object(
    {
        "error": _object(
            {"message": _TEXT, "type": _TEXT, "param": _NAMED, "code": _NAMED}, "message", "type", "param", "code"
        )
    },
    "error",
)


def _page(max_items: int) -> tuple[Part, Part]:
    """Return the query parameters of a list."""
    return _query("after", _TEXT, "Id of the last item of the previous page."), _query("limit", _integer(1, max_items))


def _query(name: str, schema: Part, description: str = "") -> Part:
    """Return an optional query parameter."""
    return {"name": name, "in": "query", "schema": schema} | ({"description": description} if description else {})


def _with(*parameters: Part) -> Part:
    return {"parameters": list(parameters)}


def _post(summary: str, fields: Part, required: list[str], *, stream: bool = False) -> Part:
    # null means unset; OpenAI's clients send it for unset fields.
    properties = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items()
    }
    schema = _object(properties) | {"required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": _responses("text/event-stream" if stream else "")}


def _upload() -> Part:
    properties = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch", "user_data"]}}
    schema = _object(properties, "file", "purpose")
    body = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return {"summary": "Upload a file.", "requestBody": body, "responses": _responses("")}


def _batch_fields() -> Part:
    endpoints = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    lifetime = {"anchor": {"const": "created_at"}, "seconds": _integer(3600, 2592000)}
    return {
        "input_file_id": _TEXT,
        "endpoint": {"enum": endpoints},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,4}[smh]$"},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
        "output_expires_after": _object(lifetime, "anchor", "seconds"),
    }


def _get(summary: str, media_type: str = "") -> Part:
    return {"summary": summary, "responses": _responses(media_type)}


def _responses(media_type: str) -> Part:
    content: Part = {"application/json": {"schema": _OBJECT}}
    if media_type:
        content[media_type] = {"schema": _TEXT}
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "Success.", "content": content},
        "default": {"description": "Error that names the parameter that caused it.", "content": failed},
    }
