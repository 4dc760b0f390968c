"""The linear layer in plain PyTorch."""

import os

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import Activation, activate

ROW_TILE = 8
# MKL, PyTorch's BLAS on x86, reads this variable before its first matrix product. By default, on processors without
# AVX-512, the bits of a row's result depend on the row's position and on the number of threads.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`: x [M, K], weight [N, K], bias [N] -> [M, N].

    On a CPU the bits of a row's result do not depend on M or on the row's position: BLAS uses another order of
    summation for small M, so rows are processed in tiles of constant height.
    """
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -num_rows % ROW_TILE))
    out = torch.empty(padded.shape[0], weight.shape[0], dtype=x.dtype)
    transposed = weight.t()
    for start in range(0, num_rows, ROW_TILE):
        torch.mm(padded[start : start + ROW_TILE], transposed, out=out[start : start + ROW_TILE])
    out = out[:num_rows]
    return out if bias is None else out + bias


def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ (weight * scale[:, None]).T + bias`: weight int8 [N, K], scale float32 [N]."""
    out = (linear(x, weight.to(x.dtype)) * scale).to(x.dtype)
    return out if bias is None else out + bias


def gated_linear(
    x: Tensor, weight: Tensor, activation: Activation, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return `activate` of the linear layer with weight [2F, K], gate first -> [M, F]; with a scale, it is int8."""
    product = linear(x, weight, bias) if scale is None else quantized_linear(x, weight, scale, bias)
    return activate(product, activation)
