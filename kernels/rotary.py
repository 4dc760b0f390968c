"""Rotary position embedding in plain PyTorch."""

import torch
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    wide, rest = x[..., :size].float(), x[..., size:]
    if is_interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype) if not rest.shape[-1] else torch.cat((turned.to(x.dtype), rest), dim=-1)


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first R elements of each head: q [M, Hq, D], k [M, Hk, D], cos and sin [M, R/2].

    The pairs are (i, i + R/2), or with is_interleaved (2i, 2i + 1). R is at most D.
    """
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    return _rotate(q, cos, sin, is_interleaved), _rotate(k, cos, sin, is_interleaved)
