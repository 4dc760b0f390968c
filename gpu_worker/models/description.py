"""What a Llama-like decoder is made of, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.errors import ConfigError, UnsupportedError

# model_type -> normalizes q and k.
_FAMILY = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}
# What transformers takes where config.json is silent.
_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A decoder: norm, attention, norm, gated feed-forward, in each layer.

    Attributes:
        windows: Per layer, the tokens attended to; None: all.
        rope: `rope_theta`, `rope_type` and its settings.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    ties_embeddings: bool
    normalizes_qk: bool
    has_mlp_bias: bool
    max_sequence_length: int


def describe(config: Mapping[str, Any], max_attention_window: int = 0) -> DecoderDescription:
    """Return the decoder that `config` (config.json) describes.

    Args:
        config: Contents of config.json.
        max_attention_window: Most tokens that a layer attends to; 0: as many as the model does.

    Raises:
        UnsupportedError: An architecture, activation or rope type that is not native here; names it.
        ConfigError: A setting is missing or contradicts another.
    """
    architecture = str(config.get("model_type"))
    if architecture not in _FAMILY:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(_FAMILY)}", field="model"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(f"activation {activation!r} is not supported", field="model")
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ConfigError(f"{num_heads} heads, {num_kv_heads} KV heads of size {head_dim} do not fit", field="model")
    num_layers = _positive(config, "num_hidden_layers")
    return DecoderDescription(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        windows=narrowed(_windows(config, architecture, num_layers), max_attention_window),
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        normalizes_qk=_FAMILY[architecture],
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        max_sequence_length=_positive(config, "max_position_embeddings"),
    )


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {name} is {value!r}", field="model")
    return value


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Older configurations have rope_theta and rope_scaling apart; newer ones rope_parameters."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta") or 10000.0
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedError("rotary embedding of a part of each head is not supported", field="model")
    if rope["rope_type"] == "yarn" and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = _positive(config, "max_position_embeddings")
    return rope


def narrowed(windows: Sequence[int | None], max_attention_window: int) -> tuple[int | None, ...]:
    """Return attention windows of layers, none of them above `max_attention_window`, unless that is 0."""
    if not max_attention_window:
        return tuple(windows)
    return tuple(min(window or max_attention_window, max_attention_window) for window in windows)


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows that transformers gives a model of this configuration, defaults included."""
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    is_used = architecture == "mistral" or (architecture != "llama" and config.get("use_sliding_window", False))
    if window is None or not is_used:
        return (None,) * num_layers
    if not isinstance(window, int) or window <= 0:
        raise ConfigError(f"config.json: sliding_window is {window!r}", field="model")
    if architecture == "mistral":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS))
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(kinds) != num_layers:
        raise ConfigError(f"config.json: {len(kinds)} layer_types for {num_layers} layers", field="model")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"layers of type {', '.join(unknown)} are not supported", field="model")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
