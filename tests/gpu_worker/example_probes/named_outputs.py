"""Example output probes: the highest logits, values from hidden states and logits, and a probe that fails."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.sampling.output_probes import OutputProbe


class TopKLogits(OutputProbe):
    """Reports the three highest logits."""

    width = 3

    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        """Return the logits, highest first."""
        return logits.topk(self.width, dim=1).values


class Entropy(OutputProbe):
    """Reports the entropy of the model's distribution, and the norm of the embedding."""

    width = 2
    layers = (0,)

    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        """Return both values for each position."""
        log_probs = logits.log_softmax(dim=1)
        return torch.stack([-(log_probs.exp() * log_probs).sum(dim=1), states[0].norm(dim=1)], dim=1)


class Raises(OutputProbe):
    """A probe that fails."""

    width = 1

    def compute(self, states: Mapping[int, Tensor], logits: Tensor) -> Tensor:
        raise RuntimeError("no idea")
