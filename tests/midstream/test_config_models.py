"""The file with the models of a router."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.config import RouterConfig
from midstream.config.models import aliases_of, model_configs, write_models
from midstream.errors import ConfigError

LARGE = {"model": "/large", "schedulers": "a:1,one-of:b:1|c:1", "detokenizers": "d:1"}
SMALL = {
    "model": "/small",
    "schedulers": "e:1",
    "detokenizers": "f:1",
    "model_aliases": "tiny, x",
    "tool_parser": "none",
}


def test_each_model_has_its_own_settings_and_those_of_the_router(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    write_models(path, {"org/large": LARGE, 'a "small" \x7f one': SMALL})
    large, small = model_configs(RouterConfig(models=str(path), max_beam_width=3))
    assert (large.served_model_name, large.schedulers, large.tool_parser) == ("org/large", LARGE["schedulers"], "auto")
    assert (small.served_model_name, small.tool_parser) == ('a "small" \x7f one', "none")
    assert aliases_of(small) == ("tiny", "x")
    assert {large.max_beam_width, small.max_beam_width} == {3}


def test_without_a_file_there_is_the_model_of_the_settings() -> None:
    config = RouterConfig(model="/m", model_aliases="a")
    assert model_configs(config) == [config]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no model"),
        ("[a", "is not TOML"),
        ("a = 1", r"models\[a\]: must be a table"),
        ("[a]\nmodel = '/m'\nschedulers = 's:1'", r"models\[a\].detokenizers: must be set"),
        ("[a]\nschedulrs = 's:1'", "did you mean schedulers"),
        ("[a]\nmodel = 1", r"models\[a\].model: is 1; must be a text"),
        ("[a]\ngeneration_config = 'x'", "is not one of auto, none"),
        (
            (
                "[a]\nmodel='/m'\nschedulers='s:1'\ndetokenizers='d:1'\n"
                "[b]\nmodel='/m'\nschedulers='t:1,s:1'\ndetokenizers='e:1'"
            ),
            r"models\[b\]: 's:1' is among the schedulers of 'a' as well",
        ),
        (
            (
                "[a]\nmodel='/m'\nschedulers='s:1'\ndetokenizers='d:1'\n"
                "[b]\nmodel='/m'\nschedulers='t:1'\ndetokenizers='e:1'\nmodel_aliases='a'"
            ),
            r"models\[b\]: 'a' is among the names of 'a' as well",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        model_configs(RouterConfig(models=str(path)))


def test_settings_of_one_model_do_not_apply_to_several(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    write_models(path, {"a": LARGE})
    with pytest.raises(ConfigError, match="schedulers: must not be set together with --models"):
        model_configs(RouterConfig(models=str(path), schedulers="x:1"))
    with pytest.raises(ConfigError, match="cannot read"):
        model_configs(RouterConfig(models=str(tmp_path / "missing")))
