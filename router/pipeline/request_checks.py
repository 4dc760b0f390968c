"""Checks every field of a request against the ranges in protos/generation.proto, before any work is scheduled."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from midstream.errors import ContextLengthError, InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from midstream.extras import tensor_bytes
from midstream.model.folder import ModelFolder
from midstream.model.sentence_transformers import CLASS_SCORES
from protos import generation_pb2 as pb
from router.authentication import current_caller
from router.permissions import Role
from router.pipeline.images import check_images, images_of
from router.pipeline.virtual_tokens import check_virtual_tokens, num_token_ids

MAX_NAME = 128
MAX_STOP_WORDS = 64
MAX_STOP_WORD_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 256
MAX_GUIDE_CHARACTERS = 1 << 20
MAX_LOG_PROBS = 20
MAX_SEQUENCES = 128
MAX_TOKEN_RANGES = 64
MAX_DEFAULT_TOKENS = 16_384

MAX_TOPK_LOGITS = 1024
MAX_NGRAM_SIZE = 64
MAX_KEEP_S = 366 * 24 * 3600
MAX_DURATION_MS = 1 << 40  # 34 years; as nanoseconds added to the current time, it fits into 64 bits

_ADDITIONAL_OUTPUT = re.compile(
    r"hidden_states\.(0|[1-9]\d{0,3})|topk_logits\.[1-9]\d{0,3}|token_logits(\.(0|[1-9]\d{0,8})){1,16}"
    r"|sampling\.(0|[1-9]\d{0,3})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of numbers: low <= value <= high, or low < value if low is excluded. NaN is never in range."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, value: float, field: str) -> None:
        if (self.low < value if self.excludes_low else self.low <= value) and value <= self.high:
            return
        open_end = "]" if math.isfinite(self.high) else ")"
        bounds = f"{'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}{open_end}"
        raise InvalidArgumentError(f"is {value:g}; must be in {bounds}", field=field)


_Check = Callable[[Any, ModelFolder], None]
MAX_FLOAT = 3.4028234663852886e38
_FINITE = _Range(-MAX_FLOAT, MAX_FLOAT)
_POSITIVE = _Range(0, MAX_FLOAT, excludes_low=True)
_SAMPLING: dict[str, _Range] = {
    "top_p": _Range(0, 1, excludes_low=True),
    "top_p_decay": _Range(0, 1, excludes_low=True),
    "top_p_min": _Range(0, 1, excludes_low=True),
    "min_p": _Range(0, 1),
    "temperature": _Range(0, 100),
    "beam_search_diversity_rate": _Range(0, MAX_FLOAT),
    "repetition_penalty": _POSITIVE,
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "length_penalty": _FINITE,
    "num_return_sequences": _Range(1, MAX_SEQUENCES),
}
_PENALTIES = ("presence_penalty", "frequency_penalty")
# Name of each feature -> whether a request uses it. Workers report the features that they have.
FEATURES: dict[str, Callable[[pb.GenerateRequest], bool]] = {
    "beam_search": lambda request: request.sampling.beam_width > 1,
    "guided_decoding": lambda request: request.HasField("guided_decoding"),
    "lora": lambda request: request.HasField("lora"),
    "prompt_tuning": lambda request: request.HasField("prompt_tuning"),
    "speculative": lambda request: request.HasField("speculative"),
    "draft_model": lambda request: request.speculative.method == pb.SpeculativeConfig.METHOD_DRAFT_MODEL,
    "logits_post_processor": lambda request: bool(request.logits_post_processor_name),
    "log_probs": lambda request: request.output.HasField("log_probs"),
    "prompt_log_probs": lambda request: request.output.HasField("prompt_log_probs"),
    "context_logits": lambda request: request.output.return_context_logits,
    "generation_logits": lambda request: request.output.return_generation_logits,
    "additional_outputs": lambda request: bool(request.output.additional_outputs),
    "token_logits": lambda request: any(
        item.name.startswith("token_logits.") for item in request.output.additional_outputs
    ),
    "sampling_outputs": lambda request: any(
        item.name.startswith("sampling.") for item in request.output.additional_outputs
    ),
    "continuation": lambda request: request.HasField("continuation"),
    "bad_words": lambda request: bool(request.stopping.bad_words or request.stopping.bad_word_token_ids),
    "embedding_bias": lambda request: bool(request.sampling.embedding_bias),
    "allowed_tokens": lambda request: bool(request.sampling.allowed_token_ids),
    "no_repeat_ngram": lambda request: request.sampling.no_repeat_ngram_size > 0,
    "top_p_decay": lambda request: request.sampling.HasField("top_p_decay"),
    "penalties": lambda request: any(
        request.sampling.HasField(name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ),
    "min_tokens": lambda request: request.sampling.min_tokens > 0,
}
_FEATURE_FIELDS = {
    "beam_search": "sampling.beam_width",
    "draft_model": "speculative.method",
    "logits_post_processor": "logits_post_processor_name",
    "log_probs": "output.log_probs",
    "prompt_log_probs": "output.prompt_log_probs",
    "context_logits": "output.return_context_logits",
    "generation_logits": "output.return_generation_logits",
    "additional_outputs": "output.additional_outputs",
    "token_logits": "output.additional_outputs",
    "sampling_outputs": "output.additional_outputs",
    "bad_words": "stopping.bad_words",
    "embedding_bias": "sampling.embedding_bias",
    "allowed_tokens": "sampling.allowed_token_ids",
    "no_repeat_ngram": "sampling.no_repeat_ngram_size",
    "top_p_decay": "sampling.top_p_decay",
    "penalties": "sampling",
    "min_tokens": "sampling.min_tokens",
}


def check_request(
    request: pb.GenerateRequest,
    model: ModelFolder,
    max_beam_width: int = 16,
) -> None:
    """Check all fields, except the input's length and the required features of the workers (`check_supported`).

    Args:
        request: The request as received.
        model: The served model.
        max_beam_width: Maximum beam width.

    Raises:
        InvalidArgumentError: A field is invalid; the error names it.
        NotFoundError: The named model is not the served one.
    """
    for field, value in request.ListFields():  # fields that are not set have valid defaults
        check = _CHECKS.get(field.name)
        if check is not None:
            check(value, model)
    if request.HasField("max_tokens") and not (request.max_tokens or _reports_prompt(request)):
        raise InvalidArgumentError(
            "must be at least 1, unless the request asks for an output for the prompt", field="max_tokens"
        )
    generates = request.output.detokenize or not request.output.HasField("detokenize")
    if generates and model.num_labels is not None:
        uses = "classify, scores, reranking or embeddings"
        reason = f"{model.name!r} has a classification head and generates no text; use {uses}"
        raise UnsupportedError(reason, field="model")
    if not model.has_head and (generates or _needs_head(request)):
        reason = f"{model.name!r} {'is an encoder' if model.is_encoder else 'has no head'} and generates no text"
        raise UnsupportedError(f"{reason}; use embeddings", field="model")
    if model.is_encoder:
        _check_encoded(request)
    images = images_of(request)
    check_images(request, images, model)
    check_virtual_tokens(request, model, has_images=bool(images))
    fit_to_context(len(request.token_ids.values), None, model, "token_ids")  # before the ids are checked
    check_token_ids(request.token_ids.values, num_token_ids(request, model), "token_ids")
    if request.HasField("continuation"):
        _check_continuation(request, model)
    if request.sampling.beam_width > 1 and FEATURES["sampling_outputs"](request):
        raise UnsupportedError("sampling.K is not reported by a beam search", field="output.additional_outputs.name")
    if request.sampling.HasField("beam_width"):
        _Range(1, max_beam_width).check(request.sampling.beam_width, "sampling.beam_width")


def _needs_head(request: pb.GenerateRequest) -> bool:
    """Return whether the request's output depends on more than hidden states."""
    output = request.output
    of_logits = ("log_probs", "prompt_log_probs", "context_logits", "generation_logits")
    if any(FEATURES[name](request) for name in of_logits):
        return True
    names = [item.name for item in output.additional_outputs]
    return not names or not all(name.startswith(("hidden_states.", "pooled_states.", CLASS_SCORES)) for name in names)


def _check_encoded(request: pb.GenerateRequest) -> None:
    """Check what is different for encoders, which give one output for the whole prompt."""
    if request.max_tokens > 1:
        raise InvalidArgumentError("must be 1: an encoder generates no text", field="max_tokens")
    if request.sampling.num_return_sequences > 1:
        raise InvalidArgumentError("must be 1: an encoder generates no text", field="sampling.num_return_sequences")
    if request.WhichOneof("input") == "prompt_embeddings":
        raise UnsupportedError("are not supported for encoders", field="prompt_embeddings")
    for item in request.output.additional_outputs:
        if item.gather_context and not item.name.startswith("hidden_states."):
            raise UnsupportedError("encoders report this only for the whole prompt", field="output.additional_outputs")


def check_model(name: str, model: ModelFolder) -> None:
    """Raise NotFoundError unless `name` is empty or one of the served model's names."""
    if name and name not in model.names:
        raise NotFoundError(f"the model {name[:MAX_NAME]!r} is not served here; this is {model.name!r}", field="model")


def check_name(value: str, field: str) -> None:
    """Raise InvalidArgumentError if a name is too long."""
    if len(value) > MAX_NAME:
        raise InvalidArgumentError(f"has {len(value)} characters; must have at most {MAX_NAME}", field=field)


def check_adapter_path(path: str, root: str, field: str) -> None:
    """Raise an error if the caller may not load an adapter from `path`; it does not reveal whether the path exists.

    Raises:
        PermissionDeniedError: The caller is not an admin.
        InvalidArgumentError: Paths are disabled, or `path` is not below `root`.
    """
    current_caller.get().require(frozenset({Role.ADMIN}))
    if not root:
        reason = (
            "adapters are not loaded by path here; to allow this, set MIDSTREAM_ADAPTER_ROOT (--adapter-root) of "
            "routers and workers to a folder above the adapters"
        )
        raise InvalidArgumentError(reason, field=field)
    # Workers check symbolic links, because the files are on their side.
    if not PurePath(os.path.normpath(path)).is_relative_to(os.path.normpath(root)) or "\0" in path:
        raise InvalidArgumentError("is outside the adapter folder (--adapter-root)", field=field)


def check_supported(request: pb.GenerateRequest, features: frozenset[str] | None) -> None:
    """Check a request against the workers' `features`, and fill the widths of its output probes.

    Args:
        request: The request, already checked by `check_request`.
        features: Features of the cell's workers; None if no worker has registered.

    Raises:
        UnsupportedError: The workers lack a feature that the request uses.
        InvalidArgumentError: The workers have no post-processor or output probe of that name.
        UnavailableError: The request names a probe, and no worker has registered yet.
    """
    if features is not None:
        for feature in _missing(features):
            if FEATURES[feature](request):
                raise UnsupportedError(
                    f"the workers lack {feature.replace('_', ' ')}", field=_FEATURE_FIELDS.get(feature, feature)
                )
        name = request.logits_post_processor_name
        if name and f"logits_post_processor.{name}" not in features:
            raise InvalidArgumentError(
                "no post-processor of this name is registered in the workers", field="logits_post_processor_name"
            )
    probes = [item for item in request.output.additional_outputs if not _ADDITIONAL_OUTPUT.fullmatch(item.name)]
    if not probes:
        return
    if features is None:
        raise UnavailableError(
            f"no worker has registered yet, so it is unknown whether there is an output probe {probes[0].name!r}"
        )
    widths = dict(_probe_widths(features or ()))
    for item in probes:
        if item.name == CLASS_SCORES and item.name not in widths:
            raise UnsupportedError("the model has no classification head", field="model")
        if item.name not in widths:
            raise InvalidArgumentError(
                "must be hidden_states.LAYER, topk_logits.K, token_logits.ID.ID..., sampling.K, or an output probe of "
                "the workers",
                field="output.additional_outputs.name",
            )
        item.probe_width = widths[item.name]


@lru_cache(maxsize=64)
def _missing(features: frozenset[str]) -> list[str]:
    return sorted(FEATURES.keys() - features)


def fit_to_context(num_prompt_tokens: int, max_tokens: int | None, model: ModelFolder, field: str = "prompt") -> int:
    """Return the limit on a sequence's output tokens: the requested limit, capped by the model's context length.

    Raises:
        ContextLengthError: The prompt leaves no room for an output token.
    """
    room = model.max_sequence_length - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"has {num_prompt_tokens} tokens; this model's maximum context length is {model.max_sequence_length} "
            "tokens, and must hold the prompt and at least one more",
            field=field,
        )
    return min(room, MAX_DEFAULT_TOKENS if max_tokens is None else max_tokens)


def fit_to_tensors(request: pb.GenerateRequest, model: ModelFolder, max_tensor_bytes: int) -> None:
    """Lower the default max_tokens of a normalized request so that its output tensors fit, if they can."""
    sizes = []
    for max_tokens in (0, 1):
        request_of_length = pb.GenerateRequest(max_tokens=max_tokens, sampling=request.sampling, output=request.output)
        num_prompt_tokens = len(request.token_ids.values)
        sizes.append(tensor_bytes(request_of_length, num_prompt_tokens, model.vocab_size, model.hidden_size))
    fixed, with_one = sizes
    if with_one > fixed:
        most = (max_tensor_bytes - fixed) // (with_one - fixed)
        request.max_tokens = min(request.max_tokens, max(most, request.sampling.min_tokens, 1))


def check_tensors(request: pb.GenerateRequest, model: ModelFolder, max_tensor_bytes: int) -> None:
    """Check the size of the output tensors of a normalized request.

    Raises:
        InvalidArgumentError: The tensors exceed the limit.
    """
    num_bytes = tensor_bytes(request, len(request.token_ids.values), model.vocab_size, model.hidden_size)
    if num_bytes > max_tensor_bytes:
        raise InvalidArgumentError(
            f"the logits and hidden states for the prompt and max_tokens take {num_bytes} bytes; the limit is "
            f"{max_tensor_bytes}",
            field="output",
        )


def check_sampling(sampling: pb.SamplingConfig, model: ModelFolder) -> None:
    """Raise InvalidArgumentError, with the field's name, if a sampling parameter is out of range."""
    for field, value in sampling.ListFields():
        bounds = _SAMPLING.get(field.name)
        if bounds is not None:
            bounds = _FINITE if sampling.penalize_prompt and field.name in _PENALTIES else bounds
            bounds.check(value, f"sampling.{field.name}")
        elif field.name in ("no_repeat_ngram_size", "min_tokens"):
            _Range(0, model.max_sequence_length).check(value, f"sampling.{field.name}")
        elif field.name == "top_p_reset_id":
            check_token_ids((value,), model.vocab_size, "sampling.top_p_reset_id")
        elif field.name == "allowed_token_ids":
            _at_most(len(value), model.vocab_size, "sampling.allowed_token_ids")
            check_token_ids(value, model.vocab_size, "sampling.allowed_token_ids")
        elif field.name == "embedding_bias":
            for token_id, bias in value.items():
                check_token_ids((token_id,), model.vocab_size, "sampling.embedding_bias")
                _FINITE.check(bias, "sampling.embedding_bias")
    if sampling.beam_width > 1 and sampling.num_return_sequences > sampling.beam_width:
        raise InvalidArgumentError("must be at most the beam width", field="sampling.num_return_sequences")


def _check_stopping(stopping: pb.StoppingConfig, model: ModelFolder) -> None:
    for field, value in stopping.ListFields():
        path = f"stopping.{field.name}"
        if field.name == "stop_words":
            _check_words(value, MAX_STOP_WORDS, path)
        elif field.name == "bad_words":
            _check_words(value, MAX_BAD_WORDS, path)
        elif field.name == "stop_token_ids":
            _at_most(len(value), MAX_STOP_TOKENS, path)
            check_token_ids(value, model.vocab_size, path)
        elif field.name in ("bad_word_token_ids", "stop_word_token_ids"):
            _at_most(len(value), MAX_BAD_WORDS, path)
            for ids in value:
                _at_least_one(len(ids.values), path)
                _at_most(len(ids.values), MAX_BAD_WORD_TOKENS, path)
                check_token_ids(ids.values, model.vocab_size, path)
        elif field.name in ("end_id", "pad_id"):
            check_token_ids((value,), model.vocab_size, path)


def _check_output(output: pb.OutputConfig, model: ModelFolder) -> None:
    _at_most(output.log_probs, MAX_LOG_PROBS, "output.log_probs")
    _at_most(output.prompt_log_probs, MAX_LOG_PROBS, "output.prompt_log_probs")
    _at_most(len(output.additional_outputs), 16, "output.additional_outputs")
    for additional in output.additional_outputs:
        field = "output.additional_outputs.name"
        if additional.HasField("probe_width"):
            raise InvalidArgumentError("must not be set by clients", field="output.additional_outputs.probe_width")
        check_name(additional.name, field)
        if _ADDITIONAL_OUTPUT.fullmatch(additional.name):
            kind, *numbers = additional.name.split(".")
            if kind == "token_logits":
                check_token_ids(list(map(int, numbers)), model.vocab_size, field)
            else:
                most = model.num_layers if kind == "hidden_states" else min(MAX_TOPK_LOGITS, model.vocab_size)
                _at_most(int(numbers[0]), most, field)
            if kind == "sampling" and additional.gather_context:
                raise InvalidArgumentError("is not reported for the prompt", field=field)
    names = [additional.name for additional in output.additional_outputs]
    if len(set(names)) < len(names):
        raise InvalidArgumentError("must not be repeated", field="output.additional_outputs.name")


def _check_continuation(request: pb.GenerateRequest, model: ModelFolder) -> None:
    count, sampling = request.continuation.num_output_tokens, request.sampling
    if request.WhichOneof("input") != "token_ids":
        raise InvalidArgumentError("needs token_ids", field="continuation")
    _at_most(count, max(len(request.token_ids.values) - 1, 0), "continuation.num_output_tokens")
    _at_most(request.continuation.sequence_index, MAX_SEQUENCES - 1, "continuation.sequence_index")
    check_token_ids(request.token_ids.values[len(request.token_ids.values) - count :], model.vocab_size, "token_ids")
    if sampling.beam_width > 1 or sampling.num_return_sequences > 1:
        raise UnsupportedError("is for a single sequence without beam search", field="continuation")


def _probe_widths(features: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the name and the width of each output probe that the workers have."""
    for feature in features:
        if feature.startswith("output_probe."):
            _, width, name = feature.split(".", 2)
            yield name, int(width)


def _check_guide(guided: pb.GuidedDecodingConfig, _: ModelFolder) -> None:
    if guided.guide_type not in pb.GuideType.values()[1:]:
        raise InvalidArgumentError("must be set", field="guided_decoding.guide_type")
    if not guided.guide and guided.guide_type != pb.GUIDE_TYPE_JSON:
        raise InvalidArgumentError("must not be empty", field="guided_decoding.guide")
    _at_most(len(guided.guide), MAX_GUIDE_CHARACTERS, "guided_decoding.guide")


def _check_lora(lora: pb.LoraConfig, _: ModelFolder) -> None:
    _at_least_one(len(lora.name), "lora.name")
    check_name(lora.name, "lora.name")
    if lora.HasField("resolved"):
        raise InvalidArgumentError("must not be set by clients", field="lora.resolved")


def _check_speculative(speculative: pb.SpeculativeConfig, model: ModelFolder) -> None:
    if speculative.method not in (1, 2):
        raise InvalidArgumentError("must be set", field="speculative.method")
    _Range(1, 16).check(speculative.num_draft_tokens, "speculative.num_draft_tokens")
    if speculative.HasField("max_ngram_size"):
        _Range(1, MAX_NGRAM_SIZE).check(speculative.max_ngram_size, "speculative.max_ngram_size")
    prediction = speculative.prediction_token_ids
    field = "speculative.prediction_token_ids"
    _at_most(len(prediction), model.max_sequence_length, field)
    check_token_ids(prediction, model.vocab_size, field)


def _check_retention(retention: pb.KvRetentionConfig, _: ModelFolder) -> None:
    _at_most(len(retention.token_ranges), MAX_TOKEN_RANGES, "kv_retention.token_ranges")
    for token_range in retention.token_ranges:
        _at_most(token_range.priority, 100, "kv_retention.token_ranges.priority")
        _at_most(token_range.duration_ms, MAX_DURATION_MS, "kv_retention.token_ranges.duration_ms")
        if token_range.HasField("end") and token_range.end <= token_range.start:
            raise InvalidArgumentError("must be after start", field="kv_retention.token_ranges.end")
    _at_most(retention.decode_priority, 100, "kv_retention.decode_priority")
    _at_most(retention.decode_duration_ms, MAX_DURATION_MS, "kv_retention.decode_duration_ms")


def _check_words(words: Iterable[str], limit: int, field: str) -> None:
    words = tuple(words)
    _at_most(len(words), limit, field)
    for word in words:
        if not word:
            raise InvalidArgumentError("must not contain an empty word", field=field)
        if len(word) > MAX_STOP_WORD_CHARACTERS:
            raise InvalidArgumentError(
                f"contains a word of {len(word)} characters; must have at most {MAX_STOP_WORD_CHARACTERS}", field=field
            )


def check_token_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Raise InvalidArgumentError if a token id is not in the model's vocabulary."""
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidArgumentError(f"{worst} is not a token id; must be in 0..{vocab_size - 1}", field=field)


def _at_most(value: int, limit: int, field: str) -> None:
    if value > limit:
        raise InvalidArgumentError(f"is {value}; must be at most {limit}", field=field)


def _reports_prompt(request: pb.GenerateRequest) -> bool:
    """Return whether the output includes anything about the prompt. The output of a beam search begins only with its
    first generated token.
    """
    output = request.output
    echoes = output.HasField("exclude_input_from_output") and not output.exclude_input_from_output
    has_log_probs = output.HasField("prompt_log_probs")
    has_tensors = output.return_context_logits or any(item.gather_context for item in output.additional_outputs)
    return (echoes or has_log_probs or has_tensors) and request.sampling.beam_width <= 1


def _at_least_one(value: int, field: str) -> None:
    if value < 1:
        raise InvalidArgumentError("must be at least 1", field=field)


def _named(field: str) -> _Check:
    return lambda value, _: check_name(value, field)


def _bounded(low: int, high: int, field: str) -> _Check:
    bounds = _Range(low, high)
    return lambda value, _: bounds.check(value, field)


# The check for each field of a request, made if the field is set.
_CHECKS: dict[str, _Check] = {
    **{field: _named(field) for field in ("request_id", "client_id", "cache_salt", "logits_post_processor_name")},
    "model": check_model,
    "priority": _bounded(-100, 100, "priority"),
    "timeout_ms": lambda value, _: _at_most(value, MAX_DURATION_MS, "timeout_ms"),
    "keep_s": lambda value, _: _at_most(value, MAX_KEEP_S, "keep_s"),
    "arrival_time_unix_ns": _bounded(0, 1 << 62, "arrival_time_unix_ns"),
    "sampling": check_sampling,
    "stopping": _check_stopping,
    "output": _check_output,
    "guided_decoding": _check_guide,
    "lora": _check_lora,
    "prompt_tuning": lambda tuning, _: check_name(tuning.name, "prompt_tuning.name"),
    "speculative": _check_speculative,
    "kv_retention": _check_retention,
}
