"""Unsupported quantized checkpoints are rejected by name, and never read as unquantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.weights.files import SafetensorsFiles
from gpu_worker.models.weights.quantized import read_scheme
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, "Llama")
    return tmp_path


def set_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes'; supported are awq, comp"),
        ({"quant_algo": "W4A8_AWQ"}, "'modelopt W4A8_AWQ'"),
        ({"bits": 3}, "'unknown'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "float8 type 'e5m2'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}}, "settings for single modules"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "GPTQ in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "groups of 16 weights"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the layout 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "AWQ in the layout 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "AWQ in the layout 'llm-awq'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"config_groups": {}}},
         "transform_config"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_unknown_quantization_settings_are_named(folder: Path, settings: dict[str, Any], named: str) -> None:
    set_config(folder, quantization_config=settings)
    with pytest.raises(UnsupportedError, match=rf"{named}.*; use the checkpoint in bfloat16.*--weights int8") as raised:
        make_runner(folder)
    assert raised.value.field == "model"


def test_the_type_of_packed_words_is_named(folder: Path) -> None:
    set_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"})
    with pytest.raises(UnsupportedError, match=r"GPTQ packed into int16 \(pack_dtype\); only int32 is supported"):
        make_runner(folder)


@pytest.mark.parametrize("place", ["compression_config", "text_config.quantization_config"])
def test_the_source_of_a_setting_is_named(folder: Path, place: str) -> None:
    settings: dict[str, Any] = {"quant_method": "sparseml"}
    for name in reversed(place.split(".")):
        settings = {name: settings}
    set_config(folder, **settings)
    with pytest.raises(UnsupportedError, match=rf"{place} of config\.json has the method 'sparseml'"):
        read_scheme(open_model_folder(str(folder)))


def test_damaged_settings_are_named(folder: Path) -> None:
    set_config(folder, quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]})
    with pytest.raises(ConfigError, match=r"quantization_config of config\.json is damaged"):
        make_runner(folder)


@pytest.mark.parametrize(
    ("file", "settings", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM", "zero_point": True}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
    ],
)
def test_settings_are_read_from_files_of_their_own(
    folder: Path, file: str, settings: dict[str, Any], method: str
) -> None:
    (folder / file).write_text(json.dumps(settings))
    scheme = read_scheme(open_model_folder(str(folder)))
    assert scheme is not None
    assert scheme.method == method


def test_models_of_transformers_code_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Olmo")
    set_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedError, match="olmo does not run natively, so its 'gptq' weights are not supported"):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "shown"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8")]
)
def test_a_quantized_weight_is_named_even_without_a_configuration(folder: Path, dtype: torch.dtype, shown: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name)
    save_file(tensors | {name: tensors[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedError, match=rf"the tensor {name} in model\.safetensors is of type {shown}, but config"
    ):
        make_runner(folder)


def test_a_float8_tensor_is_never_read_as_values(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"a\.weight has type torch\.float8_e4m3fn"):
        SafetensorsFiles([tmp_path / "a.safetensors"]).matrix("a.weight")


def test_integer_tensors_that_are_no_weights_do_no_harm(tmp_path: Path) -> None:
    """Older checkpoints contain causal masks and position tables."""
    make_tiny_model(tmp_path, "GPTNeoX")
    file = tmp_path / "model.safetensors"
    masks = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    save_file(load_file(file) | masks, file, metadata={"format": "pt"})
    make_runner(tmp_path)
