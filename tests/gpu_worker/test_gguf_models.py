"""GGUF files of every family that has them, compared with transformers and llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import Keys

from gpu_worker.models.families import FAMILIES, family_of
from gpu_worker.models.weights.files import GgufFile
from gpu_worker.models.weights.gguf_names import separate_experts
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from midstream.model.prepare.gguf_source import lay_down
from midstream.model.token_bytes import byte_level_alphabet
from midstream.model.tokenizer import Tokenizer
from tests.gpu_worker.gguf_models import MODELS, write_gguf
from tests.gpu_worker.test_checkpoints import last_state
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model
from tests.midstream.gguf_vocabularies import ask_llama_cpp, needs_llama_cpp


@pytest.mark.parametrize("number", [1, 3])
def test_a_file_in_parts(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True)
    write_gguf(tmp_path / "file.gguf", "qwen2", model, part_size=15)
    assert not (tmp_path / "file.gguf").exists()
    folder = open_model_folder(str(tmp_path / f"file-0000{number}-of-00003.gguf"))
    assert (folder.name, folder.weights_format, len(folder.weight_files)) == ("file", "gguf", 3)
    check_logits(tmp_path, model, monkeypatch, folder.path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True)
    write_gguf(tmp_path / "file.gguf", "qwen2", model, part_size=15)
    (tmp_path / "file-00002-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"one of 3 parts, and file-00002-of-00003\.gguf is missing"):
        open_model_folder(str(tmp_path / "file-00001-of-00003.gguf"))


@needs_llama_cpp
def test_an_embedding_is_that_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector is the state at the end token that the file asks for."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    model = make_tiny_model(tmp_path / "made", "Qwen3", head_dim=32, tie_word_embeddings=True)
    tokens = (*sorted(byte_level_alphabet()), "ab", "<|endoftext|>")
    write_gguf(tmp_path / "file.gguf", "qwen3", model, tokens=tokens, adds_eos=True)
    folder = open_model_folder(str(tmp_path / "file.gguf"))
    ids = Tokenizer(folder.path).encode("some text 10")
    assert ids[-1] == 257
    wanted = np.array(ask_llama_cpp(tmp_path / "file.gguf", embeds="some text 10")["embedding"])
    found = last_state(folder.path, ids)
    assert found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted) > 0.99999


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_floats_of_other_sizes(dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    write_gguf(tmp_path / "file.gguf", "qwen2", model, dtype=dtype)
    check_logits(tmp_path, model, monkeypatch)


def test_a_type_without_values_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True)
    write_gguf(tmp_path / "file.gguf", "qwen2", model, dtype=np.int32)
    (tmp_path / "folder").mkdir()
    lay_down(tmp_path / "file.gguf", tmp_path / "folder", {})
    with pytest.raises(UnsupportedError, match=r"the tensor \S+ has the type I32, which is not supported"):
        make_runner(tmp_path / "folder", implementation="native")


@pytest.mark.parametrize("architecture", MODELS)
def test_a_gguf_file_gives_the_logits_of_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = MODELS[architecture]
    model = make_tiny_model(tmp_path / "made", tiny.family, **tiny.settings)
    write_gguf(tmp_path / "file.gguf", architecture, model)
    check_logits(tmp_path, model, monkeypatch)


@needs_llama_cpp
@pytest.mark.parametrize("architecture", MODELS)
def test_llama_cpp_reads_these_files_in_the_same_way(architecture: str, tmp_path: Path) -> None:
    """It gives the greedy tokens of transformers, or one with almost the same logit: its GELU is rounded to float16."""
    tiny, tokens = MODELS[architecture], prompt(40, seed=1)
    model = make_tiny_model(tmp_path / "made", tiny.family, **tiny.settings)
    names = (*sorted(byte_level_alphabet()), "ab", "<|endoftext|>")
    write_gguf(tmp_path / "file.gguf", architecture, model, tokens=names)
    answer = ask_llama_cpp(tmp_path / "file.gguf", continues=tokens)["text"]
    assert len(answer["tokens"]) == 16
    for token in answer["tokens"]:
        logits = expected_logits(model, tokens)[-1]
        logits[len(names) - 1] = -math.inf  # it was told not to end
        assert float(logits.max() - logits[token]) < 0.05
        tokens = [*tokens, token]


def check_logits(
    path: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None
) -> None:
    """Check that `folder`, by default made from path/file.gguf, gives the logits of transformers' `model`."""
    if folder is None:
        folder = path / "folder"
        folder.mkdir()
        lay_down(path / "file.gguf", folder, {})
    runner, tokens = make_runner(folder, implementation="native", kv="f32", max_sequence_length=256), prompt(40, seed=1)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 40)])
    wanted = expected_logits(model, tokens)[-1:]
    assert float((recorder.logits[-1] - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN_KEYS: dict[str, str | float] = {
    Keys.Rope.SCALING_TYPE: "yarn",
    Keys.Rope.SCALING_FACTOR: 4.0,
    Keys.Rope.SCALING_ORIG_CTX_LEN: 128,
}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({Keys.Rope.SCALING_TYPE: "linear", Keys.Rope.SCALING_FACTOR: 4.0}, LINEAR),
        ({Keys.Rope.SCALING_FACTOR: 4.0}, LINEAR),
        # The key in older files, which the package no longer defines.
        ({"{arch}.rope.scale_linear": 4.0}, LINEAR),
        ({Keys.Rope.SCALING_TYPE: "none", Keys.Rope.SCALING_FACTOR: 4.0}, {}),
        ({Keys.Rope.DIMENSION_COUNT: 16, Keys.Rope.SCALING_ATTN_FACTOR: 1.0}, {}),
        (YARN_KEYS, YARN),
        ({**YARN_KEYS, Keys.Rope.SCALING_YARN_BETA_FAST: 8.0, Keys.Rope.SCALING_YARN_BETA_SLOW: 4.0},
         {**YARN, "beta_fast": 8.0, "beta_slow": 4.0}),
        # The first key multiplies the factor that follows from the scale; the second key sets the factor itself.
        ({**YARN_KEYS, Keys.Rope.SCALING_ATTN_FACTOR: 1.5},
         {**YARN, "attention_factor": 1.5 * (0.1 * math.log(4) + 1)}),
        ({**YARN_KEYS, Keys.Rope.SCALING_YARN_ATTN_FACTOR: 1.5}, {**YARN, "attention_factor": 1.5}),
        ({**YARN_KEYS, Keys.Rope.SCALING_YARN_EXT_FACTOR: 1.0}, YARN),
        ({Keys.Rope.SCALING_FACTOR: 4.0, Keys.Rope.SCALING_YARN_EXT_FACTOR: -1.0}, LINEAR),
    ],
)  # fmt: skip
def test_the_scaling_of_rotary_frequencies(
    keys: dict[str, str | float], wanted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500.0, **wanted}
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True, rope_parameters=parameters)
    write_gguf(tmp_path / "file.gguf", "qwen2", model, keys)
    check_logits(tmp_path, model, monkeypatch)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({Keys.Rope.DIMENSION_COUNT: 8}, r"qwen2\.rope\.dimension_count 8 is not supported; must be 16, a whole head"),
        (
            {Keys.Rope.SCALING_FACTOR: 4.0, Keys.Rope.SCALING_ATTN_FACTOR: 1.5},
            r"attn_factor 1\.5 is supported only with yarn",
        ),
        (
            {**YARN_KEYS, Keys.Rope.SCALING_YARN_EXT_FACTOR: 0.5},
            r"yarn_ext_factor 0\.5 is not supported with yarn; must be 1",
        ),
        (
            {Keys.Rope.SCALING_FACTOR: 4.0, Keys.Rope.SCALING_YARN_EXT_FACTOR: 1.0},
            r"yarn_ext_factor 1 is not supported with linear; must be 0",
        ),
        ({Keys.Split.LLM_KV_SPLIT_COUNT: 3}, r"is part 0 of 3 by its keys .* must be named NAME-00001-of-00003\.gguf"),
        ({Keys.LLM.EXPERT_COUNT: 8}, r"qwen2\.expert_count 8 is not supported"),
        ({Keys.Rope.SCALING_TYPE: "longrope"}, "rope scaling 'longrope' is not known"),
        ({Keys.Rope.SCALING_TYPE: "yarn"}, r"lacks qwen2\.rope\.scaling\.factor"),
        ({Keys.Rope.SCALING_FACTOR: "4"}, r"qwen2\.rope\.scaling\.factor must be a number; got '4'"),
    ],
)
def test_other_settings_are_refused(keys: dict[str, str | float], message: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "made", "Qwen2", tie_word_embeddings=True)
    write_gguf(tmp_path / "file.gguf", "qwen2", model, keys)
    (tmp_path / "folder").mkdir()
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        lay_down(tmp_path / "file.gguf", tmp_path / "folder", {})


def test_every_family_that_reads_gguf_is_tested(tmp_path: Path) -> None:
    read = {family.title for family in FAMILIES if family.reads_gguf}
    made = {getattr(transformers, f"{tiny.family}Config").model_type for tiny in MODELS.values()}
    assert read == {family_of(model_type).title for model_type in made}


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.Q8_0])
def test_each_expert_of_a_quantized_tensor_is_read_in_its_format(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).normal(size=(4, 96, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "gpt-oss")
    writer.add_tensor("blk.1.ffn_gate_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile([tmp_path / "file.gguf"], separate_experts(family_of("gpt_oss").names), None)
    wanted = gguf.quants.dequantize(blocks, kind)
    names = [f"model.layers.1.mlp.experts.{i}.gate_proj.weight" for i in range(4)]
    assert file.names() == names
    for name, values_of in zip(names, wanted, strict=True):
        weight = file.matrix(name)
        assert (weight.format, weight.shape) == ("mxfp4" if kind.name == "MXFP4" else "q8", (96, 64))
        assert np.array_equal(weight.dense().numpy(), values_of)
    assert not file.has("model.layers.0.mlp.experts.0.gate_proj.weight")
