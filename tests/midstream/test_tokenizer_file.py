"""Tokens that only tokenizer_config.json defines are treated as transformers treats them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from midstream.errors import ConfigError
from midstream.model.tokenizer import Tokenizer
from midstream.model.tokenizer_file import TokenizerFiles

TEXTS = ("", "a b", "<s>a</s> b", " b<extra>  a", "a<tool>b <tool>", "<|end|><|end|>a", "b<pad> <mask>")


def write_folder(folder: Path, config: dict[str, Any], template: str | None = None) -> Path:
    """Write a byte-level tokenizer. Its vocabulary contains <s>, </s> and <|end|>, but only <s> is an added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "<s>", "</s>", "<|end|>", "ab"]
    tokenizer = Library(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    if template is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return folder


def listed(content: str, **flags: bool) -> dict[str, object]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<s>", "eos_token": "</s>"},
        {"bos_token": "<s>", "add_bos_token": True},
        {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": "<s>", "add_bos_token": False},
        {"eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<pad>", "mask_token": listed("<mask>", lstrip=True, special=True) | {"__type": "AddedToken"}},
        {"added_tokens_decoder": {"261": listed("<tool>"), "260": listed("<extra>", rstrip=True, special=True)}},
        {"added_tokens_decoder": {"256": listed("<s>", special=True), "258": listed("<|end|>", special=True)}},
        {"added_tokens_decoder": {"256": listed("<s>", lstrip=True, special=True)}},
        {"eos_token": "<tool>", "added_tokens_decoder": {"260": listed("<tool>", lstrip=True)}},
        {"additional_special_tokens": ["<tool>", "</s>"]},
        {"extra_special_tokens": ["<extra>"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("template", [None, "<s>:0 $A:0"])
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, config: dict[str, Any], template: str | None) -> None:
    folder = write_folder(tmp_path / "model", config, template)
    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        number for number, token in theirs.added_tokens_decoder.items() if token.special
    }
    for text in TEXTS:
        for adds_special in (True, False):
            ids = ours.encode(text, add_special_tokens=adds_special)
            assert ids == theirs.encode(text, add_special_tokens=adds_special)
            for skips in (True, False):
                assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
        assert ours.encode_pair(text, "b a")[0] == theirs.encode(text, "b a")


def assert_same(folder: Path, texts: Sequence[str]) -> None:
    """Check that ids and texts, and the names of special tokens, are those of transformers."""
    ours, theirs = Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert {word: ours.encode(word, add_special_tokens=False) for word in texts} == {
        word: theirs.encode(word, add_special_tokens=False) for word in texts
    }
    assert ours.vocab_size == len(theirs)
    for skips in (True, False):
        assert [ours.decode([i, 97], skip_special_tokens=skips) for i in range(256, ours.vocab_size)] == [
            theirs.decode([i, 97], skip_special_tokens=skips) for i in range(256, ours.vocab_size)
        ]
    named = {name: text for name, text in TokenizerFiles(folder).special_tokens.items() if text is not None}
    assert named == theirs.special_tokens_map
    for name, token in named.items():
        assert TokenizerFiles(folder).id_of(name) == theirs.convert_tokens_to_ids(token)


# The places that may declare <x>, with the values that differ in meaning.
FLAGS = [{"special": special, "normalized": flag} for special in (False, True) for flag in (False, True)]
IN_TOKENIZER = [None, {}, *FLAGS]  # absent, in the vocabulary, added
IN_LIST: list[dict[str, Any]] = [{}, {"added_tokens_decoder": {}}]
IN_LIST += [{"added_tokens_decoder": {"260": listed("<x>", **flags)}} for flags in FLAGS]
# Only every 13th combination is tested by default.
STRIDE = 1 if os.environ.get("TEST_ALL_TOKENIZERS") else 13
TYPED = {"__type": "AddedToken"}
NAMES: list[dict[str, Any]] = [
    {},
    {"eos_token": "<x>"},
    {"eos_token": {**listed("<x>"), **TYPED}},
    {"eos_token": {**listed("<x>", special=True, normalized=True), **TYPED}},
    {"additional_special_tokens": ["<x>"]},
    {"additional_special_tokens": [{**listed("<x>"), **TYPED}]},
    {"extra_special_tokens": ["<y>", {**listed("<x>", special=True), **TYPED}], "pad_token": "<|end|>"},
    {"extra_special_tokens": {"image_token": "<x>"}, "mask_token": "<m>", "bos_token": "<b>"},
    {"model_specific_special_tokens": {"image": "<x>"}},
    {"model_specific_special_tokens": {"image": "<z>"}, "video_token": "<x>"},
    {"image_token": "<x>"},
    {"image_token": {**listed("<x>", lstrip=True), **TYPED}},
    {"extra_special_tokens": [], "additional_special_tokens": ["<x>"]},
]
OTHER_FILES: list[dict[str, Any]] = [
    {},
    {"special_tokens_map.json": {"eos_token": "<x>"}},
    {"special_tokens_map.json": {"eos_token": listed("<x>", lstrip=True)}},
    {"special_tokens_map.json": {"additional_special_tokens": ["<x>", "<z>"]}},
    {"special_tokens_map.json": {"extra_special_tokens": [{"content": "<x>", "lstrip": True}, "<z>"]}},
    {"special_tokens_map.json": {"extra_special_tokens": {"image_token": "<x>"}}},
    {"special_tokens_map.json": {"image_token": "<x>"}},
    {"added_tokens.json": {"<x>": 260}},
    {"added_tokens.json": {"<y>": 261, "<x>": 260}, "special_tokens_map.json": {"additional_special_tokens": ["<x>"]}},
]


@pytest.mark.parametrize("in_tokenizer", IN_TOKENIZER, ids=str)
@pytest.mark.parametrize("in_list", IN_LIST, ids=str)
def test_every_declaration_of_a_token_means_what_it_means_to_transformers(
    tmp_path: Path, in_tokenizer: dict[str, Any] | None, in_list: dict[str, Any]
) -> None:
    wrong = {}
    first = (IN_TOKENIZER.index(in_tokenizer) + len(IN_TOKENIZER) * IN_LIST.index(in_list)) % STRIDE
    for number, (names, files) in list(enumerate(itertools.product(NAMES, OTHER_FILES)))[first::STRIDE]:
        folder = write_folder(tmp_path / str(number), {**names, **in_list})
        fields = json.loads((folder / "tokenizer.json").read_text())
        fields["normalizer"] = {"type": "Lowercase"}
        if in_tokenizer is not None:
            fields["model"]["vocab"]["<x>"] = 260
        if in_tokenizer:
            fields["added_tokens"].append({"id": 260, **listed("<x>", **in_tokenizer)})
        (folder / "tokenizer.json").write_text(json.dumps(fields))
        for name, contents in files.items():
            (folder / name).write_text(json.dumps(contents))
        try:
            assert_same(folder, ("a <x>b", "<X>", "<y><z>", "<m> <b>", "<|end|>"))
        except AssertionError as error:
            wrong[f"{names} {files}"] = str(error)
    assert not wrong


def test_the_token_of_padding_is_special(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {})
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258, "pad_type_id": 0,
        "pad_token": "<|end|>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    assert_same(folder, ("<|end|>",))


def test_new_tokens_get_the_ids_of_the_library(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"pad_token": "<p>", "eos_token": "<e>"})
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["zz"] = 900  # after a gap
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    assert TokenizerFiles(folder).id_of("eos_token") == 261
    assert Tokenizer(folder).encode("<e><p>") == [261, 262]


def test_special_tokens_of_a_text_may_be_split(tmp_path: Path) -> None:
    config = {"eos_token": "<|end|>", "split_special_tokens": True, "added_tokens_decoder": {"260": listed("<tool>")}}
    folder = write_folder(tmp_path / "model", config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer(folder).encode("<|end|><tool>") == theirs.encode("<|end|><tool>") != [259, 260]
    whole = write_folder(tmp_path / "whole", {**config, "split_special_tokens": False})
    assert TokenizerFiles(whole).facts().digest != TokenizerFiles(folder).facts().digest


@pytest.mark.parametrize(
    ("settings", "cleans"),
    [
        ({"clean_up_tokenization_spaces": False}, False),
        ({"clean_up_tokenization_spaces": True}, False),  # the model is a BPE
        ({"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}, False),
        (
            {
                "clean_up_tokenization_spaces": True,
                "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
            },
            True,
        ),
    ],
)
def test_spaces_that_transformers_would_remove_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, bool], cleans: bool
) -> None:
    folder = write_folder(tmp_path / "model", settings)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = theirs.encode("a .")
    assert (theirs.decode(ids) != Tokenizer(folder).decode(ids)) is cleans
    assert any("clean_up_tokenization_spaces has no effect" in record.message for record in caplog.records) is cleans


def test_special_tokens_of_an_older_folder_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": listed("<pad>")}))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert Tokenizer(folder).encode(text) == theirs.encode(text)


@pytest.mark.parametrize("tokens", [["<tool>"], {"x": listed("<tool>")}, {"260": "<tool>"}, {"260": {"content": 1}}])
def test_an_invalid_list_of_tokens_is_rejected(tmp_path: Path, tokens: object) -> None:
    folder = write_folder(tmp_path / "model", {"added_tokens_decoder": tokens})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Tokenizer(folder)
