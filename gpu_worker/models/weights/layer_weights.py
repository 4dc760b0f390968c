"""The weights of a decoder's layers, fused for computation: q, k and v in one matrix, gate and up in another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.kv_rounding import KvRounding

if TYPE_CHECKING:
    # Imported only for type checks: it needs the packages that read weight files; code that creates models in other
    # ways does not.
    from gpu_worker.models.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear layer: weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """The weights of a feed-forward network. Rows of gate_up: gate, then up."""

    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The weights of a mixture of experts.

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
    """The weights of latent attention. Rows of kv_up: each head's keys, then its values; float32 [rows, kv_rank]."""

    q_down: LinearWeights | None
    q_norm: Tensor | None
    q_up: LinearWeights
    kv_down: LinearWeights
    kv_norm: Tensor
    kv_up: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights of a recurrent part, which replaces attention or runs in parallel to it. A short convolution has only
    inputs and conv.

    Attributes:
        inputs: Input matrices; for a delta net, one of queries, keys, values and gates, and one of rates; for Mamba 1,
            those of inputs, selection and time steps; otherwise a single one.
        conv: [channels, kernel].
        conv_bias: [channels].
        step_bias, decay_logs, skip: [heads]; for Mamba 1, decay_logs [channels, state_dim] and skip [channels].
    """

    inputs: tuple[LinearWeights, ...]
    output: LinearWeights
    conv: Tensor
    conv_bias: Tensor | None
    step_bias: Tensor | None = None
    decay_logs: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Rows of qkv: q, then k, then v. A layer has only the components that its
    description specifies.

    Norms of the residual stream are [hidden_size], or with biases [2, hidden_size].
    """

    input_norm: Tensor | None
    qkv: LinearWeights | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_output: LinearWeights | None
    ffn_norm: Tensor | None
    feed_forward: FeedForwardWeights | None
    attention_output_norm: Tensor | None = None
    ffn_output_norm: Tensor | None = None
    sinks: Tensor | None = None
    latent: LatentWeights | None = None
    mixture: MixtureWeights | None = None
    recurrent: RecurrentWeights | None = None
    kv_rounding: KvRounding | None = None
