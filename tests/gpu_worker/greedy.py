"""Check greedy output against transformers."""

from __future__ import annotations

from typing import Any

import torch

# If two logits are closer than this, rounding may determine which one is higher.
MARGIN = 1e-4


def wrong_tokens(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return the positions of output tokens that transformers would not choose after the preceding tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    likeliest = logits.topk(2)
    is_clear = likeliest.values[:, 0] - likeliest.values[:, 1] > MARGIN
    places: list[int] = (is_clear & (likeliest.indices[:, 0] != torch.tensor(output))).nonzero()[:, 0].tolist()
    return places
