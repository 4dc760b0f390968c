"""Checkpoints that are quantized: refused by name when they are loaded, never read as if they were not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.weights.files import SafetensorsFiles
from midstream.errors import ConfigError, UnsupportedError
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model


@pytest.fixture(params=["Llama", "GPTNeoX"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of our own code, and one of transformers'."""
    make_tiny_model(tmp_path, request.param)
    return tmp_path


def set_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "'fp8'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "'bitsandbytes'"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "'NVFP4'"),
        ({"quantization_config": {"bits": 3}}, "'unknown'"),
        ({"compression_config": {"quant_method": "sparseml"}}, "compression_config of config.json says 'sparseml'"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "text_config.quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_method_of_the_configuration_is_named(folder: Path, settings: dict[str, Any], named: str) -> None:
    set_config(folder, **settings)
    with pytest.raises(UnsupportedError, match=rf"{named}.*; use the checkpoint in bfloat16.*--weights int8") as raised:
        make_runner(folder)
    assert raised.value.field == "model"


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_settings_in_a_file_of_their_own_are_named(folder: Path, file: str) -> None:
    (folder / file).write_text("{}")
    with pytest.raises(UnsupportedError, match=file):
        make_runner(folder)


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")]
)
def test_a_weight_of_fewer_bits_is_named_though_the_configuration_says_nothing(
    folder: Path, dtype: torch.dtype, shown: str
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)
    save_file(tensors | {name: tensors[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=rf"the tensor {name} in model\.safetensors is of type {shown}"):
        make_runner(folder)


def test_a_float8_tensor_is_never_read_as_values(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"a\.weight has type torch\.float8_e4m3fn"):
        SafetensorsFiles([tmp_path / "a.safetensors"]).matrix("a.weight")


def test_integer_tensors_that_are_no_weights_do_no_harm(tmp_path: Path) -> None:
    """Older checkpoints hold causal masks and positions."""
    make_tiny_model(tmp_path, "GPTNeoX")
    file = tmp_path / "model.safetensors"
    masks = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    save_file(load_file(file) | masks, file, metadata={"format": "pt"})
    make_runner(tmp_path)
