"""Applies LoRA adapters to a batch whose rows may have different adapters, in plain PyTorch."""

import torch
from torch import Tensor

from kernels.linear import linear


def add_lora(y: Tensor, x: Tensor, values: Tensor, table: Tensor, slots: Tensor, max_rank: int) -> None:
    """For each row, add the output of its LoRA adapter for x to y; see `kernels.add_lora`."""
    inner, outer = x.shape[1], y.shape[1]
    # Several slots may have the same start and rank.
    pairs = torch.where(slots[:, None] < 0, 0, table[slots.clamp(min=0).long()])
    for start, rank in torch.unique(pairs, dim=0).tolist():
        if rank:
            rows = torch.nonzero((pairs[:, 0] == start) & (pairs[:, 1] == rank)).flatten()
            middle = start + rank * inner
            a, b = values[start:middle].view(rank, inner), values[middle : middle + rank * outer].view(rank, outer)
            y[rows] += linear(linear(x[rows], a), b.t())
