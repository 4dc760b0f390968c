"""Quantized checkpoints, computed in their own formats and compared with the libraries that define the formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu_worker.models.families import describe
from gpu_worker.models.layers.linear import Linear
from gpu_worker.models.weights.decoder_weights import DecoderWeights
from gpu_worker.models.weights.files import SafetensorsFiles
from gpu_worker.models.weights.quantized import read_scheme
from gpu_worker.models.weights.schemes import Scheme
from gpu_worker.models.weights.weight import Weight
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.shard import shard_of
from gpu_worker.parallel.shard_weights import ShardWeights
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.folder import open_model_folder
from tests.gpu_worker.adapters import ALL_MODULES, adapted, make_lora, ref_of
from tests.gpu_worker.quantized_models import SCHEMES, quantize_model
from tests.gpu_worker.test_models import TOLERANCE, Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import Driver, make_runner, make_tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}

FORMATS = {
    "gptq": "int4", "gptq-order": "int4", "gptq-v2": "int4", "gptq-8": "affine8", "awq": "int4", "w4a16": "int4",
    "w4a16-asym": "int4", "w4a16-rows": "int4", "w8a16": "affine8", "w8a8": "int8_rows", "w8a8-fp8": "fp8",
    "w8-order": "affine8", "w8-order-asym": "affine8", "fp8-order": "fp8",
    "mxfp4": "mxfp4", "mxfp8": "fp8", "nvfp4": "bf16", "nvfp4-modelopt": "bf16", "fp8": "fp8", "fp8-blocks": "fp8",
}  # fmt: skip


def read(folder: Path, name: str) -> Weight:
    opened = open_model_folder(str(folder))
    return SafetensorsFiles(opened.weight_files, read_scheme(opened)).matrix(name)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_stands_for_what_its_definition_says(name: str, tmp_path: Path) -> None:
    quantize, settings = SCHEMES[name]
    weight = torch.randn(136, 192) * torch.logspace(-2, 0, 192)
    tensors, expected = quantize(weight)
    file = tmp_path / "a.safetensors"
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in tensors.items()}, file)
    block = {"block": [128, 128]} if name == "fp8-blocks" else {}
    found = SafetensorsFiles([file], Scheme(settings["quant_method"], {**settings, **block})).matrix("a.weight")
    assert found.format == FORMATS[name]
    # The product of the scale and the level is rounded, and the contribution of the zero point is rounded once more.
    error = (found.dense().double() - expected.double()).abs()
    assert bool((error <= 3e-7 * expected.double().abs() + 3e-7 * float(weight.abs().max())).all())


@pytest.mark.parametrize("num_bits", [4, 8])
def test_zero_points_of_zero_borrow_from_the_next_ones(num_bits: int, tmp_path: Path) -> None:
    """GPTQModel converts zero points to the first version of the format by subtracting from packed words."""
    shifts = torch.arange(0, 32, num_bits)
    zero = torch.randint(0, 3, (4, len(shifts)))
    tensors = {
        "qweight": torch.zeros(4 * 32 * num_bits // 32, len(shifts), dtype=torch.int32),
        "qzeros": ((zero << shifts).sum(1, keepdim=True) - int((1 << shifts).sum())).int(),
        "scales": torch.ones(4, len(shifts), dtype=torch.float16),
    }
    save_file({f"a.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    found = SafetensorsFiles([tmp_path / "a.safetensors"], Scheme("gptq", {"bits": num_bits})).matrix("a.weight")
    assert torch.equal(found.dense(), -zero.t().float().repeat_interleave(32, dim=1))


@pytest.mark.parametrize("shape", [(1, 192), (1, 320), (2, 192), (1, 128)])
def test_blocks_may_end_before_their_last_row_and_column(shape: tuple[int, int], tmp_path: Path) -> None:
    quantize, settings = SCHEMES["fp8-blocks"]
    tensors, expected = quantize(torch.randn(shape) * torch.logspace(-2, 0, shape[1]))
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    scheme = Scheme("fp8", {**settings, "block": [128, 128]})
    found = SafetensorsFiles([tmp_path / "a.safetensors"], scheme).matrix("a.weight")
    assert torch.equal(found.dense(), expected)


@pytest.mark.parametrize(("strategy", "num_rows"), [("tensor", 5), ("tensor", 1), ("block", 64), ("block", 3)])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_packed_weights_may_have_zero_points_for_the_whole_tensor_or_for_blocks(
    strategy: str, num_rows: int, num_bits: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"block_structure": [32, 32]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=num_bits, type="int", strategy=strategy, symmetric=False, **settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shape = (-(-num_rows // 32), 3) if strategy == "block" else (1,)
    zero = torch.randint(-3, 3, shape, dtype=torch.int8)
    state = {
        "weight": torch.randn(num_rows, 96), "weight_scale": torch.rand(shape) + 0.1, "weight_zero_point": zero,
    }  # fmt: skip
    tensors = PackedQuantizationCompressor.compress(state, scheme)
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    block = {"block": [32, 32]} if settings else {}
    found = SafetensorsFiles([tmp_path / "a.safetensors"], Scheme("compressed-tensors", block)).matrix("a.weight")
    expected = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert float((found.dense() - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[torch.nn.Module, Path]]:
    """Return a function that creates a tiny model with a quantization scheme, once per scheme."""
    made: dict[str, tuple[torch.nn.Module, Path]] = {}

    def make(name: str) -> tuple[torch.nn.Module, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            # Alternate between Mistral, which has tied heads and no biases here, and Qwen2, which has biases.
            family = "Qwen2" if len(made) % 2 else "Mistral"
            model = make_tiny_model(folder, family, **SIZES, tie_word_embeddings=family == "Mistral")
            quantize_model(folder, model, name)
            made[name] = model, folder
        return made[name]

    return make


def logits_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[int], Tensor]:
    """Run a two-chunk prefill and two decode steps; return the sampled tokens and the logits of the last three
    steps.
    """
    runner = make_runner(folder, **settings)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    tokens = prompt(40, seed=4)
    driver.step([driver.sequence(0, tokens)], [(0, 0, 19)])
    driver.step([], [(0, 19, 21)])
    driver.step(generation=[0])
    driver.step(generation=[0])
    return driver.tokens[0], torch.cat(recorder.logits[-3:])


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_values(
    name: str, quantized: Callable[[str], tuple[torch.nn.Module, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = quantized(name)
    for settings in ({"activations": "f32", "kv": "f32"}, {}):
        tokens, logits = logits_of(folder, monkeypatch, kernels="native", **settings)
        wanted = expected_logits(model, tokens)[39:42]
        # With the default settings, 16-bit activations and cache, the results are less accurate.
        assert float((logits - wanted).abs().max()) <= (TOLERANCE if settings else 1e-3) * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["gptq-order", "w8a8", "fp8-blocks"])
def test_logits_without_our_kernels(
    name: str, quantized: Callable[[str], tuple[torch.nn.Module, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = quantized(name)
    tokens, logits = logits_of(folder, monkeypatch, kernels="torch")
    wanted = expected_logits(model, tokens)[39:42]
    assert float((logits - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


def test_adapters_add_to_parts_of_other_orders(
    quantized: Callable[[str], tuple[torch.nn.Module, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input columns of q, k and v may be stored in different orders."""
    model, folder = quantized("gptq-order")
    make_lora(model, tmp_path / "lora", 1, r=4, lora_alpha=8, target_modules=ALL_MODULES)
    runner = make_runner(folder, kernels="native", activations="f32", kv="f32")
    assert runner.model.decoder._layers[0].qkv.struct.next  # type: ignore[attr-defined]
    driver, recorder, tokens = Driver(runner), Recorder(runner, monkeypatch), prompt(30, seed=5)
    driver.step([replace(driver.sequence(0, tokens), lora=ref_of(runner, tmp_path / "lora"))], [(0, 0, 30)])
    with adapted(model, tmp_path / "lora") as made, torch.no_grad():
        wanted = made(torch.tensor([tokens])).logits[0, -1]
    assert float((recorder.logits[-1] - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


def test_experts_of_gpt_oss_are_computed_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor contains the codes of all experts and another their exponents, with gate and up interleaved. The
    reference is transformers.
    """
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 24}
    model = make_tiny_model(tmp_path, "GptOss", hidden_size=64, intermediate_size=96, num_hidden_layers=2, **experts)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters, generator = dict(model.named_parameters()), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_columns, num_rows = tensors.pop(name).shape
        groups = (num_experts, num_rows, num_columns // 32)
        blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 125, groups, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_alone}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for settings in ({"kernels": "native"}, {"kernels": "torch"}):
        tokens, logits = logits_of(tmp_path, monkeypatch, activations="f32", kv="f32", **settings)
        wanted = expected_logits(model, tokens)[39:42]
        assert float((logits - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())
    opened = open_model_folder(str(tmp_path))
    layer, _ = DecoderWeights(opened, describe(opened.config), "auto").layers()
    assert layer.mixture is not None
    assert {expert.gate_up.weight.format for expert in layer.mixture.experts} == {"mxfp4"}


def test_modules_excluded_from_quantization_are_read_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path, "Llama", **SIZES)
    quantize_model(tmp_path, model, "w4a16", left_alone="down_proj")
    assert read(tmp_path, "model.layers.0.mlp.down_proj.weight").format == "f32"
    assert read(tmp_path, "lm_head.weight").format == "int4"
    tokens, logits = logits_of(tmp_path, monkeypatch, kernels="native", activations="f32", kv="f32")
    wanted = expected_logits(model, tokens)[39:42]
    assert float((logits - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["gptq-order", "awq", "mxfp4", "w8a8"])
def test_the_shards_of_ranks_equal_parts_of_the_whole(
    name: str, quantized: Callable[[str], tuple[torch.nn.Module, Path]]
) -> None:
    folder = open_model_folder(str(quantized(name)[1]))
    description = describe(folder.config)
    whole = DecoderWeights(folder, description, "auto")
    expected = next(whole.layers())
    parts = [
        next(ShardWeights(whole, shard_of(description, Ranks(rank=rank, world_size=2, tensor_size=2))).layers())
        for rank in (0, 1)
    ]
    outputs = [part.attention_output for part in (*parts, expected)]
    *own, wanted = [output.weight.dense() for output in outputs if output is not None]
    assert torch.equal(torch.cat(own, dim=1), wanted)
    num_rows = description.num_heads * description.head_dim
    q_rows = [part.qkv.weight.dense()[: num_rows // 2] for part in parts if part.qkv is not None]
    assert expected.qkv is not None
    assert torch.equal(torch.cat(q_rows), expected.qkv.weight.dense()[:num_rows])


@pytest.mark.parametrize("name", ["gptq-order", "w8a16", "mxfp4", "fp8-blocks"])
def test_layers_of_blocks_on_a_gpu(name: str, quantized: Callable[[str], tuple[torch.nn.Module, Path]]) -> None:
    folder = open_model_folder(str(quantized(name)[1]))
    qkv = next(DecoderWeights(folder, describe(folder.config), "auto").layers()).qkv
    assert qkv is not None
    parts = qkv.weight.as_blocks()
    assert len(parts) == (3 if name == "gptq-order" else 1)
    x, bias = torch.randn(9, 128), torch.randn(qkv.weight.shape[0])
    out = Linear(parts[0][0].codes, bias, parts=tuple(parts))(x)
    torch.testing.assert_close(out, x @ qkv.weight.dense().T + bias, rtol=1e-5, atol=1e-4)


def damage(name: str, change: Callable[[dict[str, Tensor]], object]) -> tuple[dict[str, Tensor], Scheme]:
    quantize, settings = SCHEMES[name]
    tensors = dict(quantize(torch.randn(64, 64))[0])
    change(tensors)
    return tensors, Scheme(settings["quant_method"], settings)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w8a8", lambda t: t.pop("weight_scale"), "a.weight is of type torch.int8, and there is no scale"),
        ("awq", lambda t: t.pop("scales"), "lack the tensor a.scales"),
        ("awq", lambda t: t.update(scales=t["scales"][:, :9].contiguous()), "weights of a do not fit together"),
        ("gptq", lambda t: t["g_idx"].fill_(0), "g_idx must assign the same number of columns to every group"),
        ("w8-order-asym", lambda t: t["weight_g_idx"].fill_(0), "weight_g_idx must assign the same number of columns"),
        ("fp8-order", lambda t: t["weight_g_idx"][:1].fill_(-1), "weight_g_idx must assign the same number"),
        ("mxfp4", lambda t: t.update(weight_g_idx=torch.arange(64) % 2), "MXFP4 weights with the order of columns"),
        ("fp8", lambda t: t["weight"].view(torch.uint8).fill_(127), "a.weight contains NaN"),
        ("fp8", lambda t: t.update(weight=t["weight"].to(torch.float8_e5m2)), "is of type torch.float8_e5m2"),
        ("w4a16", lambda t: t.update(weight_shape=torch.tensor([64, 128])), "weights of 2 bits; supported are 4 and 8"),
        ("mxfp4", lambda t: t.update(weight_scale=t["weight_scale"].float()), "lack the tensor a.weight_global_scale"),
        ("nvfp4", lambda t: t.update(weight_scale=t["weight_scale"].float()), "of four bits with .* torch.float32"),
        ("nvfp4", lambda t: t.update(weight_scale=t["weight_scale"][:, :3].contiguous()), "weights of a do not fit"),
        ("nvfp4-modelopt", lambda t: t.pop("weight_scale_2"), "lack the tensor a.weight_scale_2"),
        ("nvfp4-modelopt", lambda t: t.update(pre_quant_scale=torch.ones(64)), "multiplied by pre_quant_scale"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_named(
    name: str, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    tensors, scheme = damage(name, change)
    save_file({f"a.{part}": tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        SafetensorsFiles([tmp_path / "a.safetensors"], scheme).matrix("a.weight")


def declare(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize(("form", "num_bits"), [("pack-quantized", 4), ("int-quantized", 8)])
def test_groups_that_do_not_divide_the_columns_are_refused(form: str, num_bits: int, tmp_path: Path) -> None:
    """As in compressed-tensors, two scales with a group size of 128 for 192 columns are not read as groups of 96."""
    args = QuantizationArgs(num_bits=num_bits, type="int", strategy="group", group_size=128)
    levels, scale = torch.randint(-8, 8, (64, 192), dtype=torch.int8), torch.rand(64, 2)
    with pytest.raises(ValueError, match="group_size 128 but got 192"):
        dequantize(levels, scale, torch.zeros_like(scale, dtype=torch.int8), args)
    parts = {"weight": levels}
    if form == "pack-quantized":
        parts = {"weight_packed": pack_to_int32(levels, num_bits), "weight_shape": torch.tensor(levels.shape)}
    make_tiny_model(tmp_path, "Llama")
    tensors = {f"a.{name}": tensor for name, tensor in {**parts, "weight_scale": scale}.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    groups = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}
    declare(tmp_path, {"quant_method": "compressed-tensors", "format": form, "config_groups": groups})
    with pytest.raises(ConfigError, match=r"2 scales for 192 columns; config\.json declares groups of 128"):
        read(tmp_path, "a.weight")


@pytest.mark.parametrize("name", ["gptq-v2", "awq"])
def test_groups_of_another_size_than_declared_are_refused(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "Llama", **SIZES)
    quantize_model(tmp_path, model, name)
    declare(tmp_path, {**SCHEMES[name][1], "group_size": 96})
    with pytest.raises(ConfigError, match=r"3 scales for 192 columns; config\.json declares groups of 96"):
        read(tmp_path, "model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("settings", [{"format": "GPTQ_V2"}, {"checkpoint_format": None, "format": "gptq_v2"}])
def test_the_version_of_gptq_may_be_declared_as_the_format(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "Llama", **SIZES)
    quantize_model(tmp_path, model, "gptq-v2")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = read(tmp_path, name).dense()
    declare(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 64, **settings})
    (tmp_path / "midstream.json").unlink()
    assert torch.equal(read(tmp_path, name).dense(), expected)
