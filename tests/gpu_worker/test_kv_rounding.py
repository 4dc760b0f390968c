"""Checkpoints with scales of a KV cache give the logits of transformers with compressed-tensors, which rounds keys and
values by these scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker.kind import arithmetic
from kernels.kv_rounding import KvRounding
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

NUM_LAYERS = 2
# A key or value that is almost between two steps may be rounded to the other one; rounding itself changes more
# than five times as much.
TOLERANCE, EFFECT = 4e-3, 2e-2
SCALES = {"float": 0.02, "int": 0.05}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_tiny_model(folder, "Qwen3", num_hidden_layers=NUM_LAYERS)
    return folder


def with_scales(plain: Path, folder: Path, names: tuple[str, str], scales: list[float], settings: Any) -> Path:
    """Write the model with scales, layer by layer, and quantization settings."""
    tensors = load_file(plain / "model.safetensors")
    for layer in range(NUM_LAYERS):
        for name in names:
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scales)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def compressed(kind: str, num_bits: int = 8) -> dict[str, Any]:
    scheme = {"num_bits": num_bits, "type": kind, "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }


OWN_NAMES = ("k_scale", "v_scale")
PROJECTION_NAMES = ("k_proj.k_scale", "v_proj.v_scale")  # ModelOpt's


def logits_of(folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tensor:
    """Return the last logits, of a prefill in two steps."""
    runner = make_runner(folder, activations="f32", **settings)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 17)])
    driver.step([], [(0, 17, len(tokens) - 17)])
    runner.close()
    return recorder.logits[-1][0]


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_keys_and_values_are_rounded_as_the_checkpoint_says(
    plain: Path, kind: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_scales(plain, tmp_path, OWN_NAMES, [SCALES[kind]], compressed(kind))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = prompt(40, seed=3)
    wanted = expected_logits(model, tokens)[-1]
    found = logits_of(folder, tokens, monkeypatch, kernels=kernels)
    assert difference(found, wanted) <= TOLERANCE
    # A type that is chosen is used instead.
    without = logits_of(folder, tokens, monkeypatch, kernels=kernels, kv="f32")
    assert torch.equal(without, logits_of(plain, tokens, monkeypatch, kernels=kernels, kv="f32"))
    assert difference(without, wanted) >= EFFECT


def test_scales_within_the_projections_are_the_same(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelOpt writes them there, for a cache in float8."""
    scales, tokens = [SCALES["float"]], prompt(30, seed=4)
    settings = {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    found = []
    for names, own in ((OWN_NAMES, compressed("float")), (PROJECTION_NAMES, settings)):
        folder = tmp_path / names[0]
        folder.mkdir()
        found.append(logits_of(with_scales(plain, folder, names, scales, own), tokens, monkeypatch))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", SCALES)
def test_every_value_is_rounded_as_by_the_library(kind: str) -> None:
    """Including ties, values between zero and the smallest step, and values beyond the largest."""
    exact = torch.arange(-512, 513) / 16
    values = torch.cat((exact, exact * 2**-12, torch.randn(1000) * 3, torch.tensor([1e9, -1e9, 0.0])))
    for scale in (1.0, 0.25, 0.013):
        args = QuantizationArgs(num_bits=8, type=kind, strategy="tensor", symmetric=True)
        wanted = fake_quantize(values, torch.tensor([scale]), None, args)
        assert torch.equal(KvRounding(scale, 1.0, kind == "int").keys(values), wanted)


def test_workers_that_round_are_of_another_kind(plain: Path, tmp_path: Path) -> None:
    folder = with_scales(plain, tmp_path, OWN_NAMES, [0.02], compressed("float"))
    kinds = []
    for kv in ("auto", "int16"):
        runner = make_runner(folder, kv=kv)
        kinds.append(arithmetic(WorkerConfig(device="cpu", kv=kv), runner.model))
        runner.close()
    assert [kind["kv"] for kind in kinds] == ["int16 rounded", "int16"]


@pytest.mark.parametrize(
    ("names", "scales", "num_bits", "error", "message"),
    [
        (("k_scale",), [0.1], 8, ConfigError, "k_scale, but not the other scale"),
        (OWN_NAMES, [0.1, 0.2], 8, UnsupportedError, "each be one positive number"),
        (OWN_NAMES, [0.0], 8, UnsupportedError, "each be one positive number"),
        (OWN_NAMES, [0.1], 4, UnsupportedError, "kv_cache_scheme of 4 bits"),
    ],
)
def test_other_scales_are_refused(
    plain: Path, names: Any, scales: list[float], num_bits: int, error: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = with_scales(plain, tmp_path, names, scales, compressed("float", num_bits))
    with pytest.raises(error, match=message):
        make_runner(folder)
    assert open_model_folder(str(folder)).has_head
