"""Sizes shared by the compiled decoder and its adapters."""

from dataclasses import dataclass

from kernels.activation import Activation


@dataclass(frozen=True)
class DecoderDims:
    """Sizes and architecture variants of a decoder.

    scale multiplies the attention scores; with a softcap above 0 scores become softcap * tanh(score / softcap). The
    first rotary_dim elements of each head are rotated (0 means all of them), in adjacent pairs if is_interleaved. Norms
    are RMS norms, unless has_layer_norm. norms_qk_rows: q_norm and k_norm normalize all heads of a token together.
    has_unit_qk_norm: rotated queries and keys are scaled to unit root mean square. is_parallel: the feed-forward
    network has the same input as attention. gate_up is packed as gated only if the activation is silu.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    eps: float
    scale: float
    rotary_dim: int = 0
    is_interleaved: bool = False
    has_layer_norm: bool = False
    norms_qk_rows: bool = False
    has_unit_qk_norm: bool = False
    is_parallel: bool = False
    activation: Activation = "silu"
    softcap: float = 0.0
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0

    @property
    def num_angles(self) -> int:
        """Number of pairs of elements per head that are rotated."""
        return (self.rotary_dim or self.head_dim) // 2
