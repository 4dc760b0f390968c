"""Linear layers in which each row chooses one of many matrices, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import ROW_TILE, linear


def grouped_linear(
    x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, *, num_repeats: int = 1
) -> Tensor:
    """Return row i as `x[i // num_repeats] @ weight[experts[i]].T + bias[experts[i]]` -> [R, N].

    x [R / num_repeats, K], weight [E, N, K], experts integers [R], bias [E, N]. Rows whose expert is E are 0. On a CPU
    the bits of a row's result do not depend on other rows.
    """
    out = torch.zeros(experts.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    for expert in range(weight.shape[0]):
        rows = torch.nonzero(experts == expert).flatten()
        if len(rows):
            out[rows] = linear(x[rows // num_repeats], weight[expert], None if bias is None else bias[expert])
    return out


def weighted_sum(parts: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of parts[:, i] * weights[:, i] over i; without weights, the sum of parts[:, i] -> [M, N].

    parts [M, A, N], weights [M, A]. The parts are added in order, in float32, so that a row's bits do not depend on the
    number of rows.
    """
    total = torch.zeros_like(parts[:, 0], dtype=torch.float32)
    for place in range(parts.shape[1]):
        part = parts[:, place].float()
        total += part if weights is None else part * weights[:, place, None]
    return total.to(parts.dtype)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x[:, h] @ weight[h].T` for each head: x [M, H, K], weight [H, N, K] -> [M, H, N].

    On a CPU the bits of a row's result do not depend on M, because each product has exactly ROW_TILE rows.
    """
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    num_rows, num_heads, inner = x.shape
    padded = functional.pad(x, (0, 0, 0, 0, 0, -num_rows % ROW_TILE))
    tiles = padded.view(-1, ROW_TILE, num_heads, inner).transpose(1, 2)
    products = torch.matmul(tiles, weight.transpose(1, 2))
    return products.transpose(1, 2).reshape(-1, num_heads, weight.shape[1])[:num_rows]
