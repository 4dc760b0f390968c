"""Attention with linear biases (ALiBi) beyond what all families are tested for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.models.families import describe
from gpu_worker.models.families.alibi import _slopes
from midstream.errors import UnsupportedError
from tests.gpu_worker.test_families import TOLERANCE
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

MPT = {"d_model": 96, "n_layers": 2, "max_seq_len": 512}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Bloom", {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
        ("Mpt", {**MPT, "n_heads": 6}),
        ("Mpt", {**MPT, "n_heads": 3, "attn_config": {"softmax_scale": 0.3}}),
    ],
)
def test_any_number_of_heads_and_positions_beyond_256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any]
) -> None:
    model, tokens = make_tiny_model(tmp_path, family, **settings), prompt(300, seed=4)
    runner = make_runner(tmp_path, kv="f32", max_num_tokens=128)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    new = [driver.sequence(0, tokens)]
    for start in range(0, 300, 100):
        driver.step(new, [(0, start, 100)])
        new = []
    wanted = expected_logits(model, tokens)[-1:]
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert float((recorder.logits[-1] - wanted).abs().max()) <= limit


def test_the_slopes_of_falcon_are_rounded_as_in_transformers() -> None:
    config = {
        "model_type": "falcon", "alibi": True, "multi_query": False, "vocab_size": 99, "hidden_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 12,
    }  # fmt: skip
    found = torch.tensor(describe(config).alibi)
    assert torch.equal(found, (torch.tensor(_slopes(12)).bfloat16() / 2).float())
    assert not torch.equal(found, torch.tensor(_slopes(12)) / 2)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4, "kv": "int8"}, "a KV cache in int8"),
        ("Bloom", {"n_layer": 2, "n_head": 4, "apply_residual_connection_post_layernorm": True}, "post_layernorm True"),
        ("Mpt", {**MPT, "n_heads": 6, "attn_config": {"clip_qkv": 6.0}}, "clip_qkv 6"),
        ("Mpt", {**MPT, "n_heads": 6, "logit_scale": 0.5}, "logit_scale 0.5"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, family: str, settings: dict[str, Any], reason: str) -> None:
    of_worker = {name: settings[name] for name in settings if name == "kv"}
    make_tiny_model(tmp_path, family, **{name: settings[name] for name in settings if name != "kv"})
    with pytest.raises(UnsupportedError, match=reason):
        make_runner(tmp_path, implementation="native", **of_worker)
