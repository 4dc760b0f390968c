"""Native implementations of each family as tiny random models, compared with transformers, with C++ and PyTorch
kernels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.decoder import ForwardInputs, Probe, TorchDecoder
from gpu_worker.models.families import describe
from gpu_worker.models.loader import load_model
from gpu_worker.models.native import CpuDecoder
from gpu_worker.parallel.leader import LeadingDecoder
from kernels.cpu import Draws
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import SHAPE, Driver, ints, make_runner, make_tiny_model

# Logits here are about 10, where float32 values are 1e-6 apart, and they result from some hundred rounded operations.
TOLERANCE = 2e-4


class Recorder:
    """Records the logits of each forward pass, and checks that tokens that the CPU kernels choose greedily are the
    argmax of the logits.
    """

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[Tensor] = []
        decoder = runner.model.decoder
        forward = decoder.forward

        def record(inputs: ForwardInputs, probe: Probe | None = None) -> Tensor:
            self.logits.append(forward(inputs, probe).clone())
            return self.logits[-1]

        monkeypatch.setattr(decoder, "forward", record)
        if runner.num_micro_batches > 1:
            assert isinstance(decoder, LeadingDecoder)
            end = decoder.end

            def record_end() -> Tensor:
                self.logits.append(end().clone())
                return self.logits[-1]

            monkeypatch.setattr(decoder, "end", record_end)
        if isinstance(decoder, CpuDecoder):
            choose = decoder.choose

            def check(inputs: ForwardInputs, draws: Draws | None = None) -> tuple[Tensor, Tensor] | None:
                chosen = choose(inputs, draws)
                if chosen is not None:
                    logits = record(inputs)
                    assert draws is not None or torch.equal(chosen[0], logits.argmax(dim=1).int())
                    assert torch.equal(chosen[1], logits.amax(dim=1))
                return chosen

            monkeypatch.setattr(decoder, "choose", check)


def expected_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], length).tolist()  # type: ignore[no-any-return]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_logits_equal_transformers(
    family: tuple[torch.nn.Module, Path], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has whole and chunked prefills, decodes during a prefill, and a shared prefix."""
    model, folder = family
    if kernels == "native" and describe(open_model_folder(str(folder)).config).has_mlp_bias:
        kernels = "auto"
    runner = make_runner(folder, kernels=kernels)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    first, second = prompt(70, seed=1), prompt(45, seed=2)
    driver.step([driver.sequence(0, first)], [(0, 0, 70)])
    driver.step([driver.sequence(1, second)], [(1, 0, 19)], generation=[0])
    driver.step([], [(1, 19, 26)], generation=[0])
    third = first[:48] + prompt(9, seed=3)
    driver.step([driver.sequence(2, third, shared_blocks=driver.blocks[0][:3])], [(2, 48, 9)], generation=[0, 1])
    driver.step(generation=[0, 1, 2])

    whole = {row: expected_logits(model, driver.tokens[row]) for row in (0, 1, 2)}
    sampled = [[(0, 69)], [(0, 70)], [(1, 44), (0, 71)], [(2, 56), (0, 72), (1, 45)], [(0, 73), (1, 46), (2, 57)]]
    for logits, places in zip(recorder.logits, sampled, strict=True):
        wanted = torch.stack([whole[row][position] for row, position in places])
        assert float((logits - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rope_scaling_equals_transformers(
    rope: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path, "Llama", rope_parameters={**rope, "rope_theta": 500.0})
    runner = make_runner(tmp_path)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    tokens = prompt(200)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 200)])
    wanted = expected_logits(model, tokens)[-1:]
    assert float((recorder.logits[0] - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_sharded_weights_load(tmp_path: Path, tiny_folder: Path, tiny_runner: ModelRunner) -> None:
    model = make_tiny_model(tmp_path / "whole", "Llama")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")  # type: ignore[operator]
    (tmp_path / "sharded" / "tokenizer.json").write_text("{}")
    assert len(open_model_folder(str(tmp_path / "sharded")).weight_files) > 1
    runner = make_runner(tmp_path / "sharded")
    assert Driver(runner).run_alone(prompt(20), 8) == Driver(tiny_runner).run_alone(prompt(20), 8)


@pytest.mark.parametrize("weights", ["bf16", "int8", "q4"])
def test_both_kinds_of_kernels_agree_on_each_weight_format(
    weights: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, logits = prompt(40), []
    for kernels, kind in (("native", CpuDecoder), ("torch", TorchDecoder)):
        runner = make_runner(tiny_folder, weights=weights, kernels=kernels, activations="f32")
        assert isinstance(runner.model.decoder, kind)
        driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
        driver.step([driver.sequence(0, tokens)], [(0, 0, 40)])
        logits.append(recorder.logits[0])
    assert float((logits[0] - logits[1]).abs().max()) <= TOLERANCE * float(logits[1].abs().max())


def test_a_bfloat16_cache_is_close_to_float32(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logits = prompt(40), []
    for kv, kernels in (("f32", "native"), ("bf16", "native"), ("bf16", "torch")):
        runner = make_runner(tiny_folder, kv=kv, kernels=kernels)
        driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
        driver.step([driver.sequence(0, tokens)], [(0, 0, 40)])
        logits.append(recorder.logits[0])
    scale = float(logits[0].abs().max())
    assert 0 < float((logits[1] - logits[0]).abs().max()) <= 0.05 * scale
    assert float((logits[2] - logits[1]).abs().max()) <= 0.05 * scale


def test_a_model_with_another_head_is_refused_by_name(tiny_folder: Path) -> None:
    folder = open_model_folder(str(tiny_folder))
    folder = replace(folder, config=folder.config | {"architectures": ["LlamaForTokenClassification"]})
    with pytest.raises(UnsupportedError, match="LlamaForTokenClassification"):
        load_model(WorkerConfig(), folder)


def test_an_unknown_architecture_is_named(tiny_folder: Path) -> None:
    config = open_model_folder(str(tiny_folder)).config
    with pytest.raises(UnsupportedError, match="'persimmon'"):
        describe(config | {"model_type": "persimmon"})
    with pytest.raises(UnsupportedError, match="'quick_gelu'"):
        describe(config | {"hidden_act": "quick_gelu"})
    with pytest.raises(ConfigError, match="intermediate_size"):
        describe(config | {"intermediate_size": None})


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight is \(96, 64\); must be \(100, 64\)"):
        make_runner(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        make_runner(tmp_path)


def test_the_pool_is_limited_by_tokens_and_by_use(tiny_folder: Path) -> None:
    assert make_runner(tiny_folder, max_kv_tokens=100).kv.num_blocks == 6
    assert make_runner(tiny_folder, max_kv_tokens=0, max_batch_size=3).kv.num_blocks == 3 * 512 // 16
    with pytest.raises(ConfigError, match="max_kv_tokens"):
        make_runner(tiny_folder, max_kv_tokens=10)


def test_copied_blocks_are_equal_in_all_layers(tiny_runner: ModelRunner) -> None:
    driver = Driver(tiny_runner)
    driver.step([driver.sequence(0, prompt(32))], [(0, 0, 32)])
    source = driver.blocks[0][:2]
    driver.step(copy_sources=ints(source), copy_targets=ints([0, 1]))
    assert torch.equal(tiny_runner.kv.keys[:, [0, 1]], tiny_runner.kv.keys[:, source])
    assert torch.equal(tiny_runner.kv.values[:, [0, 1]], tiny_runner.kv.values[:, source])
    assert bool((tiny_runner.kv.keys[:, 0] != 0).any())
