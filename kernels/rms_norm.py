"""Root-mean-square layer norm in plain PyTorch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows of x [..., H] to unit root mean square, computed in float32, and multiply by weight [H]."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), all [M, H]."""
    total = x + residual
    return rms_norm(total, weight, eps), total
