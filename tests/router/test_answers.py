"""Scores computed from the probabilities of the answers that a model was trained to give."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from midstream.errors import ConfigError
from midstream.model.folder import ModelFolder
from router.pipeline.answers import Answers, answers_of


def test_a_score_is_the_probability_of_yes() -> None:
    answers = Answers(yes=9, no=4)
    assert answers.output == "token_logits.9.4"
    assert answers.score([2.0, 2.0]) == 0.5
    assert answers.score([math.log(3), 0.0]) == pytest.approx(0.75)
    assert answers.score([-1000.0, 1000.0]) == 0
    assert answers.score([1000.0, -1000.0]) == 1
    assert Answers(yes=9).score([math.log(3)]) == pytest.approx(0.75)


def test_the_models_folder_defines_it(folder: ModelFolder, tmp_path: Path) -> None:
    folder = dataclasses.replace(folder, path=tmp_path)
    assert answers_of(folder) is None
    file = tmp_path / "1_LogitScore" / "config.json"
    file.parent.mkdir()
    for config, expected in (
        ({"true_token_id": 5, "false_token_id": 0}, Answers(5, 0)),
        ({"true_token_id": 5, "false_token_id": None, "module_input_name": "causal_logits"}, Answers(5)),
    ):
        file.write_text(json.dumps(config))
        assert answers_of(folder) == expected
    for text in ("{", "[]", "{}", '{"true_token_id": "yes"}', '{"true_token_id": 1, "false_token_id": 49152}'):
        file.write_text(text)
        with pytest.raises(ConfigError):
            answers_of(folder)
