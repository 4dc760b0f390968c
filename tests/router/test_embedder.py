"""Which tokens of an input contribute to its embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midstream.errors import ConfigError
from router.pipeline.embedder import Pooling, pooling_of


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
    ],
)
def test_a_models_pooling_equals_that_of_sentence_transformers(
    tmp_path: Path, modes: dict[str, bool], expected: Pooling | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    assert pooling_of(tmp_path) is expected


def test_without_a_file_it_is_the_last_token(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) is Pooling.LAST
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        pooling_of(tmp_path)
