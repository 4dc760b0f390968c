"""Converts openengine requests to native ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from protos import openengine_pb2 as oe
from router.protocols.openai.parameters import choice_guide, json_object_guide
from router.protocols.openai.structural_tags import structural_body, structural_grammar

_PRIORITY_KEY = "openengine-priority"
_COPIED = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def native_request(
    request: oe.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]], tokens: Mapping[str, int]
) -> pb.GenerateRequest:
    """Return the native request; `tokens` are the markers of the model's format that are a single token.

    Raises:
        InvalidArgumentError: A value does not fit its field; the native checks validate ranges.
        UnsupportedError: The request has media, KV caches of other engines, or an unsupported kind of candidates or of
            structural tag.
    """
    if request.media:
        raise UnsupportedError("only text and tokens are supported", field="media")
    if request.HasField("kv") and request.kv.HasField("session"):
        raise UnsupportedError("KV caches of other engines are not supported", field="kv.session")
    if request.kv.bypass_prefix_cache:
        raise UnsupportedError(
            "the prefix cache is enabled or disabled for the whole service", field="kv.bypass_prefix_cache"
        )
    native = pb.GenerateRequest(
        request_id=request.request_id, model=request.model, streaming=True, cache_salt=request.kv.cache_salt
    )
    if request.WhichOneof("input") == "token_ids":
        native.token_ids.values.extend(request.token_ids.ids)
    elif request.WhichOneof("input") == "prompt":
        native.prompt = request.prompt
    if request.lora_name:
        native.lora.name = request.lora_name
    native.priority = _priority(metadata)
    _fill_sampling(request, native)
    _fill_stopping(request.stopping, native)
    _fill_output(request.response, native)
    if request.HasField("guided"):
        native.guided_decoding.CopyFrom(_guide(request.guided, tokens))
    return native


def _fill_sampling(request: oe.GenerateRequest, native: pb.GenerateRequest) -> None:
    sampling = request.sampling
    for name in _COPIED:
        if sampling.HasField(name):  # type: ignore[arg-type]
            try:
                setattr(native.sampling, name, getattr(sampling, name))
            except (ValueError, OverflowError) as error:
                raise InvalidArgumentError(str(error), field=f"sampling.{name}") from None
    if sampling.HasField("seed"):
        native.sampling.seed = sampling.seed
    if sampling.HasField("num_sequences"):
        native.sampling.num_return_sequences = sampling.num_sequences
    if request.stopping.HasField("min_tokens"):
        native.sampling.min_tokens = request.stopping.min_tokens


def _fill_stopping(stopping: oe.StoppingOptions, native: pb.GenerateRequest) -> None:
    if stopping.HasField("max_tokens"):
        native.max_tokens = stopping.max_tokens
    native.stopping.ignore_eos = stopping.ignore_eos
    native.stopping.include_stop_in_output = stopping.include_stop_in_output
    for number, condition in enumerate(stopping.conditions):
        kind = condition.WhichOneof("condition")
        if kind is None:
            raise InvalidArgumentError("must be set", field=f"stopping.conditions[{number}]")
        if kind == "stop_text":
            native.stopping.stop_words.append(condition.stop_text)
        else:
            native.stopping.stop_token_ids.append(condition.stop_token_id)


def _fill_output(response: oe.ResponseOptions, native: pb.GenerateRequest) -> None:
    if response.return_output_logprobs or response.HasField("output_candidates"):
        native.output.log_probs = _num_candidates(response.output_candidates, "response.output_candidates")
    if response.return_prompt_logprobs or response.HasField("prompt_candidates"):
        native.output.prompt_log_probs = _num_candidates(response.prompt_candidates, "response.prompt_candidates")


def _num_candidates(selection: oe.CandidateTokenSelection, field: str) -> int:
    if selection.WhichOneof("selection") in ("token_ids", "all"):
        raise UnsupportedError("only the most likely candidates are supported (top_n)", field=field)
    return selection.top_n


def _guide(guided: oe.GuidedDecoding, tokens: Mapping[str, int]) -> pb.GuidedDecodingConfig:
    kind = guided.WhichOneof("guide")
    if kind == "json_schema":
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=guided.json_schema)
    if kind == "regex":
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide=guided.regex)
    if kind == "ebnf_grammar":
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=guided.ebnf_grammar)
    if kind == "structural_tag":
        body = structural_body(guided.structural_tag, "guided.structural_tag")
        guide = structural_grammar(body, tokens)
        return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=guide)
    if kind == "json_object":
        return json_object_guide()
    if kind == "choice":
        if not guided.choice.choices:
            raise InvalidArgumentError("must not be empty", field="guided.choice.choices")
        return choice_guide(guided.choice.choices)
    raise InvalidArgumentError("must be set", field="guided.guide")


def _priority(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    for key, value in metadata:
        if key == _PRIORITY_KEY:
            try:
                return int(value)
            except ValueError:
                raise InvalidArgumentError("must be a decimal number", field=_PRIORITY_KEY) from None
    return 0
