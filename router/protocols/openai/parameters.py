"""Parameters that completions and chat completions share, including vLLM's extensions, converted to native fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from midstream.errors import InvalidArgumentError, UnsupportedError
from protos import generation_pb2 as pb
from router.parsers.guides import lenient
from router.parsers.machine import Schema, parse_json
from router.protocols.conversation import EFFORTS, ChatModel
from router.protocols.openai.body import Body
from router.protocols.openai.structural_tags import structural_body, structural_grammar
from router.protocols.receipts import wants_receipt

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# Number of seconds for which to retain a prompt's KV cache.
_CACHE_RETENTION_S = {"in_memory": 0, "24h": 24 * 3600}
_CACHE_TTLS_S = {"30m": 30 * 60, "12h": 12 * 3600}
# Priorities of service tiers.
TIERS = {"auto": 0, "default": 0, "flex": -50, "scale": 0, "priority": 50, "fast": 50}
_SEED_RANGE = 1 << 64
_GUIDES = {"json": pb.GUIDE_TYPE_JSON_SCHEMA, "regex": pb.GUIDE_TYPE_REGEX, "grammar": pb.GUIDE_TYPE_EBNF_GRAMMAR}
# The fields of llama.cpp (`grammar`, `json_schema`) and SGLang (`ebnf`, `regex`, `json_schema`).
_OTHER_GUIDES = {
    "grammar": pb.GUIDE_TYPE_EBNF_GRAMMAR,
    "ebnf": pb.GUIDE_TYPE_EBNF_GRAMMAR,
    "regex": pb.GUIDE_TYPE_REGEX,
    "json_schema": pb.GUIDE_TYPE_JSON_SCHEMA,
}
_REGEX_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}]")
# The client's field, and the guide that it sets.
_Guide = tuple[str, pb.GuidedDecodingConfig]


def native_request(body: Body, tokens: Mapping[str, int]) -> tuple[pb.GenerateRequest, dict[str, str]]:
    """Return the request without its input, and the client's names for its fields (`errors.Names`). Raises
    MidstreamError if a field is not valid or supported.
    """
    client_id, names = read_client_id(body)
    request = pb.GenerateRequest(
        request_id=body.text("request_id") or "",
        model=body.text("model") or "",
        streaming=bool(body.flag("stream")),
        client_id=client_id,
        priority=read_priority(body),
        cache_salt=body.text("cache_salt") or "",
        detached=bool(body.flag("detached")),
        timeout_ms=body.integer("timeout_ms", 1, (1 << 53)),
    )
    if wants_receipt(body):
        request.output.return_receipt = True
    fill_sampling(body, request.sampling)
    fill_stopping(body, request.stopping)
    skip = body.flag("skip_special_tokens")
    if skip is not None:
        request.output.skip_special_tokens = skip
    guide = _guide(body, tokens)
    if guide is not None:
        names["guided_decoding"] = guide[0]
        request.guided_decoding.CopyFrom(guide[1])
    return request, names


def read_client_id(body: Body) -> tuple[str, dict[str, str]]:
    """Return the id of the client's user, and the client's name for it."""
    user, safety_identifier = body.text("user"), body.text("safety_identifier")
    return user or safety_identifier or "", {"client_id": "user" if user else "safety_identifier"}


def read_priority(body: Body) -> int:
    """Return the priority given by vLLM's `priority`, where lower values run first, or by OpenAI's service tier."""
    tier = TIERS[body.choice("service_tier", tuple(TIERS)) or "auto"]
    priority = body.integer("priority", -100, 100)
    return tier if priority is None else -priority


def effort_variables(fields: Body, name: str, model: ChatModel) -> dict[str, object]:
    """Return the template variables for the reasoning effort in a field; empty if it is unset. Raises UnsupportedError
    if the model's template has no setting for reasoning, unless the effort is `none` and the model does not reason.
    """
    effort = fields.choice(name, EFFORTS)
    if effort is None:
        return {}
    variables = model.thinking_variables(effort)
    if not variables and (effort != "none" or model.format.reasoning is not None):
        raise UnsupportedError("cannot be set for this model", field=fields.path(name))
    return variables


def template_variables(body: Body, chat: pb.ChatInput) -> dict[str, object]:
    """Return `chat_template_kwargs` without `add_generation_prompt`, which is set in `chat`."""
    field = "chat_template_kwargs"
    if body.child(field) is None:
        return {}
    given = body.get(field)
    assert isinstance(given, dict)
    for name in ("messages", "tools"):
        if name in given:
            raise InvalidArgumentError("is a field of the request itself", field=f"{field}.{name}")
    prompt_follows = given.get("add_generation_prompt")
    if prompt_follows is not None:
        path = f"{field}.add_generation_prompt"
        if not isinstance(prompt_follows, bool):
            raise InvalidArgumentError("must be true or false", field=path)
        if chat.HasField("add_generation_prompt") and chat.add_generation_prompt != prompt_follows:
            raise InvalidArgumentError("conflicts with add_generation_prompt", field=path)
        chat.add_generation_prompt = prompt_follows
    return {name: value for name, value in given.items() if name != "add_generation_prompt"}


def read_cache_retention_s(body: Body) -> int:
    """Return how long to keep the KV blocks of the prompt, in seconds; 0 for the default."""
    options = body.child("prompt_cache_options")
    ttl = options.choice("ttl", tuple(_CACHE_TTLS_S)) if options is not None else None
    retention = body.choice("prompt_cache_retention", tuple(_CACHE_RETENTION_S))
    return max(_CACHE_TTLS_S[ttl] if ttl else 0, _CACHE_RETENTION_S[retention] if retention else 0)


def fill_sampling(body: Body, sampling: pb.SamplingConfig) -> None:
    """Set the fields that choose tokens. Raises InvalidArgumentError if one has another type."""
    for name in _NUMBERS:
        value = body.number(name)
        if value is not None:
            setattr(sampling, name, value)
    top_k = body.integer("top_k", -1)
    if top_k is not None:
        sampling.top_k = max(top_k, 0)
    seed = body.integer("seed", -_SEED_RANGE // 2, _SEED_RANGE - 1)
    if seed is not None:
        sampling.seed = seed % _SEED_RANGE
    min_tokens = body.integer("min_tokens")
    if min_tokens is not None:
        sampling.min_tokens = min_tokens
    num_sequences = body.integer("n", 1)
    if num_sequences is not None:
        sampling.num_return_sequences = num_sequences
    if body.flag("use_beam_search"):
        sampling.beam_width = num_sequences or 1
        penalty = body.number("length_penalty")
        sampling.length_penalty = 1.0 if penalty is None else penalty
    allowed = body.token_ids("allowed_token_ids")
    if body.has("allowed_token_ids") and not allowed:
        raise InvalidArgumentError("must not be empty", field="allowed_token_ids")
    sampling.allowed_token_ids.extend(allowed)
    bias = body.get("logit_bias")
    if bias is not None:
        _fill_bias(bias, sampling)


def _fill_bias(bias: object, sampling: pb.SamplingConfig) -> None:
    if not isinstance(bias, dict):
        raise InvalidArgumentError("must be an object", field="logit_bias")
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 1 << 32):
            raise InvalidArgumentError(f"{key[:32]!r} is not a token id", field="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidArgumentError("must be in -100..100", field=f"logit_bias.{key}")
        sampling.embedding_bias[int(key)] = value


def fill_stopping(body: Body, stopping: pb.StoppingConfig) -> None:
    """Set the fields that end a text or forbid a part of it. Raises InvalidArgumentError if one has another type."""
    stopping.stop_words.extend(body.texts("stop"))
    stopping.stop_token_ids.extend(body.token_ids("stop_token_ids"))
    stopping.bad_words.extend(body.texts("bad_words"))
    stopping.ignore_eos = bool(body.flag("ignore_eos"))
    stopping.include_stop_in_output = bool(body.flag("include_stop_str_in_output"))


def _guide(body: Body, tokens: Mapping[str, int]) -> _Guide | None:
    """Return the guide from response_format or the fields of vLLM, llama.cpp and SGLang; None if unset."""
    form = _response_format(body, tokens)
    found: list[_Guide] = [] if form is None else [("response_format", form)]
    found += _named_guides(body, "guided_")
    found += [guide for name, kind in _OTHER_GUIDES.items() for guide in _text_guide(body, name, kind)]
    structured = body.child("structured_outputs")
    if structured is not None:
        tag = structured.get("structural_tag")
        if tag is not None:
            path = structured.path("structural_tag")
            found.append((path, _structural_guide(structural_body(tag, path), tokens)))
        found += _named_guides(structured, "")
        _set_space(structured, "whitespace_pattern", found)
    _set_space(body, "guided_whitespace_pattern", found)
    if len(found) > 1:
        raise InvalidArgumentError(f"must not be combined with {found[0][0]}", field=found[1][0])
    return found[0] if found else None


def _set_space(body: Body, name: str, guides: list[_Guide]) -> None:
    """Set the white space within JSON, for which a field has an expression, in the only guide."""
    pattern = body.text(name)
    if pattern is None:
        return
    try:
        schema = parse_json(guides[0][1].guide) if len(guides) == 1 else None
    except ValueError:
        schema = None
    if not isinstance(schema, dict) or guides[0][1].guide_type != pb.GUIDE_TYPE_JSON_SCHEMA:
        raise InvalidArgumentError("needs a JSON schema as the guide", field=body.path(name))
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        schema["x-guidance"] = {"whitespace_pattern": pattern, **own}
    guides[0][1].guide = json.dumps(schema)


def _response_format(body: Body, tokens: Mapping[str, int]) -> pb.GuidedDecodingConfig | None:
    response_format = body.child("response_format")
    if response_format is None:
        return None
    kind = response_format.text("type")
    if kind == "text":
        return None
    if kind == "json_object" and response_format.fields.get("schema") is None:
        return json_object_guide()
    if kind == "json_object":  # with a schema, as in llama.cpp
        schema = response_format.get("schema")
        if not isinstance(schema, dict):
            raise InvalidArgumentError("must be an object", field="response_format.schema")
        return schema_guide(schema, None)
    if kind == "json_schema":
        given = response_format.child("json_schema")
        schema = given.get("schema") if given is not None else None
        if given is None or not isinstance(schema, dict):
            raise InvalidArgumentError("must be an object", field="response_format.json_schema.schema")
        return schema_guide(schema, given.flag("strict"))
    if kind == "structural_tag":
        return _structural_guide(response_format, tokens)
    raise InvalidArgumentError("must be text, json_object, json_schema or structural_tag", field="response_format.type")


def _structural_guide(body: Body, tokens: Mapping[str, int]) -> pb.GuidedDecodingConfig:
    guide = structural_grammar(body, tokens)
    return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_EBNF_GRAMMAR, guide=guide)


def _named_guides(body: Body, prefix: str) -> list[_Guide]:
    guides = [guide for name, kind in _GUIDES.items() for guide in _text_guide(body, prefix + name, kind)]
    choices = body.texts(prefix + "choice")
    if body.get(prefix + "choice") is not None:
        if not choices:
            raise InvalidArgumentError("must not be empty", field=body.path(prefix + "choice"))
        guides.append((body.path(prefix + "choice"), choice_guide(choices)))
    if body.flag(prefix + "json_object"):
        guides.append((body.path(prefix + "json_object"), json_object_guide()))
    return guides


def _text_guide(body: Body, name: str, kind: pb.GuideType.ValueType) -> list[_Guide]:
    """Return the guide in a field; empty if it is unset. A schema may be an object or its JSON text."""
    value = body.get(name)
    if kind == pb.GUIDE_TYPE_JSON_SCHEMA and isinstance(value, dict):
        value = json.dumps(value)
    if value is None:
        return []
    if not isinstance(value, str):
        raise InvalidArgumentError("must be a string", field=body.path(name))
    return [(body.path(name), pb.GuidedDecodingConfig(guide_type=kind, guide=value))]


def json_object_guide() -> pb.GuidedDecodingConfig:
    """Return the guide for any JSON object; GUIDE_TYPE_JSON would also allow arrays."""
    return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide='{"type": "object"}')


def schema_guide(schema: Schema, strict: bool | None) -> pb.GuidedDecodingConfig:
    """Return the guide for JSON that matches a schema, as far as it can be enforced if `strict` is False."""
    guide = json.dumps(lenient(schema) if strict is False else schema)
    return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_JSON_SCHEMA, guide=guide)


def choice_guide(choices: Iterable[str]) -> pb.GuidedDecodingConfig:
    """Return a guide that matches any of these texts."""
    expression = "|".join(_REGEX_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices)
    return pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_REGEX, guide=f"({expression})")
