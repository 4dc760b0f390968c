"""What generation_config.json recommends is used, refused or logged."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from transformers import GenerationConfig

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.generation_defaults import generation_defaults


def filled(folder: ModelFolder, settings: dict[str, Any], **sampling: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(max_tokens=8, sampling=pb.SamplingConfig(**sampling))
    generation_defaults(replace(folder, generation_config=settings)).fill(request)
    return request


def test_only_unset_fields_take_the_default(folder: ModelFolder) -> None:
    settings = {"temperature": 0.5, "top_k": 20.0, "repetition_penalty": 1.5, "top_p": None, "do_sample": True}
    found = filled(folder, settings, temperature=0.0, min_p=0.25).sampling
    assert found == pb.SamplingConfig(temperature=0.0, min_p=0.25, top_k=20, repetition_penalty=1.5)


def test_a_beam_search_takes_no_default_that_would_change_its_scores(folder: ModelFolder) -> None:
    settings = {"temperature": 0.5, "top_p": 0.5, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3}
    found = filled(folder, settings, beam_width=2).sampling
    assert found == pb.SamplingConfig(beam_width=2, repetition_penalty=1.5, no_repeat_ngram_size=3)


def test_without_sampling_the_default_is_greedy(folder: ModelFolder) -> None:
    settings = {"do_sample": False, "temperature": 0.6}
    assert filled(folder, settings).sampling.temperature == 0.0
    assert filled(folder, settings, temperature=0.5).sampling.temperature == 0.5


def test_lengths(folder: ModelFolder) -> None:
    settings = {"min_new_tokens": 5, "max_new_tokens": 100}
    assert generation_defaults(replace(folder, generation_config=settings)).max_tokens == 100
    assert filled(folder, settings).sampling.min_tokens == 5
    assert not filled(folder, settings, min_tokens=0).sampling.min_tokens
    assert filled(folder, {"min_new_tokens": 50}).sampling.min_tokens == 8  # not more than max_tokens


def test_suppressed_tokens_are_bad_words_of_every_request(folder: ModelFolder) -> None:
    request = pb.GenerateRequest()
    request.stopping.bad_word_token_ids.add(values=[7])
    settings = {"suppress_tokens": [1, 2], "bad_words_ids": [[3, 4]]}
    generation_defaults(replace(folder, generation_config=settings)).fill(request)
    assert [list(word.values) for word in request.stopping.bad_word_token_ids] == [[7], [1], [2], [3, 4]]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"temperature": "0.5"}, {"top_k": -3}, {"top_p": 1.5}, {"min_p": float("nan")},
        {"max_new_tokens": 0}, {"max_new_tokens": True}, {"min_new_tokens": 1 << 40}, {"no_repeat_ngram_size": -1},
        {"suppress_tokens": [1 << 24]}, {"suppress_tokens": 5}, {"suppress_tokens": ["x"]}, {"bad_words_ids": [[]]},
        {"bad_words_ids": [[-1]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_is_an_error_that_names_file_and_field(folder: ModelFolder, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{next(iter(bad))}"):
        generation_defaults(replace(folder, generation_config=bad))


def test_settings_without_effect_are_logged(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"begin_suppress_tokens": [1], "num_beams": 4, "x_of_tomorrow": 2, "top_k": 5, "eos_token_id": 1}
    generation_defaults(replace(folder, generation_config=settings))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("no effect: begin_suppress_tokens=[1], num_beams=4, x_of_tomorrow=2")


def test_the_defaults_of_transformers_are_not_logged(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    settings = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    generation_defaults(replace(folder, generation_config=settings))
    assert not caplog.records
