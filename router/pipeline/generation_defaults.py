"""What a model's generation_config.json recommends for requests that leave it unset."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from midstream.errors import ConfigError, InvalidArgumentError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.request_checks import check_sampling, check_token_ids

logger = logging.getLogger(__name__)

# Fields of SamplingConfig, by the names in generation_config.json.
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_SAMPLING |= {"no_repeat_ngram_size": "no_repeat_ngram_size", "min_new_tokens": "min_tokens"}
_INTEGERS = frozenset({"top_k", "no_repeat_ngram_size", "min_tokens"})
# Defaults that also apply to beam searches, which otherwise rank tokens by the unmodified distribution.
_OF_BEAMS = frozenset({"repetition_penalty", "no_repeat_ngram_size", "min_tokens"})
_OTHERS = frozenset({"do_sample", "max_new_tokens", "suppress_tokens", "bad_words_ids"})
# Settings that say nothing about the output: ids (model/folder.py reads them), caches, transformers' return values and
# its speculative decoding.
_NOT_OF_OUTPUT = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "return_legacy_cache", "remove_invalid_values", "low_memory", "compile_config", "disable_compile",
    "prefill_chunk_size", "continuous_batching_config", "use_mtp", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type",
})  # fmt: skip
# Values with which a setting has no effect in transformers either.
_NEUTRAL: dict[str, object] = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "length_penalty": 1, "typical_p": 1,
    "encoder_repetition_penalty": 1, "guidance_scale": 1, "max_length": 20,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations of a model.

    Attributes:
        sampling: Sampling parameters, for requests that leave them unset.
        max_tokens: The same for `max_tokens`; None if there is no recommendation.
        bad_word_ids: Token sequences that no request may generate.
    """

    sampling: pb.SamplingConfig = field(default_factory=pb.SamplingConfig)
    max_tokens: int | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def _by_name(self) -> tuple[tuple[str, float], ...]:
        return tuple((item.name, value) for item, value in self.sampling.ListFields())

    def fill(self, request: pb.GenerateRequest) -> None:
        """Complete a request whose max_tokens is set."""
        sampling = request.sampling
        for name, value in self._by_name:
            if sampling.HasField(name):  # type: ignore[arg-type]
                continue
            if sampling.beam_width <= 1 or name in _OF_BEAMS:
                setattr(sampling, name, min(value, request.max_tokens) if name == "min_tokens" else value)
        for ids in self.bad_word_ids:
            request.stopping.bad_word_token_ids.add(values=ids)


def generation_defaults(model: ModelFolder) -> GenerationDefaults:
    """Return what generation_config.json recommends, and log the settings that have no effect here.

    Raises:
        ConfigError: A value is out of range.
    """
    settings = {name: value for name, value in model.generation_config.items() if value is not None}
    ignored = ignored_settings(settings)
    if ignored:
        logger.warning(
            "%s: these settings have no effect: %s", model.path / "generation_config.json", ", ".join(ignored)
        )
    sampling = pb.SamplingConfig()
    try:
        for name, target in _SAMPLING.items():
            if name in settings:
                value = _number(name, settings[name], is_integer=target in _INTEGERS)
                try:
                    setattr(sampling, target, value)
                except (ValueError, OverflowError):
                    raise InvalidArgumentError(f"is out of range: {value}", field=name) from None
        if settings.get("do_sample") is False:
            sampling.temperature = 0.0
        check_sampling(sampling, model)
        max_tokens = settings.get("max_new_tokens")
        if max_tokens is not None and _number("max_new_tokens", max_tokens, is_integer=True) < 1:
            raise InvalidArgumentError("must be at least 1", field="max_new_tokens")
        words = _bad_words(settings)
        for ids in words:
            check_token_ids(ids, model.vocab_size, "suppress_tokens or bad_words_ids")
    except (InvalidArgumentError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{model.path / 'generation_config.json'}: {error}; use --generation-config none to ignore it",
            field="model",
        ) from None
    return GenerationDefaults(sampling, None if max_tokens is None else int(max_tokens), words)


def _number(name: str, value: object, *, is_integer: bool) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgumentError(f"must be a number, not {value!r:.100}", field=name)
    return int(value) if is_integer else value


def _bad_words(settings: Mapping[str, object]) -> tuple[tuple[int, ...], ...]:
    suppressed, words = settings.get("suppress_tokens") or [], settings.get("bad_words_ids") or []
    if not isinstance(suppressed, list) or not isinstance(words, list):
        raise InvalidArgumentError("must be a list", field="suppress_tokens or bad_words_ids")
    found = [*([token_id] for token_id in suppressed), *words]
    for ids in found:
        if not isinstance(ids, list) or not ids or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise InvalidArgumentError("must contain token ids", field="suppress_tokens or bad_words_ids")
    return tuple(map(tuple, found))


def used_settings(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the settings of generation_config.json that change outputs."""
    return sorted(name for name in settings if name in _SAMPLING or name in _OTHERS or name == "eos_token_id")


def ignored_settings(settings: Mapping[str, object]) -> list[str]:
    """Return the settings that would change outputs in transformers, but have no effect here, as NAME=VALUE."""
    known = _SAMPLING.keys() | _OTHERS | _NOT_OF_OUTPUT
    return [
        f"{name}={value!r:.100}"
        for name, value in sorted(settings.items())
        if name not in known and value and value != _NEUTRAL.get(name)
    ]
