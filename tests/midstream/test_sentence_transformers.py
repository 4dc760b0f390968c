"""How a folder of sentence-transformers makes vectors: the forms that versions 6.2 and before 6 write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import ConfigError
from midstream.model.sentence_transformers import TextEncoder, read_text_encoder

OLDER = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {
        "idx": 1,
        "name": "1",
        "path": "pool",
        "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    },
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write(folder: Path, **files: Any) -> None:
    """Write JSON files; in their names, __ stands for a slash."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}, ("lasttoken",)),
        ({"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True}, ("mean",)),
        ({"embedding_dimension": 64, "pooling_mode": ["cls", "max"], "include_prompt": True}, ("cls", "max")),
        ({"pooling_mode": "weightedmean", "pooling_mode_lasttoken": True}, ("weightedmean",)),
        ({**OLDER, "pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({**OLDER, "pooling_mode_mean_tokens": True}, ("mean",)),
        ({**OLDER, "pooling_mode_cls_token": True}, ("cls",)),
        ({**OLDER, "pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_max_tokens": True},
         ("max", "mean_sqrt_len_tokens")),
        # Without any mode, the mean.
        (OLDER, ("mean",)),
        ({"word_embedding_dimension": 64}, ("mean",)),
    ],
)  # fmt: skip
def test_the_modes_of_pooling(tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]) -> None:
    write(tmp_path, **{"1_Pooling__config": config})
    assert read_text_encoder(tmp_path) == TextEncoder(pooling=modes, pooling_file="1_Pooling/config.json")


def test_a_folder_of_transformers_has_the_last_state() -> None:
    assert TextEncoder().pooling == ("lasttoken",)


def test_modules_may_have_folders_of_any_name(tmp_path: Path) -> None:
    pooling = {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": False}
    prompts = {"prompts": {"query": "find: ", "document": None}, "default_prompt_name": "query"}
    write(
        tmp_path,
        modules=MODULES,
        pool__config=pooling,
        config_sentence_transformers={**prompts, "similarity_fn_name": "cosine"},
        sentence_bert_config={"max_seq_length": 512, "do_lower_case": False},
    )
    assert read_text_encoder(tmp_path) == TextEncoder(
        pooling=("mean",),
        pooling_file="pool/config.json",
        includes_prompt=False,
        has_normalize=True,
        prompts={"query": "find: ", "document": ""},
        default_prompt="query",
        max_tokens=512,
    )


@pytest.mark.parametrize(("length", "expected"), [(100, 100), (10**30, None), (None, None)])
def test_the_length_may_be_that_of_the_tokenizer(tmp_path: Path, length: int | None, expected: int | None) -> None:
    write(tmp_path, modules=MODULES, pool__config={}, tokenizer_config={"model_max_length": length})
    assert read_text_encoder(tmp_path).max_tokens == expected
    (tmp_path / "modules.json").unlink()
    assert read_text_encoder(tmp_path).max_tokens is None


def test_modules_that_change_vectors_are_named(tmp_path: Path) -> None:
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    write(tmp_path, modules=[*MODULES, dense], pool__config={"pooling_mode": "mean"})
    assert read_text_encoder(tmp_path).other_modules == ("Dense (3_Dense)",)


def test_a_list_of_modules_without_pooling(tmp_path: Path) -> None:
    write(tmp_path, modules=MODULES[:1])
    assert read_text_encoder(tmp_path).pooling == ()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"1_Pooling__config": {"pooling_mode": "median"}},
            r"1_Pooling/config\.json: pooling_mode 'median'|\['median'\]",
        ),
        ({"modules": [{"path": ""}]}, r"modules\.json is not a list of modules"),
        ({"modules": [{**MODULES[1], "path": "../other"}]}, r"names a folder outside its own: '\.\./other'"),
        ({"modules": [{**MODULES[1], "path": "/etc"}]}, "names a folder outside its own: '/etc'"),
        ({"config_sentence_transformers": {"prompts": ["x"]}}, "prompts is not an object of texts"),
        ({"config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name 'q' is not one of"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length is 0; must be a positive number"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(ConfigError, match=message):
        read_text_encoder(tmp_path)
