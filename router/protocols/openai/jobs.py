"""From a body to what is to be run: one native request per prompt, and how the answer looks."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field

from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from router.pipeline.request_checks import check_name
from router.protocols.openai.body import Body, token_ids
from router.protocols.openai.messages import chat_messages
from router.protocols.openai.parameters import native_request, refuse
from router.protocols.openai.shapes import ChatShape, CompletionShape, Shape, Spell
from router.protocols.openai.tool_calls import MakeReader
from router.protocols.openai.tools import read_tools

_NOT_IN_CHAT = (
    "audio", "chat_template", "continue_final_message", "documents", "echo", "function_call", "functions", "prediction",
    "web_search_options",
)  # fmt: skip
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a job must know of the model.

    Attributes:
        spell: The text of one token.
        make_reader: Reads tool calls as the model writes them; None where that is not known.
    """

    spell: Spell
    make_reader: MakeReader | None = None


@dataclass(slots=True)
class Job:
    """One HTTP request.

    Attributes:
        request_id: Of the whole; with several prompts, the native requests have it with a number.
        requests: One per prompt.
        model: As the client calls it.
        num_choices: Choices shown per prompt: the best of its sequences.
        includes_usage: The last event of a stream has the usage.
        reads_calls: Text is read for tool calls, from its beginning on.
        ignored: Fields of the body that have no effect.
    """

    request_id: str
    model: str
    requests: list[pb.GenerateRequest]
    shape: Shape
    num_choices: int
    is_stream: bool
    includes_usage: bool
    reads_calls: bool = False
    ignored: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))


def completion_job(body: Body, vocabulary: Vocabulary) -> Job:
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
    shape = CompletionShape(
        vocabulary.spell, with_log_probs=log_probs is not None, returns_ids=bool(body.flag("return_token_ids"))
    )
    return _job(body, requests, shape, num_choices)


def chat_job(body: Body, vocabulary: Vocabulary) -> Job:
    """/v1/chat/completions.

    Raises:
        MidstreamError: A field is wrong or not supported.
    """
    refuse(body, *_NOT_IN_CHAT)
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
    request.chat.messages.extend(chat_messages(body))
    tools = read_tools(body, vocabulary.make_reader)
    request.chat.tools_json = tools.tools_json
    if tools.guide is not None:
        if request.HasField("guided_decoding"):
            raise InvalidArgumentError("demands a call, which response_format contradicts", field="tool_choice")
        request.guided_decoding.CopyFrom(tools.guide)
    prompt_follows = body.flag("add_generation_prompt")
    if prompt_follows is not None:
        request.chat.add_generation_prompt = prompt_follows
    if body.child("chat_template_kwargs") is not None:
        request.chat.template_variables_json = json.dumps(body.get("chat_template_kwargs"))
    shape = ChatShape(vocabulary.spell, tools, returns_ids=bool(body.flag("return_token_ids")))
    job = _job(body, [request], shape, request.sampling.num_return_sequences or 1)
    job.reads_calls = tools.reader is not None
    return job


def _job(body: Body, requests: list[pb.GenerateRequest], shape: Shape, num_choices: int) -> Job:
    options = body.child("stream_options")
    includes_usage = bool(options and options.flag("include_usage"))
    job_id = requests[0].request_id or uuid.uuid4().hex
    check_name(job_id, "request_id")
    for request, name in zip(requests, request_ids(job_id, len(requests)), strict=True):
        request.request_id = name
    return Job(job_id, requests[0].model, requests, shape, num_choices, bool(body.flag("stream")), includes_usage)


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
