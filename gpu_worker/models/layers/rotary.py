"""Tables of rotary position embeddings, for all supported scaling methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midstream.errors import UnsupportedError

if TYPE_CHECKING:
    from gpu_worker.models.description import DecoderDescription

_SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


def rotary_table(
    rope: Mapping[str, Any], dim: int, num_positions: int, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines by position, each float32 [num_positions, dim / 2].

    Args:
        rope: `rope_theta`, and `rope_type` with its settings as in config.json.
        dim: Number of elements of a head that are rotated.
        factors: Divisors of the frequencies, [dim / 2], which replace `rope`'s own scaling; GGUF files store them.

    Raises:
        UnsupportedError: The `rope_type` is not supported.
    """
    kind = rope.get("rope_type", "default")
    if kind not in _SUPPORTED:
        raise UnsupportedError(f"rope type {kind!r} is not one of {', '.join(_SUPPORTED)}", field="model")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    magnitude = 1.0
    if factors is not None:
        frequencies = frequencies / factors
    elif kind == "linear":
        frequencies = frequencies / float(rope["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, rope, dim, num_positions)
    elif kind == "longrope":
        frequencies, magnitude = _longrope(frequencies, rope)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos() * magnitude, angles.sin() * magnitude


def query_scales(description: DecoderDescription) -> Tensor | None:
    """Return the factors by which layers without rotary embedding scale queries, float32 [positions]; None if they do
    not.

    The factors are looked up in a table, because the last bit of a logarithm depends on the element's position in a
    tensor.
    """
    scale = description.position_scale
    if scale is None:
        return None
    steps = torch.floor(torch.arange(1, description.max_sequence_length + 1).float() / scale.floor_scale)
    return torch.log1p(steps) * scale.scale + 1.0


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and interpolate for those in between."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(is_between, blended, scaled)


def _yarn(frequencies: Tensor, rope: Mapping[str, Any], head_dim: int, num_positions: int) -> tuple[Tensor, float]:
    """Interpolate low-frequency dimensions and keep high-frequency ones, with a linear ramp in between."""
    base = float(rope["rope_theta"])
    original = float(rope.get("original_max_position_embeddings") or num_positions)
    factor = float(rope.get("factor") or num_positions / original)

    def dimension_of(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(float(rope.get("beta_fast") or 32)), dimension_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        all_dims, scale = rope.get("mscale_all_dim"), rope.get("mscale")
        magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, all_dims) if scale and all_dims else None
    if magnitude is None:
        magnitude = yarn_magnitude(factor, 1.0)
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(magnitude)


def _longrope(frequencies: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Divide each frequency by its short-context factor; the model never runs beyond its original context length."""
    factor, magnitude = float(rope["factor"]), rope.get("attention_factor")
    if magnitude is None:
        original = float(rope["original_max_position_embeddings"])
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return frequencies / torch.tensor(rope["short_factor"], dtype=torch.float32), float(magnitude)


def yarn_magnitude(factor: float, scale: float) -> float:
    """Return YaRN's attention factor, by which cosines and sines are multiplied."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
