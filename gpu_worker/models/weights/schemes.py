"""Reads matrices of quantized checkpoints: GPTQ, AWQ, compressed-tensors, ModelOpt, float8, MXFP4 and NVFP4. A
module's format follows from its tensors, so lists of unquantized modules need not be read: unquantized modules have a
plain weight. Bits and group sizes follow from tensor shapes where possible; if config.json declares group sizes, each
must be one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.weights.block_rows import affine8_weight, fp8_weight, int4_weight, int8_weight, mxfp4_weight
from gpu_worker.models.weights.weight import Weight
from midstream.errors import ConfigError, UnsupportedError

# Order of the eight columns in a word, as expected by AWQ's GEMM kernels.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, slots=True)
class Scheme:
    """The contents of `quantization_config`.

    Attributes:
        settings: The settings that the method needs. `block` has the rows and columns of a block, `group_sizes` the
            sizes of the groups of columns in any of the modules.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Module:
    """The tensors of one module."""

    def __init__(self, name: str, has: Callable[[str], bool], get: Callable[[str], Tensor]) -> None:
        self.name, self._has, self._get = name, has, get

    def has(self, name: str) -> bool:
        return self._has(f"{self.name}.{name}")

    def get(self, name: str) -> Tensor:
        """Return one of the module's tensors; raise ConfigError if it is missing."""
        return self._get(f"{self.name}.{name}")

    def first(self, *names: str) -> Tensor | None:
        """Return the first of these tensors that the module has."""
        return next((self.get(name) for name in names if self.has(name)), None)


def is_packed(module: Module) -> bool:
    """Return whether the module's matrix is stored under a name other than `weight`."""
    return any(module.has(name) for name in ("qweight", "weight_packed"))


def read_matrix(module: Module, scheme: Scheme | None) -> Weight:
    """Return the matrix of a module that has no unquantized `weight`.

    Raises:
        UnsupportedError: Its storage format is not supported; the message names it.
        ConfigError: A tensor is missing, or its shape does not match the others.
    """
    try:
        if scheme is None:
            raise UnsupportedError(
                f"the weights of {module.name} are quantized, but config.json does not name a method", field="model"
            )
        if module.has("qweight"):
            return _awq(module, scheme) if scheme.method == "awq" else _gptq(module, scheme)
        if module.has("weight_packed"):
            return _compressed(module, scheme)
        return _scaled(module, scheme)
    except (ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(
            f"the quantized weights of {module.name} do not fit together: {error}", field="model"
        ) from error


def _unpacked(words: Tensor, num_bits: int) -> Tensor:
    """Unpack int32 [M, W] -> uint8 [M, W * 32 / num_bits], lowest bits first."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << num_bits) - 1).to(torch.uint8).flatten(1)


def _check_groups(scale: Tensor, num_columns: int, scheme: Scheme) -> None:
    """Raise ValueError if scales [N, groups] do not cover groups of a size that the settings declare."""
    sizes, num_groups = scheme.settings.get("group_sizes"), scale.shape[1]
    if num_groups > 1 and sizes and all(size * num_groups != num_columns for size in sizes):
        declared = " or ".join(map(str, sizes))
        raise ValueError(f"{num_groups} scales for {num_columns} columns; config.json declares groups of {declared}")


def _awq(module: Module, scheme: Scheme) -> Weight:
    # Weights [K, N / 8]; for each group of inputs, zeros [groups, N / 8] and scales [groups, N].
    def columns(words: Tensor) -> Tensor:
        return torch.unflatten(_unpacked(words, 4), 1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1)

    levels, scale = columns(module.get("qweight")).t().contiguous(), module.get("scales").t()
    zero = columns(module.get("qzeros")).t() if module.has("qzeros") else torch.full(scale.shape, 8)
    _check_groups(scale, levels.shape[1], scheme)
    return int4_weight(levels, scale, zero)


def _gptq(module: Module, scheme: Scheme) -> Weight:
    num_bits = int(scheme.settings["bits"])
    # Weights [K * bits / 32, N] with inputs packed; zeros [groups, N * bits / 32] with outputs packed; scales [groups,
    # N].
    levels = _unpacked(module.get("qweight").t().contiguous(), num_bits)
    scale, words = module.get("scales").t(), module.get("qzeros")
    # The first version of the format subtracts 1 from each zero point. GPTQModel subtracts in the packed words, so a
    # zero point of 0 borrows from the next one.
    if scheme.settings.get("checkpoint_format", "gptq") != "gptq_v2":
        words = words + sum(1 << shift for shift in range(0, 32, num_bits))
    zero = _unpacked(words, num_bits).t().int()
    num_columns, num_groups = levels.shape[1], scale.shape[1]
    _check_groups(scale, num_columns, scheme)
    order = _input_order(module, "g_idx", num_columns, num_groups)
    if order is not None:
        levels = levels[:, order]
    return (int4_weight if num_bits == 4 else affine8_weight)(levels, scale, zero, order)


def _compressed(module: Module, scheme: Scheme) -> Weight:
    packed, scale = module.get("weight_packed"), module.get("weight_scale")
    if packed.dtype == torch.uint8:
        if scale.dtype != torch.uint8:
            if module.has("weight_g_idx") or module.has("weight_zero_point"):
                raise UnsupportedError(f"{module.name}: NVFP4 weights with weight_g_idx or zero points", field="model")
            return _nvfp4(module, packed, scale, 1 / module.get("weight_global_scale").float())
        order = _input_order(module, "weight_g_idx", 2 * packed.shape[1], scale.shape[1])
        if order is not None:
            raise UnsupportedError(
                f"{module.name}: MXFP4 weights with the order of columns weight_g_idx", field="model"
            )
        return mxfp4_weight(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1), scale)
    num_rows, num_columns = module.get("weight_shape").tolist()
    num_bits = packed.shape[1] * 32 // num_columns
    if num_bits not in (4, 8):
        raise UnsupportedError(f"{module.name}: weights of {num_bits} bits; supported are 4 and 8", field="model")
    levels = _unpacked(packed, num_bits)[:, :num_columns]
    scale = _by_row(scale.float(), num_rows, num_columns, scheme)
    half, zero = 1 << (num_bits - 1), module.first("weight_zero_point")
    if zero is None:
        zero = torch.full(scale.shape, half)
    elif zero.dtype == torch.int32:
        zero = _unpacked(zero.t().contiguous(), num_bits).t()[:num_rows].int()
    else:  # a zero point for the whole tensor or for each block is not packed
        zero = _by_row(zero.float(), num_rows, num_columns, scheme) + half
    order = _input_order(module, "weight_g_idx", num_columns, scale.shape[1])
    if order is not None:
        levels = levels[:, order]
    return (int4_weight if num_bits == 4 else affine8_weight)(levels, scale, zero, order)


def _nvfp4(module: Module, packed: Tensor, scale: Tensor, factor: Tensor) -> Weight:
    """Return the matrix of E2M1 codes, two per byte, with a float8 scale for each 16 and a factor for all, rounded to
    bfloat16: the kernels' formats have one scale of this precision for 32 weights.
    """
    if scale.dtype != torch.float8_e4m3fn or factor.numel() != 1:
        raise UnsupportedError(
            f"{module.name}: weights of four bits with {factor.numel()} factors and scales of {scale.dtype}",
            field="model",
        )
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    groups = torch.unflatten(_E2M1[codes.int()], 1, (scale.shape[1], 16))
    values = groups * (scale.float() * factor.view(()))[..., None]
    return Weight("bf16", values.flatten(1).bfloat16(), codes.shape[1])


def _input_order(module: Module, name: str, num_columns: int, num_groups: int) -> Tensor | None:
    """Return the order in which the columns of each group are next to each other, int64 [num_columns]; None if they are
    in the matrix. The tensor `name` has each column's group; compressed-tensors leaves it at -1 if it is not used.
    """
    found = module.first(name)
    if found is None or bool((found == -1).all()):
        return None
    groups, in_order = found.long(), torch.arange(num_columns) * num_groups // num_columns
    if torch.equal(groups, in_order):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        raise ValueError(f"{name} must assign the same number of columns to every group")
    return order


def _scaled(module: Module, scheme: Scheme) -> Weight:
    weight = module.get("weight")
    num_rows, num_columns = weight.shape
    scale = module.first("weight_scale_inv", "weight_scale")
    if scale is None:
        raise ConfigError(
            f"{module.name}.weight is of type {weight.dtype}, and there is no scale for it", field="model"
        )
    if module.has("pre_quant_scale"):
        raise UnsupportedError(f"{module.name}: inputs multiplied by pre_quant_scale (AWQ of ModelOpt)", field="model")
    if weight.dtype == torch.uint8:
        return _nvfp4(module, weight, scale, module.get("weight_scale_2").float())
    if scale.dtype == torch.uint8:  # exponents (MXFP8)
        scale = torch.exp2(scale.float() - 127)
    scale = _by_row(scale.float(), num_rows, num_columns, scheme)
    order = _input_order(module, "weight_g_idx", num_columns, scale.shape[1])
    if order is not None:
        weight = weight[:, order]
    if weight.dtype == torch.float8_e4m3fn:
        if bool(weight.view(torch.uint8).bitwise_and(127).eq(127).any()):
            raise ConfigError(f"{module.name}.weight contains NaN", field="model")
        return fp8_weight(weight, scale, order)
    if weight.dtype == torch.int8:
        zero = module.first("weight_zero_point")
        if zero is None and scale.shape[1] == 1:
            return int8_weight(weight, scale)
        zeros = torch.zeros_like(scale) if zero is None else _by_row(zero.float(), num_rows, num_columns, scheme)
        return affine8_weight(weight.view(torch.uint8) ^ 128, scale, zeros + 128, order)
    raise UnsupportedError(f"{module.name}.weight is of type {weight.dtype}", field="model")


def _by_row(scale: Tensor, num_rows: int, num_columns: int, scheme: Scheme) -> Tensor:
    """Expand per-tensor, per-row, per-group or per-block scales to [N, groups]."""
    if scale.numel() == 1:
        return scale.view(1, 1).expand(num_rows, 1)
    scale = scale.view(scale.shape[0], -1)
    rows, columns = scheme.settings.get("block", (0, 0))
    # Check for blocks first: for a matrix with one row, scales per block have as many rows as scales per group.
    if not rows or scale.shape != (-(-num_rows // rows), -(-num_columns // columns)):
        if scale.shape[0] == num_rows:
            _check_groups(scale, num_columns, scheme)
            return scale
        raise ValueError(f"scales {list(scale.shape)} for a matrix [{num_rows}, {num_columns}]")
    if columns % 32:
        raise UnsupportedError(
            f"weights in blocks of {columns} columns; only multiples of 32 are supported", field="model"
        )
    wide = scale.repeat_interleave(rows, dim=0)[:num_rows].repeat_interleave(columns // 32, dim=1)
    return wide[:, : -(-num_columns // 32)]
