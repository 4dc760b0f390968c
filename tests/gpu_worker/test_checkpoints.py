"""Checkpoints as people have them: of models without a head, with tied matrices, and with other types of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.loader import load_model
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.adapters import adapted, make_lora, ref_of
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents
from tests.gpu_worker.test_lora import sequence
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import SHAPE, Driver, make_runner, make_tiny_model

PROMPT = prompt(37, seed=1)


def save_base(folder: Path, model: torch.nn.Module) -> Any:
    """Write only the part of `model` without its head to `folder`, as transformers does, and return this part."""
    base: Any = model.base_model
    base.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return base


def last_state(folder: Path, tokens: Sequence[int] = PROMPT, **settings: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the hidden state at the last token, as requests for embeddings do."""
    runner = make_runner(folder, activations="f32", kv="f32", **settings)
    name = f"hidden_states.{SHAPE['num_hidden_layers']}"
    request = pb.GenerateRequest(request_id="r", max_tokens=1, token_ids=pb.TokenIds(values=tokens))
    request.output.additional_outputs.add(name=name)
    (made,) = CoreWithRunners(runner, ()).run([request])
    return np.frombuffer(contents(made)[0].tensors[name], np.float32)


def check_logits(folder: Path, wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder, implementation="native", activations="f32", kv="f32")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, PROMPT)], [(0, 0, len(PROMPT))])
    assert float((recorder.logits[-1] - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("family", "kernels", "settings"),
    [
        ("Qwen3", "native", {"head_dim": 32}),
        ("Qwen3", "torch", {"head_dim": 32}),
        ("Mistral", "native", {"sliding_window": 24, "head_dim": 32}),
        ("Gemma2", "native", {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": False}),
        ("Phi3", "torch", {"pad_token_id": 0, "tie_word_embeddings": False}),
        ("GPT2", "torch", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "tie_word_embeddings": False}),
    ],
)
def test_a_model_without_a_head_has_the_hidden_states_of_transformers(
    tmp_path: Path, family: str, kernels: str, settings: dict[str, Any]
) -> None:
    base = save_base(tmp_path / "base", make_tiny_model(tmp_path / "made", family, **settings))
    assert not open_model_folder(str(tmp_path / "base")).has_head
    with torch.inference_mode():
        wanted = base(torch.tensor([PROMPT])).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(last_state(tmp_path / "base", kernels=kernels), wanted, rtol=1e-4, atol=1e-4)


def test_a_head_that_is_tied_to_the_embedding_needs_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen3", head_dim=32, tie_word_embeddings=True)
    save_base(tmp_path / "base", model)
    assert open_model_folder(str(tmp_path / "base")).has_head
    check_logits(tmp_path / "base", expected_logits(model, PROMPT)[-1:], monkeypatch)


def test_a_tied_matrix_may_be_stored_as_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path, "Qwen3", head_dim=32, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(tmp_path, expected_logits(model, PROMPT)[-1:], monkeypatch)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_file_of_several_shards_is_searched_for_a_head(tmp_path: Path, is_sharded: bool) -> None:
    model: Any = make_tiny_model(tmp_path / "made", "Qwen3", head_dim=32)
    model.save_pretrained(tmp_path / "whole", max_shard_size="100KB" if is_sharded else "1GB")
    model.base_model.save_pretrained(tmp_path / "base", max_shard_size="100KB" if is_sharded else "1GB")
    for name in ("whole", "base"):
        (tmp_path / name / "tokenizer.json").write_text("{}")
    assert [open_model_folder(str(tmp_path / name)).has_head for name in ("whole", "base")] == [True, False]


def test_a_missing_head_that_config_json_does_not_explain_is_named(tmp_path: Path) -> None:
    save_base(tmp_path / "base", make_tiny_model(tmp_path / "made", "Llama"))
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight; .* must set tie_word_embeddings to false"):
        load_model(WorkerConfig(device="cpu", num_threads=1), open_model_folder(str(tmp_path / "base")))


def test_an_adapter_of_a_model_without_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen3", head_dim=32, tie_word_embeddings=True)
    base = save_base(tmp_path / "base", model)
    ranks = {"^layers.1.self_attn.q_proj": 8, r"layers\.2\.self_attn\.q_proj$": 2, "layers.1.mlp.up_proj": 3}
    make_lora(
        base,
        tmp_path / "lora",
        1,
        task_type="FEATURE_EXTRACTION",
        r=4,
        target_modules=["q_proj", "up_proj"],
        rank_pattern=ranks,
    )
    runner = make_runner(tmp_path / "base", activations="f32", kv="f32")
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    ref = ref_of(runner, tmp_path / "lora")
    driver.step([sequence(driver, 0, PROMPT, ref)], [(0, 0, len(PROMPT))])
    with adapted(base, tmp_path / "lora") as made, torch.inference_mode():
        state = made(torch.tensor([PROMPT])).last_hidden_state[0, -1:]
        wanted = state @ base.embed_tokens.weight.t()
    assert float((recorder.logits[0] - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_tensors_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path, "Llama")
    tensors = {name: tensor.double() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"unused": torch.ones(3).double()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_logits(tmp_path, expected_logits(model, PROMPT)[-1:], monkeypatch)
