"""Converts a body to a job: one native request per prompt, and the format of the response."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field

from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.pipeline.idempotency import make_repeatable, request_id_of
from router.pipeline.request_checks import check_name
from router.protocols.conversation import ChatModel, Conversation, keep_prefix
from router.protocols.openai.body import Body, token_ids
from router.protocols.openai.messages import chat_messages
from router.protocols.openai.parameters import effort_variables, native_request, read_cache_retention_s, refuse
from router.protocols.openai.shapes import ChatShape, CompletionShape, Shape, Spell
from router.protocols.openai.tools import read_tools

_NOT_IN_CHAT = (
    "audio", "chat_template", "continue_final_message", "documents", "echo", "function_call", "functions",
    "moderation", "store", "web_search_options",
)  # fmt: skip
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's properties that are needed to build a job.

    Attributes:
        spell: Returns the bytes of a token.
        chat: The model's format of calls and reasoning.
    """

    spell: Spell
    chat: ChatModel = field(default_factory=ChatModel)


@dataclass(slots=True)
class Job:
    """One HTTP request.

    Attributes:
        request_id: Id of the job; if there are several prompts, native requests append a number to it.
        requests: One native request per prompt.
        model: The model's name as sent by the client.
        num_choices: Number of choices returned per prompt, which are the best of its sequences.
        includes_usage: Whether the last event of a stream contains the usage.
        ignored: Fields of the body that have no effect.
        conversation: The conversation of a chat; None for completions.
        key: Idempotency key; empty if there is none.
    """

    request_id: str
    model: str
    requests: list[pb.GenerateRequest]
    shape: Shape
    num_choices: int
    is_stream: bool
    includes_usage: bool
    ignored: list[str] = field(default_factory=list)
    conversation: Conversation | None = None
    echoes_log_probs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = ""

    def make_repeatable(self, key: str, call: str) -> None:
        """Derive the request ids from an idempotency key; `call` names the endpoint, so that a key is separate for each
        endpoint.
        """
        self.key, self.request_id = key, request_id_of(key, call)
        for request, name in zip(self.requests, request_ids(self.request_id, len(self.requests)), strict=True):
            request.request_id = ""
            make_repeatable(request, name)

    @property
    def reads_text(self) -> bool:
        """Whether the text is parsed for tool calls or reasoning."""
        return self.conversation is not None and self.conversation.reads_text


def completion_job(body: Body, vocabulary: Vocabulary) -> Job:
    """Return the job for a body of /v1/completions.

    Raises:
        MidstreamError: A field is invalid or not supported.
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
    job = _job(body, requests, shape, num_choices)
    job.echoes_log_probs = request.output.HasField("prompt_log_probs")
    return job


def chat_job(body: Body, vocabulary: Vocabulary) -> Job:
    """Return the job for a body of /v1/chat/completions.

    Raises:
        MidstreamError: A field is invalid or not supported.
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
    tools = read_tools(body)
    if tools.choice != "auto" and request.HasField("guided_decoding"):
        raise InvalidArgumentError("requires a call, which conflicts with response_format", field="tool_choice")
    prompt_follows = body.flag("add_generation_prompt")
    if prompt_follows is not None:
        request.chat.add_generation_prompt = prompt_follows
    variables = effort_variables(body, "reasoning_effort", vocabulary.chat)
    if body.child("chat_template_kwargs") is not None:
        given = body.get("chat_template_kwargs")
        assert isinstance(given, dict)
        variables |= given
    if variables:
        request.chat.template_variables_json = json.dumps(variables)
    retention_s = read_cache_retention_s(body)
    if retention_s:
        keep_prefix(request, None, retention_s)
    body.choice("verbosity", ("medium",))
    if any(kind != "text" for kind in body.texts("modalities")):
        raise UnsupportedError("only text is supported", field="modalities")
    conversation = Conversation(request, tools, vocabulary.chat, _prediction(body))
    shape = ChatShape(
        vocabulary.spell,
        conversation,
        returns_ids=bool(body.flag("return_token_ids")),
        service_tier=body.text("service_tier"),
    )
    job = _job(body, [request], shape, request.sampling.num_return_sequences or 1)
    job.conversation = conversation
    return job


def _prediction(body: Body) -> str:
    prediction = body.child("prediction")
    if prediction is None:
        return ""
    if prediction.text("type") != "content":
        raise InvalidArgumentError("must be content", field="prediction.type")
    if not isinstance(prediction.fields.get("content"), list):
        return prediction.text("content") or ""
    parts = prediction.objects("content")
    for part in parts:
        part.choice("type", ("text",))
    return "".join(part.text("text") or "" for part in parts)


def _job(body: Body, requests: list[pb.GenerateRequest], shape: Shape, num_choices: int) -> Job:
    options = body.child("stream_options")
    includes_usage = bool(options and options.flag("include_usage"))
    job_id = requests[0].request_id or uuid.uuid4().hex
    check_name(job_id, "request_id")
    for request, name in zip(requests, request_ids(job_id, len(requests)), strict=True):
        request.request_id = name
    return Job(job_id, requests[0].model, requests, shape, num_choices, bool(body.flag("stream")), includes_usage)


def request_ids(job_id: str, num_prompts: int) -> list[str]:
    """Return the ids of a job's native requests."""
    return [job_id] if num_prompts == 1 else [f"{job_id}-{i}" for i in range(num_prompts)]


def _copy(request: pb.GenerateRequest) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    assert isinstance(copy, Message)
    copy.CopyFrom(request)
    return copy


def _best_of(body: Body, request: pb.GenerateRequest) -> int:
    """Return the number of choices to return, and make the request run `best_of` sequences."""
    shown = request.sampling.num_return_sequences or 1
    best_of = body.integer("best_of")
    if best_of is None or best_of == shown:
        return shown
    if best_of < shown:
        raise InvalidArgumentError("must be at least n", field="best_of")
    if body.flag("stream"):
        raise InvalidArgumentError(
            "must not be set with stream: the best choices are known only at the end", field="best_of"
        )
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
        raise InvalidArgumentError(f"has {len(value)} prompts; must have at most {_MAX_PROMPTS}", field="prompt")
    if isinstance(value[0], int):
        return [token_ids(value, "prompt")]
    prompts: list[str | list[int]] = []
    for item in value:
        if not isinstance(item, str | list):
            raise InvalidArgumentError("must be text, token ids, or an array of either", field="prompt")
        prompts.append(item if isinstance(item, str) else token_ids(item, "prompt"))
    return prompts
