"""Truncate a distribution to its most likely tokens, and sample from it. A row's result does not depend on other
rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

# Below this temperature the most likely token is practically certain, and dividing logits by it might overflow.
MIN_TEMPERATURE = 1e-6
# Limit on modified logits: divided by the lowest temperature, they are still finite.
_LARGEST_LOGIT = 1e30
# Number of most likely tokens to try first; if their probability does not reach top_p, all are used.
_NUM_CANDIDATES = 256
# Probabilities are summed in blocks of this many, then the selected block is searched.
_BLOCK = 256


def bounded(logits: Tensor, *, is_banned: Tensor) -> Tensor:
    """Limit logits to a range that sampling can compute with, and set those of banned tokens to -inf."""
    return logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).masked_fill_(is_banned, -torch.inf)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the first maximum in each row; NaN counts as the maximum."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))  # several times faster than torch's
    return logits.argmax(dim=1)


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return each row's most likely token as int32; -1 if its logit is not finite."""
    best = argmax(logits)
    return best.int().masked_fill_(~torch.isfinite(logits.gather(1, best[:, None]).squeeze(1)), -1)


def top_threshold(probabilities: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> Tensor:
    """Return the smallest probability that passes top_k (0: all) and then top_p: [num_rows, V] -> [num_rows, 1]."""
    num_tokens = probabilities.shape[1]
    width = min(num_tokens, _NUM_CANDIDATES)
    is_limited = (top_k > 0) & (top_k < num_tokens)
    is_wide = is_limited & (top_k > width)
    threshold, reaches = _threshold_within(probabilities, top_k, top_p, width)
    wide = np.flatnonzero(is_wide | ~reaches)
    if len(wide):
        places = torch.from_numpy(wide).to(probabilities.device)
        threshold[places], _ = _threshold_within(probabilities[places], top_k[wide], top_p[wide], num_tokens)
    return threshold


def _threshold_within(
    probabilities: Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float32], width: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return the threshold computed from only the `width` most likely tokens, and whether these suffice to determine
    it.
    """
    device, num_tokens = probabilities.device, probabilities.shape[1]
    is_limited = torch.from_numpy((top_k > 0) & (top_k < num_tokens)).to(device)[:, None]
    limit = torch.from_numpy(top_k).to(device).long()[:, None]
    limit = torch.where(is_limited, limit, num_tokens)
    values = _largest(probabilities, width)
    # Sequential within a row, so that a prefix is the same for any width.
    cumulative = torch.cumsum(values, dim=1, dtype=torch.float64)
    mass = torch.where(is_limited, cumulative.gather(1, limit.clamp(max=width) - 1), 1.0)
    wanted = torch.from_numpy(top_p).to(device)[:, None] * mass
    num_kept = torch.minimum((cumulative < wanted).sum(dim=1, keepdim=True) + 1, limit)
    reaches = (num_kept <= width).squeeze(1).cpu().numpy()
    return values.gather(1, num_kept.clamp(max=width) - 1), reaches


def _largest(values: Tensor, width: int) -> Tensor:
    """Return the `width` largest values of each row, in descending order."""
    if values.device.type != "cpu":
        return torch.topk(values, width, dim=1).values
    found = values.numpy()  # numpy's partition and sort are several times faster here
    if width < found.shape[1]:
        found = np.partition(found, found.shape[1] - width, axis=1)[:, -width:]
    return torch.from_numpy(np.sort(found, axis=1)[:, ::-1].copy())


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the index at which each row's cumulative weight exceeds number * total: int64 [num_rows].

    Args:
        weights: Float32 [num_rows, V], non-negative, not all zero. An index of weight zero is never returned.
        numbers: Float64 [num_rows], in [0, 1).
    """
    num_rows, num_tokens = weights.shape
    blocks = functional.pad(weights, (0, -num_tokens % _BLOCK)).view(num_rows, -1, _BLOCK)
    before = torch.cumsum(_block_sums(blocks), dim=1, dtype=torch.float64)
    targets = numbers[:, None] * before[:, -1:]
    block = torch.searchsorted(before, targets, right=True)
    targets = targets - torch.where(block > 0, before.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=weights.device), block.squeeze(1)]
    place = torch.searchsorted(torch.cumsum(inside, dim=1, dtype=torch.float64), targets, right=True)
    # A block's sum may differ from the sum of its parts by rounding: then take its last token with weight.
    last = _BLOCK - 1 - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last)).squeeze(1)


def _block_sums(blocks: Tensor) -> Tensor:
    if blocks.device.type != "cpu":
        return blocks.sum(dim=2)
    # PyTorch splits a sum among threads depending on the number of rows; numpy's order is fixed.
    return torch.from_numpy(blocks.numpy().sum(axis=2))
