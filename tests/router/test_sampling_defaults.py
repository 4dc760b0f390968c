from __future__ import annotations

from dataclasses import replace

import pytest

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder
from protos import generation_pb2 as pb
from router.pipeline.sampling_defaults import fill_sampling, sampling_defaults


def test_only_unset_fields_take_the_default(folder: ModelFolder) -> None:
    model = replace(folder, sampling_defaults={"temperature": 0.5, "top_k": 20.0, "repetition_penalty": 1.5})
    sampling = pb.SamplingConfig(temperature=0.0, min_p=0.25)
    fill_sampling(sampling, sampling_defaults(model))
    assert sampling == pb.SamplingConfig(temperature=0.0, min_p=0.25, top_k=20, repetition_penalty=1.5)


def test_a_beam_search_takes_no_default_that_would_change_its_scores(folder: ModelFolder) -> None:
    model = replace(folder, sampling_defaults={"temperature": 0.5, "top_p": 0.5, "repetition_penalty": 1.5})
    sampling = pb.SamplingConfig(beam_width=2)
    fill_sampling(sampling, sampling_defaults(model))
    assert sampling == pb.SamplingConfig(beam_width=2, repetition_penalty=1.5)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -3}, {"top_p": 1.5}, {"min_p": float("nan")}])
def test_a_value_out_of_range_is_an_error_that_names_file_and_field(folder: ModelFolder, bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(replace(folder, sampling_defaults=bad))
