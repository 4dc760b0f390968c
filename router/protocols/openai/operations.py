"""Groups, descriptions and examples of the operations in the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.protocols.fields import TABLES
from router.protocols.live_weights import REFUSED

GROUPS = {
    "Generate": "Answers from a model. Each can be streamed (`stream`).",
    "Responses": "Responses that are stored, and can be read again, streamed from any event, or run in the background.",
    "Embeddings": "Vectors of texts, and what is computed from them.",
    "Files and batches": "Many requests in one file, which run when there is room.",
    "Tokens": "The tokenizer of the model.",
    "Models": "What this router serves.",
    "KServe": "KServe's protocol v2, with Triton's extension for text. Errors are `{\"error\": TEXT}`.",
    "Receipts": "Signed records of what was asked and answered.",
    "Weights": "For admins: weights that change while requests run, with the names that libraries for reinforcement "
    "learning use on vLLM and SGLang.",
    "Operations": "For load balancers, monitoring and operators.",
}
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_TEXTS = ["The river floods in spring.", "A cat sleeps on the sofa."]
_LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": _QUESTION, "max_tokens": 24},
}


@dataclass(frozen=True)
class Operation:
    """What is said of an operation beyond its fields.

    Attributes:
        example: A body that every model accepts. Ids in it are those that examples before it returned.
    """

    group: str
    description: str = ""
    example: Mapping[str, Any] | None = None


OPERATIONS = {
    "post /v1/chat/completions": Operation(
        "Generate",
        "A stream sends events with ids; the same body with `Last-Event-ID` continues it at any router.",
        {"messages": _QUESTION, "max_tokens": 24, "temperature": 0},
    ),
    "post /v1/completions": Operation(
        "Generate",
        "Continues a text, without a chat template. A list of prompts gives as many choices.",
        {"prompt": "Once upon a time", "max_tokens": 24},
    ),
    "post /v1/messages": Operation(
        "Generate",
        "For Anthropic's clients, which send the API key as `x-api-key`.",
        {"messages": _QUESTION, "max_tokens": 24},
    ),
    "post /v1/messages/count_tokens": Operation("Generate", "Generates nothing.", {"messages": _QUESTION}),
    "post /v1/responses": Operation(
        "Responses",
        "With `background`, returns at once; with `previous_response_id`, continues a conversation.",
        {"input": "Name three rivers.", "max_output_tokens": 24},
    ),
    "post /v1/responses/input_tokens": Operation("Responses", "Generates nothing.", {"input": "Name three rivers."}),
    "get /v1/responses/{response_id}": Operation("Responses", "With `stream`, sends the events of the response."),
    "delete /v1/responses/{response_id}": Operation("Responses", "A response that continues it keeps its own copy."),
    "post /v1/responses/{response_id}/cancel": Operation("Responses", "The response must have `background` set."),
    "get /v1/responses/{response_id}/input_items": Operation("Responses", "In pages."),
    "post /v1/conversations": Operation(
        "Responses",
        "Responses with its id in `conversation` begin with its items, and add theirs to it.",
        {"items": [{"role": "user", "content": "My name is Ada."}], "metadata": {"topic": "names"}},
    ),
    "get /v1/conversations/{conversation_id}": Operation("Responses", "Its metadata and time of creation."),
    "post /v1/conversations/{conversation_id}": Operation("Responses", "Its items stay.", {"metadata": {"topic": "x"}}),
    "delete /v1/conversations/{conversation_id}": Operation("Responses", "Its responses stay."),
    "get /v1/conversations/{conversation_id}/items": Operation("Responses", "In pages."),
    "post /v1/conversations/{conversation_id}/items": Operation(
        "Responses", "At most 20 at a time.", {"items": [{"role": "user", "content": "I like rivers."}]}
    ),
    "get /v1/conversations/{conversation_id}/items/{item_id}": Operation("Responses"),
    "delete /v1/conversations/{conversation_id}/items/{item_id}": Operation("Responses", "The others stay."),
    "post /v1/embeddings": Operation(
        "Embeddings", "One vector for each text, or for each list of token ids.", {"input": _TEXTS}
    ),
    "post /score": Operation(
        "Embeddings",
        "The cosine of the angle between the embeddings of two texts.",
        {"text_1": "Where is water high?", "text_2": _TEXTS},
    ),
    "post /classify": Operation(
        "Embeddings",
        "For models with a classification head: the most likely label of each text, and the probability of each label.",
        {"input": _TEXTS},
    ),
    "post /rerank": Operation(
        "Embeddings",
        "The most similar document comes first.",
        {"query": "Where is water high?", "documents": _TEXTS},
    ),
    "post /v1/files": Operation(
        "Files and batches",
        "A file for a batch has one request on each line (JSON): `custom_id`, `method`, `url` and `body`.",
        {"purpose": "batch", "file": json.dumps(_LINE) + "\n"},
    ),
    "get /v1/files": Operation("Files and batches", "In pages."),
    "get /v1/files/{file_id}": Operation("Files and batches", "Its size, purpose and time of expiry."),
    "get /v1/files/{file_id}/content": Operation("Files and batches", "Also for the results of a batch."),
    "delete /v1/files/{file_id}": Operation(
        "Files and batches", "Files of batches that run are needed until they end."
    ),
    "post /v1/batches": Operation(
        "Files and batches",
        "Runs the requests of a file, with a lower priority than others.",
        {"input_file_id": "FILE_ID", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    "get /v1/batches": Operation("Files and batches", "In pages."),
    "get /v1/batches/{batch_id}": Operation("Files and batches", "Its state, counts, and the files with results."),
    "post /v1/batches/{batch_id}/cancel": Operation("Files and batches", "Results so far stay."),
    "post /tokenize": Operation(
        "Tokens", "A text (`prompt`), or a conversation as its chat template renders it.", {"prompt": "Hello, world"}
    ),
    "post /detokenize": Operation("Tokens", "Special tokens are kept.", {"tokens": [28, 30, 31]}),
    "get /v1/models": Operation("Models", "In the format of OpenAI's API, or of Anthropic's if its header is sent."),
    "get /v1/models/{name}": Operation("Models", "404 if it is not served."),
    "get /v1/receipts/{receipt_id}": Operation("Receipts", "`midstream audit` verifies it."),
    "get /v1/receipts/keys": Operation("Receipts", "Those of earlier receipts as well."),
    "get /ledger": Operation("Operations", "One entry for each request, in the order of their ends."),
    "post /pause": Operation("Weights", "Returns when no step runs. New requests wait."),
    "post /resume": Operation("Weights"),
    "get /is_paused": Operation("Weights"),
    "post /abort_requests": Operation("Weights", "", {"request_ids": ["REQUEST_ID"]}),
    "post /reset_prefix_cache": Operation("Weights", "Cached blocks belong to the version that computed them."),
    "get /weight_info": Operation("Weights", "`default` until the weights are changed."),
    "post /sleep": Operation("Weights", "Returns when the workers sleep. Requests wait and continue afterwards."),
    "post /wake_up": Operation("Weights", "Returns when the workers are ready."),
    "get /is_sleeping": Operation("Weights"),
    "post /pause_generation": Operation("Weights", "Returns when no step runs.", {"mode": "retract"}),
    "post /continue_generation": Operation("Weights"),
    "post /update_weights_from_disk": Operation(
        "Weights",
        "All workers load the folder before any of them changes; if the call fails, all keep their weights.",
        {"model_path": "/models/step-100", "weight_version": "step-100"},
    ),
    "post /abort_request": Operation("Weights", "", {"abort_all": True}),
    "get /flush_cache": Operation("Weights"),
    "post /flush_cache": Operation("Weights"),
    "get /get_weight_version": Operation("Weights", "`default` until the weights are changed."),
    "post /get_weight_version": Operation("Weights"),
    **{f"post {path}": Operation("Weights") for path in REFUSED},
    "get /v2": Operation("KServe"),
    "get /v2/health/live": Operation("KServe"),
    "get /v2/health/ready": Operation("KServe"),
    "get /v2/models/{model}": Operation("KServe", "Names, data types and shapes."),
    "get /v2/models/{model}/ready": Operation("KServe"),
    "get /v2/models/{model}/config": Operation("KServe", "What Triton's clients read before they send requests."),
    "post /v2/models/{model}/infer": Operation(
        "KServe",
        "Each row of the tensors is a request. Binary tensors may follow the JSON.",
        {
            "inputs": [
                {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["Once upon a time"]},
                {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [24]},
            ]
        },
    ),
    "post /v2/models/{model}/generate": Operation(
        "KServe", "Fields are tensors of one element.", {"text_input": "Once upon a time", "max_tokens": 24}
    ),
    "post /v2/models/{model}/generate_stream": Operation(
        "KServe", "The same, as events.", {"text_input": "Once upon a time", "max_tokens": 24}
    ),
    "get /health": Operation("Operations", "Needs no API key."),
    "get /live": Operation("Operations", "Needs no API key."),
    "get /metrics": Operation("Operations", "This router's; other processes have their own."),
    "get /openapi.json": Operation("Operations"),
}


# Descriptions of the fields of bodies that have no note in TABLES. Fields of the same name have the same meaning.
_FIELDS = {
    "request_ids": "Ids of the requests.",
    "rid": "Id of the request.",
    "abort_all": "Whether to abort all requests.",
    "mode": "abort; retract: running requests give up their KV blocks; in_place: they keep them.",
    "model_path": "Absolute path of the folder on every worker, below `--update-root`.",
    "weight_version": "Name of the version; by default the root of the weights.",
    "load_format": "The format of the files.",
    "abort_all_requests": "Whether running and waiting requests end; otherwise they continue under the new weights.",
    "flush_cache": "Has no effect: cached blocks belong to a version.",
    "cache_salt": "only requests with the same value share cached blocks",
    "timeout_ms": "milliseconds until the request ends with the reason `deadline`",
    "temperature": "0 takes the likeliest token; higher values choose more evenly",
    "top_p": "keeps the likeliest tokens whose probabilities have this sum",
    "stream": "sends the answer in events, as it is generated",
    "n": "number of answers",
    "seed": "the same seed and request give the same answer",
    "top_k": "keeps this many of the likeliest tokens; 0 and, in OpenAI's APIs, -1 keep all",
    "min_p": "keeps tokens with at least this share of the highest probability",
    "presence_penalty": "subtracted from the logits of tokens that the output contains",
    "frequency_penalty": "subtracted from a token's logit for each time that the output contains it",
    "repetition_penalty": "divides positive logits, and multiplies negative ones, of tokens seen so far",
    "logit_bias": "token id: what is added to its logit",
    "stop": "text that ends the answer; it is not part of it",
    "stop_sequences": "text that ends the answer; it is not part of it",
    "stop_token_ids": "tokens that end the answer",
    "bad_words": "text that the answer does not contain",
    "min_tokens": "number of tokens before which the answer does not end",
    "ignore_eos": "goes on after the model's end of text",
    "include_stop_str_in_output": "keeps the text that ends the answer",
    "skip_special_tokens": "leaves special tokens out of the text; true by default",
    "guided_json": "a JSON schema that the answer matches",
    "guided_regex": "a regular expression that the answer matches",
    "guided_grammar": "a grammar in Lark's or GBNF's form that the answer matches",
    "guided_choice": "texts of which the answer is one",
    "guided_json_object": "the answer is any JSON object",
    "use_beam_search": "searches the likeliest answers, with `best_of` or `n` beams",
    "echo": "the answer begins with the prompt",
    "logprobs": "log probabilities of the tokens",
    "max_tokens": "most tokens of the answer",
    "max_output_tokens": "most tokens of the answer",
    "add_generation_prompt": "ends the prompt with the beginning of an answer; true by default",
    "chat_template_kwargs": "variables of the model's chat template",
    "system": "instructions before the conversation",
    "tool_choice": "whether, and which, tools are called",
    "output_config": "the format or the effort of the answer",
    "metadata": "stored and returned, or ignored if nothing is stored",
    "model": "the served model, or a loaded adapter",
    "messages": "the conversation so far",
    "tools": "functions that the model may call",
    "thinking": "whether the model reasons first",
    "text": "the format of the answer: `format`",
    "reasoning": "how much the model reasons: `effort`",
    "input": "a text, or a list of items",
    "query": "what the documents are compared with",
    "file": "the contents of the file",
    "purpose": "what the file is for",
    "input_file_id": "a file with the purpose `batch`",
    "endpoint": "the path that all its requests have",
    "completion_window": "time until requests that have not run are given up, such as `24h`",
    "output_expires_after": "when the files with results are deleted",
    "prompt": "the text",
    "add_special_tokens": "adds those of the tokenizer, such as one at the beginning",
    "return_token_strs": "adds the text of each token",
    "tokens": "token ids",
    "items": "messages, and other items of responses",
    "inputs": "tensors, each with a name, a data type, a shape and its data",
    "outputs": "the tensors that are wanted",
    "parameters": "settings of the whole request",
    "id": "returned with the answer",
    "text_input": "the prompt",
    "texts": "the documents, as Text Embeddings Inference names them",
    "prompt_cache_options": "has no effect beyond its check",
}


def describe(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation with its group, description and example, and descriptions of its fields. Raises KeyError if
    there is none in OPERATIONS.
    """
    more = OPERATIONS[f"{method} {path}"]
    described = {**operation, "tags": [more.group]} | ({"description": more.description} if more.description else {})
    if more.example is not None:
        body = operation["requestBody"]
        ((kind, media),) = body["content"].items()
        schema, notes = media["schema"], TABLES.get(path, {})
        properties = {
            name: {"description": notes.get(name, ("", ""))[1] or _FIELDS.get(name, "")} | field
            for name, field in schema["properties"].items()
        }
        content = {kind: {"schema": {**schema, "properties": properties}, "example": more.example}}
        described["requestBody"] = {**body, "content": content}
    return described
