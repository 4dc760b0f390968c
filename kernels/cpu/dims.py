"""Sizes that the compiled decoder and its adapters share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderDims:
    """Sizes of a decoder; scale multiplies the attention scores."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    eps: float
    scale: float
