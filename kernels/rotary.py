"""Rotary position embedding (half-split style) in plain PyTorch."""

import torch
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the pairs (i, i + D/2) of each head: q [M, Hq, D], k [M, Hk, D], cos and sin [M, D/2]."""
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
