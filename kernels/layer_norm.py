"""Layer norm without bias in plain PyTorch."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Subtract its mean from each row of x [..., H], scale to unit variance, multiply by weight [H]; all in float32."""
    wide = x.float()
    centered = wide - wide.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + eps)
    return (centered * inverse * weight.float()).to(x.dtype)
