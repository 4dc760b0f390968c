"""Describes a decoder's architecture, which a family's file reads from config.json and the decoders execute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import Activation
from midstream.errors import ConfigError

# Number of elements by which ALiBi extends queries, keys and values. Two are used; with eight, heads keep a size that
# kernels support.
ALIBI_DIM = 8
Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary position embedding of a layer.

    Attributes:
        settings: `rope_theta`, and `rope_type` with its settings as in config.json.
        dim: Number of leading elements of each head that are rotated.
        is_interleaved: Whether the elements of a pair are adjacent, (2i, 2i + 1), rather than half of `dim` apart.
    """

    settings: Mapping[str, Any]
    dim: int
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of experts in place of a feed-forward layer.

    Attributes:
        scoring: How router logits become scores: softmax over all experts, softmax over the chosen ones, or sigmoid.
        is_normalized: Whether the chosen experts' weights are divided by their sum.
        sum_offset: Added to that sum.
        num_groups, num_active_groups: Experts are chosen from the groups whose two best scores have the highest sum.
        has_correction: Whether a bias is added to the scores when choosing experts, but not to the weights.
        weighs_input: Whether the weight multiplies an expert's input instead of its output.
        shared_size: Intermediate size of the shared expert, which processes every token; 0 if there is none.
        has_shared_gate: Whether the shared expert's output is scaled by a sigmoid gate.
        held: The experts that a rank holds; None means all.
    """

    num_experts: int
    num_active: int
    expert_size: int
    scoring: Scoring = "softmax"
    is_normalized: bool = True
    sum_offset: float = 1e-20
    scale: float = 1.0
    num_groups: int = 1
    num_active_groups: int = 1
    has_correction: bool = False
    weighs_input: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    held: range | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: the cache holds one vector per token, from which keys and values are computed.

    The cached vector has `kv_rank` normed elements and `rope_dim` rotated ones, which all heads share. Queries are
    projected into the latent space, so attention has one KV head.

    Attributes:
        q_rank: Rank of the query projection; None if it is one full matrix.
        nope_dim, rope_dim: Elements of a query head without and with rotary embedding.
        value_dim: Size of a head's output.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta net, which replaces attention: linear attention whose state is corrected towards each value.

    Attributes:
        key_heads, value_heads: Numbers of heads; every key head has the same number of value heads.
        kernel: Number of tokens that the convolution of queries, keys and values covers.
        is_in_turn: Whether there are two input matrices, with rows interleaved by key head; otherwise there are four:
            queries, keys and values; gates; corrections; decays.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_in_turn: bool = True

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Number of elements in a sequence's state: the convolution's last inputs, and one matrix per value head."""
        return (self.kernel - 1) * self.channels + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Mamba 2, a selective state space model that replaces attention.

    Attributes:
        num_heads, head_dim: Number and size of the heads of its values.
        num_groups, state_dim: Number of groups, whose heads share B and C, and size of the state per channel.
        kernel: Number of tokens that the convolution covers.
        has_norm: Whether gated outputs are normalized in their groups.
        scales: Factors of the projected gates, values, B, C and time steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int
    step_limits: tuple[float, float] = (0.0, math.inf)
    has_norm: bool = True
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0

    @property
    def size(self) -> int:
        """Size of all heads together, that is, the number of elements per token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim

    @property
    def state_size(self) -> int:
        """Number of elements in a sequence's state: the last inputs of the convolution and one matrix per head."""
        return (self.kernel - 1) * self.channels + self.num_heads * self.head_dim * self.state_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A gated convolution over the last tokens, which replaces attention (LFM2).

    Attributes:
        kernel: Number of tokens that the convolution covers.
    """

    size: int
    kernel: int

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.size

    @property
    def state_size(self) -> int:
        """Number of elements in a sequence's state: the convolution's last inputs."""
        return (self.kernel - 1) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelMamba:
    """Mamba 1, a selective state space model that replaces attention; each channel has a state and decays of its own.

    Attributes:
        size: Number of channels.
        state_dim: Size of a channel's state.
        step_rank: Rank of the projection of time steps.
        kernel: Number of tokens that the convolution covers.
    """

    size: int
    state_dim: int
    step_rank: int
    kernel: int

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return self.size

    @property
    def state_size(self) -> int:
        """Number of elements in a sequence's state: the convolution's last inputs, and the states of all channels."""
        return (self.kernel - 1 + self.state_dim) * self.size


Recurrent = DeltaNet | Mamba | ChannelMamba | ShortConv
LayerParts = Literal["both", "mixer", "feed_forward"]


@dataclass(frozen=True, slots=True)
class PositionScale:
    """Scales queries according to their position, in layers without rotary embedding (Llama 4).

    The factor is log(floor((p + 1) / floor_scale) + 1) * scale + 1.
    """

    floor_scale: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A decoder: in each layer, attention and a feed-forward network add to the residual stream.

    Attributes:
        architecture: `model_type` of config.json.
        num_kv_heads, head_dim: Shape of cached keys; with `latent`, one head of the size of the latent vector.
        norm_eps: Epsilon of all norms, except those of latent attention.
        norm: The kind of norm: RMS norm, or layer norm, which subtracts the mean.
        norm_offset: Added to the norms' weights.
        has_norm_bias: Whether the norms of the residual stream have biases.
        position_offset: Row position_offset + position of a learned table is added to each embedding; None if there is
            no table.
        norm_place: Whether norms are before attention and the feed-forward network, after them, or both.
        is_parallel: Whether attention and the feed-forward network read the same normalized input.
        has_two_norms: Whether, with `is_parallel`, the feed-forward network has a norm of its own for its input.
        has_grouped_qkv: Whether the rows of the file's matrix of queries, keys and values are in the order of the KV
            heads: for each, its queries, its key and its value.
        has_embedding_norm: Whether embeddings are normalized before the first layer.
        alibi: For each query head, the slope of its attention bias: scores grow by it with each position of the key
            (ALiBi). Empty if there are no biases.
        qk_norm: Norm of queries and keys, over each head or over all heads of a token together.
        has_unit_qk_norm: Whether rotated queries and keys are scaled to unit root mean square (Llama 4).
        rotary: Rotary embedding by layer; None if the layer has none.
        windows: By layer, the number of tokens attended to; None means all.
        num_sink_tokens: Number of first tokens of a sequence that layers attend to beside the last ones in `windows`.
        chunks: By layer, the size of the chunks to which attention is limited; None if there are no chunks.
        scale: Factor of the attention scores.
        softcap: Attention scores s become softcap * tanh(s / softcap); 0 means no soft cap.
        has_sinks: Whether each query head has an attention sink: one extra logit without a value vector.
        has_output_gate: Whether the output of attention is multiplied by a sigmoid gate; the queries and gates of a
            head are adjacent.
        recurrent: By layer, the recurrent part that replaces attention; None if there is none. All have the same kind
            and size.
        is_side_by_side: Whether every layer has both attention and a recurrent part, with the same input and with their
            outputs added.
        ffn_gate_scale, ffn_output_scale: Factors of a plain feed-forward network's gates and output.
        parts: By layer, whether it has attention (or its replacement), a feed-forward network, or both.
        mixtures: By layer, the mixture of experts; None for a plain feed-forward network.
        has_gated_ffn: Whether feed-forward networks and experts multiply the activation by a second product.
        embedding_scale, residual_scale, logits_scale: Factors of embeddings, of additions to the residual stream, and
            of the logits.
        scales_virtual: Whether the factor of embeddings also applies to virtual tokens, as in models whose transformers
            implementation scales `inputs_embeds`.
        logits_softcap: Like `softcap`, but for the logits.
        has_mlp_bias: Whether plain feed-forward networks have biases.
        has_attention_bias: False if attention has no biases; None if this depends on the weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: tuple[Rotary | None, ...]
    windows: tuple[int | None, ...]
    ties_embeddings: bool
    max_sequence_length: int
    scale: float
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    has_norm_bias: bool = False
    position_offset: int | None = None
    norm_place: Literal["before", "after", "around"] = "before"
    is_parallel: bool = False
    has_two_norms: bool = False
    has_grouped_qkv: bool = False
    has_embedding_norm: bool = False
    alibi: tuple[float, ...] = ()
    qk_norm: Literal["head", "row"] | None = None
    has_unit_qk_norm: bool = False
    chunks: tuple[int | None, ...] = ()
    softcap: float = 0.0
    has_sinks: bool = False
    num_sink_tokens: int = 0
    latent: Latent | None = None
    position_scale: PositionScale | None = None
    has_output_gate: bool = False
    recurrent: tuple[Recurrent | None, ...] = ()
    parts: tuple[LayerParts, ...] = ()
    is_side_by_side: bool = False
    attention_output_scale: float = 1.0
    ffn_gate_scale: float = 1.0
    ffn_output_scale: float = 1.0
    activation: Activation = "silu"
    has_gated_ffn: bool = True
    mixtures: tuple[Mixture | None, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    scales_virtual: bool = False
    logits_softcap: float = 0.0
    has_mlp_bias: bool = False
    has_attention_bias: Literal[False] | None = None
    # Sizes of the whole model, which are needed to split the weights among tensor ranks.
    qk_norm_sizes: tuple[int, int] = field(default=(0, 0))

    def __post_init__(self) -> None:
        for name, default in (("chunks", None), ("mixtures", None), ("recurrent", None), ("parts", "both")):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * self.num_layers)
        if self.qk_norm == "row" and not any(self.qk_norm_sizes):
            sizes = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
            object.__setattr__(self, "qk_norm_sizes", sizes)

    @property
    def query_dim(self) -> int:
        """Size of a query head before it is projected into the latent space."""
        return self.head_dim if self.latent is None else self.latent.nope_dim + self.latent.rope_dim

    @property
    def cached_dim(self) -> int:
        """Size of a head in the cache: with ALiBi, keys have additional elements that hold their position."""
        return self.head_dim + (ALIBI_DIM if self.alibi else 0)

    @property
    def query_rows(self) -> int:
        """Number of rows per query head in the query matrix; with an output gate this includes the gate's rows."""
        return self.head_dim * (2 if self.has_output_gate else 1)

    @property
    def value_dim(self) -> int:
        """Number of elements in a head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer has keys and values."""
        return self.parts[layer] != "feed_forward" and (self.is_side_by_side or self.recurrent[layer] is None)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return sum(map(self.has_attention, range(self.num_layers)))

    @property
    def num_recurrent_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return sum(kind is not None for kind in self.recurrent)

    @property
    def state_size(self) -> int:
        """Number of elements of a sequence's state in one recurrent layer; 0 if there are no such layers."""
        return max((kind.state_size for kind in self.recurrent if kind is not None), default=0)

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For each layer, its index among the layers with keys and values, or among those with a recurrent state."""
        if self.is_side_by_side:
            return tuple(range(self.num_layers))
        counts, places = [0, 0], []
        for layer in range(self.num_layers):
            kind = self.recurrent[layer] is not None
            places.append(counts[kind])
            counts[kind] += kind or self.has_attention(layer)
        return tuple(places)

    @property
    def reaches(self) -> tuple[int, ...]:
        """For each layer, how many tokens back a token reads the cache, including itself; 0 means all.

        A recurrent layer reads the state after the previous token; a feed-forward network reads nothing.
        """
        return tuple(
            (2 if self.recurrent[layer] else 1) if not self.has_attention(layer) else self.windows[layer] or 0
            for layer in range(self.num_layers)
        )

    def of_layers(self, layers: range) -> DecoderDescription:
        """Return the description of a model that has only these layers."""
        some = slice(layers.start, layers.stop)
        return replace(
            self,
            num_layers=len(layers),
            rotary=self.rotary[some],
            windows=self.windows[some],
            chunks=self.chunks[some],
            mixtures=self.mixtures[some],
            recurrent=self.recurrent[some],
            parts=self.parts[some],
        )


def narrowed(
    windows: Sequence[int | None], limits: Sequence[int], sink_token_length: int = 0
) -> tuple[int | None, ...]:
    """Return the layers' attention windows, each at most its limit; `limits` are repeated for all layers, and empty for
    none.

    The first `sink_token_length` tokens count as part of each window, so that many tokens fewer follow them.

    Raises:
        ConfigError: A layer would attend to the first tokens only.
    """
    if not limits:
        return tuple(windows)
    limited = [min(window or limit, limit) for window, limit in zip(windows, itertools.cycle(limits), strict=False)]
    if sink_token_length >= min(limited, default=1 + sink_token_length):
        raise ConfigError(
            f"is {sink_token_length}; must be less than the smallest attention window, {min(limited)}",
            field="sink_token_length",
        )
    return tuple(window - sink_token_length for window in limited)


def grouped_rows(d: DecoderDescription) -> Tensor:
    """Return the rows of all queries, then keys, then values in a matrix with the order of `has_grouped_qkv`."""
    each = d.num_heads // d.num_kv_heads + 2
    rows = torch.arange(d.num_kv_heads * each * d.head_dim).view(d.num_kv_heads, each, d.head_dim)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
