"""Applies LoRA adapters to a batch whose rows may have different adapters, in plain PyTorch."""

import torch
from torch import Tensor

from kernels.linear import linear


def add_lora(y: Tensor, x: Tensor, values: Tensor, table: Tensor, slots: Tensor, max_rank: int) -> None:
    """For each row, add the output of its LoRA adapter for x to y; see `kernels.add_lora`."""
    inner, outer = x.shape[1], y.shape[1]
    for slot in torch.unique(slots).tolist():
        start, rank = table[slot].tolist() if slot >= 0 else (0, 0)
        if rank:
            rows = torch.nonzero(slots == slot).flatten()
            middle = start + rank * inner
            a, b = values[start:middle].view(rank, inner), values[middle : middle + rank * outer].view(rank, outer)
            y[rows] += linear(linear(x[rows], a), b.t())
