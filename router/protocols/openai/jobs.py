"""Converts a body to a job: one native request per prompt, and the format of the response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Set
from dataclasses import dataclass, field

from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError
from protos import generation_pb2 as pb
from router.pipeline.idempotency import make_repeatable, request_id_of
from router.pipeline.prompt import PromptOptions
from router.pipeline.request_checks import MAX_LOG_PROBS, check_name
from router.protocols.contents import image_names
from router.protocols.conversation import ChatModel, Conversation, drop_format, keep_prefix
from router.protocols.fields import CHAT, COMPLETIONS, check_supported
from router.protocols.openai.body import Body, token_ids
from router.protocols.openai.messages import chat_messages
from router.protocols.openai.parameters import (
    effort_variables,
    native_request,
    read_cache_retention_s,
    template_variables,
)
from router.protocols.openai.shapes import ChatShape, CompletionShape, Details, Shape, Spell
from router.protocols.openai.tools import read_tools

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's properties that are needed to build a job.

    Attributes:
        spell: Returns the bytes of a token.
        special_ids: Ids of special tokens, which the text omits unless a request asks for them.
    """

    spell: Spell
    chat: ChatModel = field(default_factory=ChatModel)
    special_ids: Set[int] = frozenset()


@dataclass(slots=True)
class Job:
    """One HTTP request.

    Attributes:
        request_id: Id of the job; if there are several prompts, native requests append a number to it.
        requests: One native request per prompt.
        num_choices: Number of choices returned per prompt, which are the best of its sequences.
        includes_usage: Whether the last event of a stream contains the usage.
        ignored: Fields of the body that have no effect.
        conversation: The conversation of a chat; None for completions.
        echoes_prompt: Whether each choice begins with the prompt, and with `echoes_log_probs` also with its log
            probabilities.
        counts_always: Whether every event of a stream contains the usage so far.
        key: Idempotency key; empty if there is none.
        names: The client's names for native fields, for errors.
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
    echoes_prompt: bool = False
    echoes_log_probs: bool = False
    counts_always: bool = False
    options: PromptOptions = field(default_factory=PromptOptions)
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = ""
    names: dict[str, str] = field(default_factory=dict)

    def make_repeatable(self, key: str, call: str) -> None:
        """Derive the request ids from an idempotency key, which is separate for each endpoint (`call`)."""
        self.key, self.request_id = key, request_id_of(key, call)
        for request, name in zip(self.requests, request_ids(self.request_id, len(self.requests)), strict=True):
            request.request_id = ""
            make_repeatable(request, name)

    @property
    def reads_text(self) -> bool:
        """Whether the text is parsed for tool calls or reasoning."""
        return self.conversation is not None and self.conversation.reads_text

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.conversation is not None and self.conversation.model.format.reasons


def completion_job(body: Body, vocabulary: Vocabulary) -> Job:
    """Return the job for a body of /v1/completions. Raises MidstreamError if a field is invalid or not supported."""
    check_supported(body, COMPLETIONS)
    request, names = native_request(body, vocabulary.chat.tokens)
    max_tokens = body.integer("max_tokens")
    request.max_tokens = _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    log_probs = body.integer("logprobs")
    if log_probs is not None:
        request.output.log_probs = log_probs
    details = _details(body, request, log_probs)
    is_echoed = bool(body.flag("echo"))
    if is_echoed:
        request.output.exclude_input_from_output = False
        if log_probs is not None:
            request.output.prompt_log_probs = max(log_probs, request.output.prompt_log_probs)
    if body.has("prompt_logprobs"):
        names["output.prompt_log_probs"] = "prompt_logprobs"
    num_choices = _best_of(body, request)
    if num_choices != (request.sampling.num_return_sequences or 1):
        names["sampling.num_return_sequences"] = "best_of"
        if log_probs is None:
            names["output.log_probs"] = "best_of"
    prompts = _prompts(body)
    requests = []
    for prompt in prompts:
        copy = _copy(request)
        if isinstance(prompt, str):
            copy.prompt = prompt
        else:
            copy.token_ids.values.extend(prompt)
        requests.append(copy)
    skipped = frozenset[int]() if body.flag("skip_special_tokens") is False else vocabulary.special_ids
    job = _job(body, requests, CompletionShape(vocabulary.spell, details, skipped), num_choices)
    job.echoes_prompt, job.echoes_log_probs = is_echoed, is_echoed and log_probs is not None
    job.options, job.names = _options(body), names
    return job


def chat_job(body: Body, vocabulary: Vocabulary) -> Job:
    """Return the job for a body of /v1/chat/completions. Raises MidstreamError if a field is not valid or supported."""
    check_supported(body, CHAT)
    request, names = native_request(body, vocabulary.chat.tokens)
    max_tokens = body.integer("max_completion_tokens")
    if max_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    max_tokens = body.integer("max_tokens") if max_tokens is None else max_tokens
    if max_tokens is not None:
        request.max_tokens = max_tokens
    details = _chat_details(body, request)
    if body.has("prompt_logprobs"):
        names["output.prompt_log_probs"] = "prompt_logprobs"
    image_fields = _fill_chat(body, request.chat, vocabulary.chat)
    names |= image_names(request, image_fields) | {"token_ids": "messages"}
    tools, schema_names = read_tools(body)
    dropped = drop_format(request, tools, names.get("guided_decoding", ""))
    if dropped:
        del names["guided_decoding"]
    names = schema_names | names
    retention_s = read_cache_retention_s(body)
    if retention_s:
        keep_prefix(request, None, retention_s)
    options = _options(body)
    conversation = Conversation(request, tools, vocabulary.chat, _prediction(body), options=options)
    shape = ChatShape(vocabulary.spell, conversation, details, service_tier=body.text("service_tier"))
    job = _job(body, [request], shape, request.sampling.num_return_sequences or 1)
    job.conversation, job.options, job.names = conversation, options, names
    job.ignored += dropped
    if vocabulary.chat.hides(tools):
        job.ignored.append("tools")
    if vocabulary.chat.ignores_strict(tools):
        job.ignored.append("tools.function.strict")
    return job


def _fill_chat(body: Body, chat: pb.ChatInput, model: ChatModel) -> list[str]:
    """Fill in the messages and the other inputs of the template; return the field of each image."""
    messages, image_fields = chat_messages(body, model.template)
    chat.messages.extend(messages)
    for message in chat.messages:
        if message.role == "developer" and not model.has_developer:
            message.role = "system"  # templates may drop messages with other roles
    prompt_follows = body.flag("add_generation_prompt")
    if prompt_follows is not None:
        chat.add_generation_prompt = prompt_follows
    variables = effort_variables(body, "reasoning_effort", model)
    variables |= template_variables(body, chat)
    if variables:
        chat.template_variables_json = json.dumps(variables)
    return image_fields


def _options(body: Body) -> PromptOptions:
    """Return how the prompt is converted to tokens."""
    limit = body.integer("truncate_prompt_tokens", -1)
    if limit == 0:
        raise InvalidArgumentError(
            "must be at least 1, or -1 for the remaining length of the context", field="truncate_prompt_tokens"
        )
    continues_last = bool(body.flag("continue_final_message"))
    if continues_last and body.flag("add_generation_prompt"):
        raise InvalidArgumentError("conflicts with add_generation_prompt", field="continue_final_message")
    return PromptOptions(body.flag("add_special_tokens"), limit, continues_last)


def _chat_details(body: Body, request: pb.GenerateRequest) -> Details:
    top, has_log_probs = body.integer("top_logprobs", 0, MAX_LOG_PROBS), body.flag("logprobs")
    if top and not has_log_probs:
        raise InvalidArgumentError("needs logprobs", field="top_logprobs")
    if has_log_probs:
        request.output.log_probs = top or 0
    return _details(body, request, (top or 0) if has_log_probs else None)


def _details(body: Body, request: pb.GenerateRequest, num_top: int | None) -> Details:
    """Return which details of tokens the client wants; `num_top` is None without log probabilities."""
    num_prompt_top = body.integer("prompt_logprobs", 0, MAX_LOG_PROBS)
    if num_prompt_top is not None:
        if request.streaming:
            raise InvalidArgumentError("must not be set with stream", field="prompt_logprobs")
        request.output.prompt_log_probs = num_prompt_top
    return Details(
        num_top,
        num_prompt_top,
        bool(body.flag("return_token_ids")),
        bool(body.flag("return_tokens_as_token_ids")),
        frozenset(request.stopping.stop_token_ids),
    )


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
    is_stream = bool(body.flag("stream"))
    options = body.child("stream_options")
    if options is not None and not is_stream:
        raise InvalidArgumentError("needs stream", field="stream_options")
    includes_usage = bool(options and options.flag("include_usage"))
    counts_always = bool(options and options.flag("continuous_usage_stats"))
    job_id = requests[0].request_id or uuid.uuid4().hex
    check_name(job_id, "request_id")
    for request, name in zip(requests, request_ids(job_id, len(requests)), strict=True):
        request.request_id = name
    job = Job(job_id, requests[0].model, requests, shape, num_choices, is_stream, includes_usage)
    job.counts_always = includes_usage and counts_always
    return job


def request_ids(job_id: str, num_prompts: int) -> list[str]:
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
