"""Truncates a distribution to its most likely tokens, and samples from it, for each row independently."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Below this temperature the most likely token is practically certain, and dividing the logits by it might overflow.
MIN_TEMPERATURE = 1e-6
# Returned instead of a token for a row whose logits are not finite.
IS_BROKEN = -1
# Limit of modified logits, which stay finite when they are divided by the minimum temperature.
_LARGEST_LOGIT = 1e30


def bounded(logits: Tensor, *, is_banned: Tensor) -> Tensor:
    """Limit logits to a range in which sampling can compute, and set those of banned tokens to -inf."""
    return logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).masked_fill_(is_banned, -torch.inf)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the first maximum in each row; NaN counts as the maximum."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # several times faster than torch's
    return logits.argmax(dim=1)


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return each row's most likely token as int32; IS_BROKEN if its logit is not finite."""
    best = argmax(logits)
    return best.int().masked_fill_(~torch.isfinite(logits.gather(1, best[:, None]).squeeze(1)), IS_BROKEN)


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return each token's weight e^((logit - highest) / temperature): float32 [num_rows, V].

    Weights are rounded to a multiple of a quantum with which float64 sums of a row are exact in any order. They are
    computed with the same sequence of single operations as in the CPU kernels, so that the bits are equal.

    Args:
        logits: Float32 [num_rows, V]; the highest of each row is finite.
        temperature: Float32 [num_rows], positive.
    """
    x = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    x = x.clamp(min=-80.0)
    n = torch.round(x * 1.44269504088896341)
    r = x - n * 0.693359375
    r = r + n * 2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = r * r * p + r + 1.0
    found = p * ((n.int() + 127) << 23).view(torch.float32)
    # Adding this number rounds smaller numbers to the quantum, which is the value of its last bit.
    small = 2.0 ** ((logits.shape[1] - 1).bit_length() - 30)
    return torch.where(found < small, found + small - small, found)


def threshold(weights: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> Tensor:
    """Return the minimum weight that passes top_k (0: all) and then top_p (1: all): [num_rows, V] -> [num_rows, 1]."""
    device, num_tokens = weights.device, weights.shape[1]
    limit = torch.from_numpy(np.where((top_k > 0) & (top_k < num_tokens), top_k, num_tokens)).to(device)
    limit = limit.long()[:, None]
    likeliest = weights.sort(dim=1, descending=True).values
    sums = torch.cumsum(likeliest, dim=1, dtype=torch.float64)
    share = torch.from_numpy(top_p).to(device)[:, None]
    num_kept = (sums < share * sums.gather(1, limit - 1)).sum(dim=1, keepdim=True) + 1
    num_kept = torch.where(share < 1, torch.minimum(num_kept, limit), limit)
    return likeliest.gather(1, num_kept - 1)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the index at which each row's cumulative weight exceeds number * total: int64 [num_rows].

    Args:
        weights: Float32 [num_rows, V], non-negative, not all zero. An index with weight zero is never returned.
        numbers: Float64 [num_rows], in [0, 1).
    """
    sums = torch.cumsum(weights, dim=1, dtype=torch.float64)
    place = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    # The product may be rounded up to the total; in that case the last token with a weight is taken.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return torch.minimum(place, last).squeeze(1)
