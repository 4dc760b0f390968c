"""Tokens that only tokenizer_config.json defines are treated as transformers treats them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from midstream.errors import ConfigError
from midstream.model.tokenizer import Tokenizer

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
        assert ours.encode_pair(text, "b a") == theirs.encode(text, "b a")


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
