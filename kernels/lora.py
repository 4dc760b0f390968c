"""Many low-rank adapters in one batch, in plain PyTorch."""

import torch
from torch import Tensor

from kernels.linear import linear


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Tensor, adapters: Tensor) -> None:
    """Add scaling[i] * (x @ a[i].T) @ b[i].T to the rows of y [M, N] whose entry of adapters is i; -1: none.

    Args:
        y: [M, N], changed in place.
        x: [M, K].
        a: [num_adapters, R, K]; an adapter of lower rank is padded with zeros.
        b: [num_adapters, N, R].
        scaling: float32 [num_adapters].
        adapters: int32 [M].
    """
    for i in range(a.shape[0]):
        rows = torch.nonzero(adapters == i).flatten()
        if len(rows):
            shrunk = linear(x[rows], a[i].to(x.dtype)) * scaling[i].to(x.dtype)
            y[rows] += linear(shrunk, b[i].to(x.dtype))
