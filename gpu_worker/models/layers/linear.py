"""The linear layer with float weights, or with int8 weights and a scale per output channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels
from kernels import Activation, BlockWeight

# Adds the outputs of LoRA adapters for a module, given the module's input, to its output: (module, input, output).
AddLora = Callable[[str, Tensor, Tensor], None]
# The same for a module of experts, given the expert of each row: (module, experts, input, output).
AddExpertLora = Callable[[str, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b.

    Attributes:
        weight: [N, K], floats of x's type or int8.
        bias: [N].
        scale: Float32 [N], the scale of each int8 row.
        parts: If set, the weight as blocks, used instead of `weight`: one or more parts, stacked by rows, each with the
            order in which it takes the columns of x (None: unchanged).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    parts: tuple[tuple[BlockWeight, Tensor | None], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [M, K] -> [M, N]."""
        if len(self.parts) == 1:
            return self._whole(x)
        if self.parts:
            outputs = [kernels.block_linear(x if order is None else x[:, order], part) for part, order in self.parts]
            out = torch.cat(outputs, dim=1)
            return out if self.bias is None else out + self.bias
        if self.scale is not None:
            return kernels.quantized_linear(x, self.weight, self.scale, self.bias)
        return kernels.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `kernels.activate` of the output, in which the gates come first: x [M, K] -> [M, N / 2]."""
        if len(self.parts) == 1:
            return self._whole(x, activation)
        if self.parts:
            return kernels.activate(self(x), activation)
        return kernels.gated_linear(x, self.weight, activation, self.bias, self.scale)

    def _whole(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """Return the output of a weight that is a single part."""
        ((part, order),) = self.parts
        return kernels.block_linear(x if order is None else x[:, order], part, self.bias, activation)


def with_lora(linear: Linear, x: Tensor, module: str, add_lora: AddLora | None) -> Tensor:
    """Return linear(x) plus the outputs of adapters for this module: x [M, K] -> [M, N]."""
    out = linear(x)
    if add_lora is not None:
        add_lora(module, x, out)
    return out


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize floats by row; return int8 [N, K] and float32 scales [N]."""
    values = weight.float()
    scale = values.abs().amax(dim=1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (values * inverse[:, None]).round().to(torch.int8), scale


class LinearModule(nn.Module):
    """Replaces a linear module of transformers, and uses its weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: str) -> None:
        """Store a weight [N, K] in the format `weights`: auto and f32 unchanged, bf16 rounded to bfloat16, int8
        quantized.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias, self.scale = _constant(weight), bias, None
        if weights == "bf16":
            self.weight = _constant(weight.bfloat16().to(weight.dtype))
        elif weights == "int8":
            units, scale = int8_rows(weight)
            self.weight, self.scale = _constant(units), _constant(scale)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., K] -> [..., N]."""
        out = Linear(self.weight, self.bias, self.scale)(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
