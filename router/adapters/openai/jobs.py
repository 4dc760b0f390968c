"""From a body to what is to be run: one native request per prompt, and how the answer looks."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field

from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.adapters.openai.body import Body, token_ids
from router.adapters.openai.parameters import native_request, refuse
from router.adapters.openai.shapes import ChatShape, CompletionShape, Shape, Spell
from router.request_checks import check_name

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 256


@dataclass(slots=True)
class Job:
    """One HTTP request.

    Attributes:
        request_id: Of the whole; with several prompts, the native requests have it with a number.
        requests: One per prompt.
        num_choices: Choices shown per prompt: the best of its sequences.
        includes_usage: The last event of a stream has the usage.
    """

    request_id: str
    requests: list[pb.GenerateRequest]
    shape: Shape
    num_choices: int
    is_stream: bool
    includes_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))


def completion_job(body: Body, spell: Spell) -> Job:
    """/v1/completions.

    Raises:
        MidstreamError: A field is wrong or not supported.
    """
    refuse(body, "suffix", "prompt_embeds")
    request = native_request(body)
    max_tokens = body.integer("max_tokens")
    request.max_tokens = _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    log_probs = body.integer("logprobs")
    if log_probs is not None:
        request.output.log_probs = log_probs
    if body.flag("echo"):
        request.output.exclude_input_from_output = False
        if log_probs is not None:
            request.output.prompt_log_probs = log_probs
    num_choices = _best_of(body, request)
    prompts = _prompts(body)
    requests = []
    for prompt in prompts:
        copy = _copy(request)
        if isinstance(prompt, str):
            copy.prompt = prompt
        else:
            copy.token_ids.values.extend(prompt)
        requests.append(copy)
    return _job(body, requests, CompletionShape(spell), num_choices)


def chat_job(body: Body, spell: Spell) -> Job:
    """/v1/chat/completions.

    Raises:
        MidstreamError: A field is wrong or not supported.
    """
    refuse(body, "functions", "function_call", "audio", "chat_template", "continue_final_message", "documents")
    request = native_request(body)
    max_tokens = body.integer("max_completion_tokens")
    max_tokens = body.integer("max_tokens") if max_tokens is None else max_tokens
    if max_tokens is not None:
        request.max_tokens = max_tokens
    top = body.integer("top_logprobs")
    if body.flag("logprobs"):
        request.output.log_probs = top or 0
    elif top:
        raise InvalidArgumentError("needs logprobs", field="top_logprobs")
    request.chat.messages.extend(_message(message) for message in body.objects("messages"))
    _fill_tools(body, request.chat)
    prompt_follows = body.flag("add_generation_prompt")
    if prompt_follows is not None:
        request.chat.add_generation_prompt = prompt_follows
    if body.child("chat_template_kwargs") is not None:
        request.chat.template_variables_json = json.dumps(body.get("chat_template_kwargs"))
    return _job(body, [request], ChatShape(spell), request.sampling.num_return_sequences or 1)


def _job(body: Body, requests: list[pb.GenerateRequest], shape: Shape, num_choices: int) -> Job:
    options = body.child("stream_options")
    includes_usage = bool(options and options.flag("include_usage"))
    job_id = requests[0].request_id or uuid.uuid4().hex
    check_name(job_id, "request_id")
    for request, name in zip(requests, request_ids(job_id, len(requests)), strict=True):
        request.request_id = name
    return Job(job_id, requests, shape, num_choices, bool(body.flag("stream")), includes_usage)


def request_ids(job_id: str, num_prompts: int) -> list[str]:
    """Ids of a job's native requests."""
    return [job_id] if num_prompts == 1 else [f"{job_id}-{i}" for i in range(num_prompts)]


def _copy(request: pb.GenerateRequest) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    assert isinstance(copy, Message)
    copy.CopyFrom(request)
    return copy


def _best_of(body: Body, request: pb.GenerateRequest) -> int:
    """Choices to show; the request is made to run as many sequences as they are the best of."""
    shown = request.sampling.num_return_sequences or 1
    best_of = body.integer("best_of")
    if best_of is None or best_of == shown:
        return shown
    if best_of < shown:
        raise InvalidArgumentError("must be at least n", field="best_of")
    if body.flag("stream"):
        raise InvalidArgumentError("only the end tells which are best: not with stream", field="best_of")
    request.sampling.num_return_sequences = best_of
    if not request.output.HasField("log_probs"):
        request.output.log_probs = 0
    return shown


def _prompts(body: Body) -> list[str | list[int]]:
    value = body.get("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("must be text, token ids, or an array of either", field="prompt")
    if len(value) > _MAX_PROMPTS and not isinstance(value[0], int):
        raise InvalidArgumentError(f"has {len(value)} prompts; at most {_MAX_PROMPTS}", field="prompt")
    if isinstance(value[0], int):
        return [token_ids(value, "prompt")]
    prompts: list[str | list[int]] = []
    for item in value:
        if not isinstance(item, str | list):
            raise InvalidArgumentError("must be text, token ids, or an array of either", field="prompt")
        prompts.append(item if isinstance(item, str) else token_ids(item, "prompt"))
    return prompts


def _message(message: Body) -> pb.ChatMessage:
    turn = pb.ChatMessage(
        role=message.text("role") or "",
        content=_content(message),
        tool_call_id=message.text("tool_call_id") or "",
        name=message.text("name") or "",
    )
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        turn.tool_calls_json = json.dumps(calls)
    return turn


def _content(message: Body) -> str:
    if not isinstance(message.get("content"), list):
        return message.text("content") or ""
    texts = []
    for part in message.objects("content"):
        if part.text("type") not in ("text", "refusal"):
            raise UnsupportedError("only text is supported", field=part.path("type"))
        texts.append(part.text("text") or part.text("refusal") or "")
    return "\n".join(texts)


def _tool_call(call: Body) -> dict[str, object]:
    """Templates expect the arguments as an object; OpenAI's clients send them as text."""
    function = call.child("function")
    if function is None:
        raise InvalidArgumentError("must be an object", field=call.path("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidArgumentError("is not JSON", field=function.path("arguments")) from None
    function_fields = {"name": function.text("name") or "", "arguments": arguments}
    return {"id": call.text("id") or "", "type": "function", "function": function_fields}


def _fill_tools(body: Body, chat: pb.ChatInput) -> None:
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise UnsupportedError("only none and auto are supported", field="tool_choice")
    tools = body.objects("tools")
    if tools and choice != "none":
        chat.tools_json = json.dumps(body.get("tools"))
