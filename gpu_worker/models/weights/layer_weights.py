"""The weights of a decoder's layers, joined as they are computed with: q, k and v are one matrix, gate and up too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    # It needs the readers of weight files, without which a model made elsewhere can run.
    from gpu_worker.models.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear layer: weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """A feed-forward network. Rows of gate_up: gate, then up."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts.

    Attributes:
        correction: [num_experts].
        shared_gate: [1, hidden_size].
    """

    router: LinearWeights
    correction: Tensor | None
    experts: list[FeedForwardWeights]
    shared: FeedForwardWeights | None
    shared_gate: LinearWeights | None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Latent attention. Rows of kv_up: for each head its keys' part, then its values'; float32, [rows, kv_rank]."""

    q_down: LinearWeights | None
    q_norm: Tensor | None
    q_up: LinearWeights
    kv_down: LinearWeights
    kv_norm: Tensor
    kv_up: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Rows of qkv: all of q, then k, then v. There is qkv or latent, feed_forward or mixture."""

    input_norm: Tensor | None
    qkv: LinearWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_output: LinearWeights
    ffn_norm: Tensor | None
    feed_forward: FeedForwardWeights | None
    attention_output_norm: Tensor | None = None
    ffn_output_norm: Tensor | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None
    mixture: MixtureWeights | None = None
