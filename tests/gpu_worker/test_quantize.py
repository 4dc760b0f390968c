"""Quantizing a model folder writes a checkpoint from which compressed-tensors reads the same values."""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from gpu_worker import quantize
from gpu_worker.models.families import describe
from gpu_worker.models.images import ImageEncoder
from gpu_worker.models.weights.decoder_weights import open_weights
from gpu_worker.quantize import quantize_folder, types_of
from midstream.cli import prepare
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.test_classifiers import make_classifier
from tests.gpu_worker.test_models import TOLERANCE, Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model
from tests.gpu_worker.vision_model import PATCH, image_processor, make_vision_model, picture


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_the_library_reads_what_we_write(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "source", "Qwen2")
    monkeypatch.setattr(quantize, "_SHARD_BYTES", 20_000)  # so that the checkpoint has several files
    assert quantize_folder(open_model_folder(str(tmp_path / "source")), tmp_path / "made", weights) == 3 * 7
    made = open_model_folder(str(tmp_path / "made"))
    assert len(made.weight_files) > 1
    settings = QuantizationConfig.model_validate(made.config["quantization_config"])
    assert set(settings.ignore) == {"lm_head", "model.embed_tokens"}
    scheme = settings.config_groups["group_0"]
    before = load_file(tmp_path / "source/model.safetensors")
    after = {name: tensor for file in made.weight_files for name, tensor in load_file(file).items()}
    ours = open_weights(made, describe(made.config))
    for name, original in before.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in after:
            assert torch.equal(after[name], original)
            continue
        scale = after[f"{module}.weight_scale"].float()
        if weights == "int4":
            parts = {part: after[f"{module}.{part}"] for part in ("weight_packed", "weight_shape", "weight_zero_point")}
            values = PackedQuantizationCompressor.decompress({**parts, "weight_scale": scale}, scheme)["weight"]
        else:
            values = dequantize(after[name], scale, torch.zeros_like(scale, dtype=torch.int8), scheme.weights)
        torch.testing.assert_close(ours.matrix(name).dense(), values, rtol=1e-6, atol=1e-7)
        # The error is half a quantization step, or more at the ends of a group because the zero point is rounded.
        step = scale.repeat_interleave(original.shape[1] // scale.shape[1], dim=1)
        assert bool(((values - original).abs() <= step * (1.01 if weights == "int4" else 0.51)).all())


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_position_tables_and_transposed_matrices_are_left_alone(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 stores the matrices of its layers as [inputs, outputs], so a row would be an input, and a group would
    consist of outputs.
    """
    model = make_tiny_model(tmp_path / "source", "GPT2")
    assert quantize_folder(open_model_folder(str(tmp_path / "source")), tmp_path / "made", weights) == 0
    runner, tokens = make_runner(tmp_path / "made", kv="f32", activations="f32"), prompt(30, seed=1)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 30)])
    wanted = expected_logits(model, tokens)[-1:]
    assert float((recorder.logits[-1] - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


# How mistral3's processor is called, as in image_families.py: squares of four patches become one embedding.
@pytest.mark.parametrize(
    ("case", "options"), [("idefics3", {}), ("smolvlm", {}), ("mistral3", {"patch_size": 2 * PATCH})]
)
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_vision_encoders_are_left_alone(case: str, options: dict[str, int], weights: str, tmp_path: Path) -> None:
    model, _ = make_vision_model(tmp_path / "source", case)
    # The language model has two layers.
    assert quantize_folder(open_model_folder(str(tmp_path / "source")), tmp_path / "made", weights) == 2 * 7
    image, data = picture(20, 30)
    with closing(
        ImageEncoder(open_model_folder(str(tmp_path / "made")), torch.device("cpu"), torch.float32)
    ) as encoder:
        found = encoder.encode(data).embeddings
    inputs = image_processor(case)(images=[image], return_tensors="pt", **options)
    with torch.inference_mode():
        (wanted,) = model.get_image_features(**inputs).pooler_output
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_heads_of_classifiers_are_left_alone(weights: str, tmp_path: Path) -> None:
    make_classifier(tmp_path / "source", "Llama", 3)
    assert quantize_folder(open_model_folder(str(tmp_path / "source")), tmp_path / "made", weights) == 3 * 7
    score = load_file(tmp_path / "made/model.safetensors")["score.weight"]
    assert torch.equal(score, load_file(tmp_path / "source/model.safetensors")["score.weight"])


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "source", "Llama")
    source = open_model_folder(str(tmp_path / "source"))
    quantize_folder(source, tmp_path / "made", "int8")
    with pytest.raises(ConfigError, match="made already exists"):
        quantize_folder(source, tmp_path / "made", "int4")
    with pytest.raises(UnsupportedError, match="already quantized"):
        quantize_folder(open_model_folder(str(tmp_path / "made")), tmp_path / "again", "int4")
    assert not (tmp_path / "again").exists()


def test_every_tensor_of_a_gguf_file_has_its_name() -> None:
    folder = open_model_folder("smollm2")
    file = open_weights(folder, describe(folder.config))
    names = file.names()
    assert len(names) == 2 + 30 * 9
    assert file.shape("model.layers.7.mlp.down_proj.weight") == (576, 1536)
    assert all(file.has(name) and not name.startswith(("blk", "token", "output")) for name in names)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(tmp_path / "source", "Llama")
    shutil.copy(open_model_folder("smollm2").path / "tokenizer.json", tmp_path / "source")
    (tmp_path / "text").write_text("short")
    arguments = argparse.Namespace(
        source=str(tmp_path / "source"), output=tmp_path / "made", weights="int4", text=tmp_path / "text"
    )
    assert prepare.run(arguments) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "quantized 21 matrices to int4" in output
    assert "too short" in output
    assert json.loads((tmp_path / "made/config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    arguments.output = None
    with pytest.raises(ConfigError, match="--weights requires --output"):
        prepare.run(arguments)


def test_the_types_of_a_quantized_gguf_file_are_reported(tmp_path: Path) -> None:
    assert types_of(open_model_folder("smollm2")) == ["Q4_1", "Q8_0"]
    make_tiny_model(tmp_path / "source", "Llama")
    assert types_of(open_model_folder(str(tmp_path / "source"))) == []
