"""The settings of language models in models of text and images, compared with transformers' configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from gpu_worker.models.families import describe
from midstream.model.folder import open_model_folder
from midstream.model.text_config import TEXT_DEFAULTS, WRAPPERS, text_config


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    wanted = transformers.AutoConfig.for_model(kind)
    assert {name: getattr(wanted, name) for name in TEXT_DEFAULTS[kind]} == TEXT_DEFAULTS[kind]


@pytest.mark.parametrize("ties", [None, True, False])
@pytest.mark.parametrize("text_ties", [None, True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_short_config_is_read_as_by_transformers(
    kind: str, ties: bool | None, text_ties: bool | None, tmp_path: Path
) -> None:
    """Published files list only what differs from the defaults, as those of LLaVA 1.5 do."""
    flags = {"tie_word_embeddings": ties} if ties is not None else {}
    text_flags = {"tie_word_embeddings": text_ties} if text_ties is not None else {}
    nested = {"vocab_size": 300, "num_hidden_layers": 2, **text_flags}
    config = {"model_type": kind, "text_config": nested, **flags}
    wanted = transformers.AutoConfig.for_model(
        kind, **{name: value for name, value in config.items() if name != "model_type"}
    )
    text = wanted.text_config
    found = describe(config)
    assert (found.hidden_size, found.num_heads, found.num_kv_heads, found.intermediate_size) == (
        text.hidden_size,
        text.num_attention_heads,
        text.num_key_value_heads,
        text.intermediate_size,
    )
    assert found.ties_embeddings == wanted.tie_word_embeddings == text_config(config).get("tie_word_embeddings")
    assert found.max_sequence_length == text.max_position_embeddings
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    folder = open_model_folder(str(tmp_path))
    assert (folder.hidden_size, folder.max_sequence_length) == (text.hidden_size, text.max_position_embeddings)
    assert folder.image_token_id == wanted.image_token_id
