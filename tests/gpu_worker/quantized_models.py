"""Quantized checkpoints of tiny models, in the formats of common tools.

Each scheme converts a float32 matrix into the tensors of a module and the values that they represent. Both come from
the library that defines the scheme or, if the library needs a GPU, from the scheme's arithmetic in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

Tensors = dict[str, Tensor]
Quantized = tuple[Tensors, Tensor]
_NVFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
)


def _pack(levels: Tensor, num_bits: int) -> Tensor:
    """Pack [M, W * 32 / bits] into int32 [M, W], with the first value in the lowest bits."""
    words = torch.unflatten(levels.long(), 1, (-1, 32 // num_bits)) << torch.arange(0, 32, num_bits)
    return words.sum(-1).int()  # the sum wraps around


def _group_scales(weight: Tensor, group: int, most: int) -> tuple[Tensor, Tensor]:
    """Return float16 scales and zero points that map each group's range, from its minimum to its maximum weight."""
    parts = torch.unflatten(weight, 1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / most).clamp(min=1e-4).half().float()
    return scale, (-low / scale).round().clamp(1, most)


def _levels(weight: Tensor, scale: Tensor, zero: Tensor, groups: Tensor, most: int) -> Tensor:
    return (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, most)


def _gptq(num_bits: int, group: int, *, with_order: bool = False, version: int = 1) -> Callable[[Tensor], Quantized]:
    """Return tensors in AutoGPTQ's layout (https://github.com/AutoGPTQ/AutoGPTQ) or, for version 2, in that of
    GPTQModel.
    """

    def quantize(weight: Tensor) -> Quantized:
        num_columns, most = weight.shape[1], (1 << num_bits) - 1
        groups = torch.arange(num_columns) // group
        if with_order:
            groups = groups[torch.randperm(num_columns, generator=torch.Generator().manual_seed(sum(weight.shape)))]
        order = groups.argsort(stable=True)
        scale, zero = _group_scales(weight[:, order], group, most)
        levels = _levels(weight, scale, zero, groups, most)
        values = scale.double()[:, groups] * (levels.double() - zero.double()[:, groups])
        tensors = {
            "qweight": _pack(levels, num_bits).t(),
            "qzeros": _pack((zero - int(version == 1)).t(), num_bits),
            "scales": scale.t().half(),
            "g_idx": groups.int(),
        }
        return tensors, values

    return quantize


def _awq(group: int) -> Callable[[Tensor], Quantized]:
    """Return tensors in AutoAWQ's layout for its GEMM kernels: https://github.com/casper-hansen/AutoAWQ,
    awq/modules/linear/gemm.py.
    """
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(levels: Tensor) -> Tensor:
        return _pack(torch.unflatten(levels, 1, (-1, 8))[..., order].flatten(1), 4)

    def quantize(weight: Tensor) -> Quantized:
        groups = torch.arange(weight.shape[1]) // group
        scale, zero = _group_scales(weight, group, 15)
        levels = _levels(weight, scale, zero, groups, 15)
        values = scale.double()[:, groups] * (levels.double() - zero.double()[:, groups])
        tensors = {"qweight": pack(levels.t()), "qzeros": pack(zero.t()), "scales": scale.t().half()}
        return tensors, values

    return quantize


def _compressed_int(num_bits: int, group: int | None, *, symmetric: bool) -> Callable[[Tensor], Quantized]:
    strategy = "channel" if group is None else "group"
    args = QuantizationArgs(num_bits=num_bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def quantize(weight: Tensor) -> Quantized:
        half = 1 << (num_bits - 1)
        parts = torch.unflatten(weight, 1, (-1, group or weight.shape[1]))
        if symmetric:
            scale = (parts.abs().amax(-1) / (half - 0.5)).half().float()
            zero = torch.zeros_like(scale, dtype=torch.int8)
        else:
            scale, levels = _group_scales(weight, group or weight.shape[1], 2 * half - 1)
            zero = (levels - half).to(torch.int8)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors = PackedQuantizationCompressor.compress(state, scheme)
        return tensors, PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]

    return quantize


def _compressed_int8_rows(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    levels = (weight / scale).round().to(torch.int8)
    args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    return {"weight": levels, "weight_scale": scale}, dequantize(levels, scale, torch.zeros_like(levels[:, :1]), args)


def _compressed_groups(kind: str, group: int, *, symmetric: bool = True) -> Callable[[Tensor], Quantized]:
    """Return eight-bit integers or floats in groups of columns that are not next to each other (act order).

    Version 0.20 of the library has no act order any more; its values are those of the sorted columns.
    """
    args = QuantizationArgs(num_bits=8, type=kind, strategy="group", group_size=group, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def quantize(weight: Tensor) -> Quantized:
        num_columns = weight.shape[1]
        generator = torch.Generator().manual_seed(sum(weight.shape))
        groups = (torch.arange(num_columns) // group)[torch.randperm(num_columns, generator=generator)]
        order = groups.argsort(stable=True)
        sorted_columns = weight[:, order]
        parts = torch.unflatten(sorted_columns, 1, (-1, group))
        zero = torch.zeros(parts.shape[:2], dtype=torch.int8)
        scale = parts.abs().amax(-1) / (448 if kind == "float" else 127)
        if not symmetric:
            scale, levels = _group_scales(sorted_columns, group, 255)
            zero = (levels - 128).to(torch.int8)
        state = {"weight": sorted_columns, "weight_scale": scale, "weight_zero_point": zero}
        tensors = NaiveQuantizationCompressor.compress(state, scheme)
        values = NaiveQuantizationCompressor.decompress(tensors, scheme)["weight"]
        places = order.argsort()
        tensors["weight"] = tensors["weight"][:, places]
        return tensors | {"weight_g_idx": groups.int()}, values[:, places]

    return quantize


def _compressed_fp8_rows(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 448
    levels = (weight / scale).to(torch.float8_e4m3fn)
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    return {"weight": levels, "weight_scale": scale}, dequantize(levels, scale, None, args)


def _compressed_mxfp4(weight: Tensor) -> Quantized:
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    most = torch.unflatten(weight, 1, (-1, 32)).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(most)) - 2)
    tensors = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return tensors, MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]


def _compressed_nvfp4(weight: Tensor) -> Quantized:
    scheme = QuantizationScheme(targets=["Linear"], weights=_NVFP4)
    factor = (448 * 6 / weight.abs().max()).view(1)
    scale = (torch.unflatten(weight, 1, (-1, 16)).abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": factor}
    tensors = NVFP4PackedCompressor.compress(state, scheme)
    return tensors, NVFP4PackedCompressor.decompress(tensors, scheme)["weight"].bfloat16().float()


def _modelopt_nvfp4(weight: Tensor) -> Quantized:
    """Write the same values as ModelOpt, which stores the inverse of the factor."""
    tensors, values = _compressed_nvfp4(weight)
    renamed = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    factor = (1 / tensors["weight_global_scale"]).view(())
    return {**renamed, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}, values


def _compressed_mxfp8(weight: Tensor) -> Quantized:
    args = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    most = torch.unflatten(weight, 1, (-1, 32)).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(most)) - 8)
    tensors = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    levels = torch.unflatten(tensors["weight"].float(), 1, (-1, 32))
    return tensors, (levels * scale[..., None]).flatten(1)


def _fp8_tensor(weight: Tensor) -> Quantized:
    scale = weight.abs().max() / 448
    levels = (weight / scale).to(torch.float8_e4m3fn)
    return (
        {"weight": levels, "weight_scale": scale, "input_scale": torch.tensor(0.1)},
        _dequantize_fp8_weight(levels, scale, None, torch.float32),
    )


def _fp8_blocks(weight: Tensor) -> Quantized:
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns * 128 - weight.shape[1], 0, rows * 128 - weight.shape[0]))
    scale = torch.unflatten(torch.unflatten(padded, 1, (columns, 128)), 0, (rows, 128)).abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    levels = (weight / wide).to(torch.float8_e4m3fn)
    return (
        {"weight": levels, "weight_scale_inv": scale},
        _dequantize_fp8_weight(levels, scale, [128, 128], torch.float32),
    )


def _compressed_config(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
SCHEMES: dict[str, tuple[Callable[[Tensor], Quantized], dict[str, Any]]] = {
    "gptq": (_gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    "gptq-order": (_gptq(4, 64, with_order=True), {"quant_method": "gptq", "bits": 4, "group_size": 64}),
    "gptq-v2": (
        _gptq(4, 64, version=2),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8": (_gptq(8, 32, with_order=True), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "awq": (
        _awq(64),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 64,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
    ),
    "w4a16": (_compressed_int(4, 32, symmetric=True), _compressed_config("pack-quantized", **_INT4)),
    "w4a16-asym": (
        _compressed_int(4, 64, symmetric=False),
        _compressed_config("pack-quantized", **{**_INT4, "group_size": 64}),
    ),
    "w4a16-rows": (_compressed_int(4, None, symmetric=True), _compressed_config("pack-quantized", num_bits=4)),
    "w8a16": (_compressed_int(8, 32, symmetric=False), _compressed_config("pack-quantized", num_bits=8)),
    "w8a8": (_compressed_int8_rows, _compressed_config("int-quantized", num_bits=8, type="int", strategy="channel")),
    "w8-order": (
        _compressed_groups("int", 64),
        _compressed_config("int-quantized", num_bits=8, type="int", strategy="group", group_size=64),
    ),
    "w8-order-asym": (
        _compressed_groups("int", 32, symmetric=False),
        _compressed_config("naive-quantized", num_bits=8, type="int", strategy="group", group_size=32),
    ),
    "fp8-order": (
        _compressed_groups("float", 64),
        _compressed_config("float-quantized", num_bits=8, type="float", strategy="group", group_size=64),
    ),
    "w8a8-fp8": (_compressed_fp8_rows, _compressed_config("float-quantized", num_bits=8, type="float")),
    "mxfp4": (_compressed_mxfp4, _compressed_config("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)),
    "mxfp8": (
        _compressed_mxfp8,
        _compressed_config("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    ),
    "nvfp4": (
        _compressed_nvfp4,
        _compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "nvfp4-modelopt": (_modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fp8": (_fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-blocks": (
        _fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


def quantize_model(folder: Path, model: torch.nn.Module, scheme: str, left_alone: str = "lm_head") -> None:
    """Quantize the linear layers of a model and of its folder, except layers whose name contains `left_alone`.

    The model keeps the dequantized values.
    """
    quantize, settings = SCHEMES[scheme]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and left_alone not in name and f"{name}.weight" in tensors:
            made, values = quantize(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in made.items()}
            module.weight.data.copy_(values)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
