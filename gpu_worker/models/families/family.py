"""Building blocks for the files of families: tensor names, and reading config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from gpu_worker.models.description import DecoderDescription, Rotary
from kernels import Activation
from midstream.errors import ConfigError, UnsupportedError
from midstream.model.text_config import text_config

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# The settings that each supported `rope_type` requires.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
# With more layers, their descriptions alone would fill the memory.
_MOST_LAYERS = 10_000
_ROPE_TYPES = tuple(_ROPE_NUMBERS)
_OPTIONAL_ROPE_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# For each value of `DeltaNet.is_in_turn`, the matrices of queries, keys, values and gates, and those of corrections and
# decays.
DELTA_NET_INPUTS = {
    True: (("in_proj_qkvz",), ("in_proj_ba",)),
    False: (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of tensors in weight files. The names of a layer's tensors are appended to `layer`, where {} is its number.

    Attributes:
        positions: Table of learned position vectors.
        embedding_norm: Norm of the embeddings.
        parallel_norms: Names of input_norm and ffn_norm in models that have both norms in parallel layers.
        transposed: Matrices that the file stores as [inputs, outputs].
        prefixes: Alternatives to the leading `model.`, used when this model is part of a multimodal one.
        qkv: One name each, or one for a matrix of all three.
        gate_up: Names of the gate and up matrices, or one name for both.
        expert_gate_up, expert_down: {} is the expert's index, unless all experts are stacked.
        experts: Whether each expert has its own tensors [outputs, inputs], or all are stacked in one tensor: [experts,
            inputs, outputs] with gate before up or with both interleaved, or [experts, outputs, inputs].
        recurrent_prefix: Prefix of the tensors of the layer that replaces attention.
        shared_gate_up: Like `gate_up`; without a gate, only the last name is used.
    """

    prefixes: tuple[str, ...] = ("model.",)
    embedding: str = "model.embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    parallel_norms: tuple[str, str] | None = None
    transposed: tuple[str, ...] = ()
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    attention_output: str = "self_attn.o_proj"
    attention_output_norm: str = "post_attention_layernorm"
    ffn_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    ffn_output_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: Literal["separate", "stacked", "stacked_in_turn", "stacked_rows"] = "separate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_prefix: str = "mlp.shared_experts."
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    recurrent_prefix: str = "linear_attn."
    latent_q: str = "self_attn.q_proj"
    latent_q_down: str = "self_attn.q_a_proj"
    latent_q_norm: str = "self_attn.q_a_layernorm"
    latent_q_up: str = "self_attn.q_b_proj"
    latent_kv_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_kv_norm: str = "self_attn.kv_a_layernorm"
    latent_kv_up: str = "self_attn.kv_b_proj"

    @property
    def all_prefixes(self) -> tuple[str, ...]:
        """The prefixes, and those of files that contain only the model without its head: transformers leaves the name
        of the part with the layers out.
        """
        return tuple(dict.fromkeys((*self.prefixes, *(prefix.partition(".")[2] for prefix in self.prefixes))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose config.json is read in the same way.

    Attributes:
        types: Values of `model_type` in config.json.
        read: Converts config.json to a description.
    """

    title: str
    types: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], DecoderDescription]
    names: Names = Names()
    reads_gguf: bool = False


# If set, the names of the settings that are read are added to it, to find those that have no effect.
settings_read: ContextVar[set[str] | None] = ContextVar("settings_read", default=None)


class Settings:
    """The settings of config.json, with transformers' defaults."""

    def __init__(self, config: Mapping[str, Any], **defaults: Any) -> None:
        self._values = {**defaults, **text_config(config)}
        self._values["model_type"] = config.get("model_type")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default if it is missing or null."""
        seen = settings_read.get()
        if seen is not None:
            seen.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def size(self, name: str, *others: str, default: int | None = None) -> int:
        """Return a positive integer: the setting under the first of these names that is set. Raises ConfigError if the
        setting is missing, not a positive integer, or a number of layers that is too large.
        """
        found = next((key for key in (name, *others) if self._values.get(key) is not None), name)
        value = self.get(found, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"config.json: {found} must be a positive integer; got {value!r}", field="model")
        if name == "num_hidden_layers" and value > _MOST_LAYERS:
            raise ConfigError(f"config.json: {found} must be at most {_MOST_LAYERS}; got {value}", field="model")
        return value

    def count(self, name: str, default: int) -> int:
        """Return a non-negative integer. Raises ConfigError otherwise."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"config.json: {name} must be an integer of at least 0; got {value!r}", field="model")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number. Raises ConfigError if it is not one, or is missing and has no default."""
        value = self.get(name, default)
        if not _is_number(value):
            raise ConfigError(f"config.json: {name} must be a number; got {value!r}", field="model")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises ConfigError if it is not one, or is missing and has no default."""
        value = self.number(name, default)
        if value <= 0:
            raise ConfigError(f"config.json: {name} must be a positive number; got {value!r}", field="model")
        return value

    def numbers(self, name: str, count: int, default: Sequence[float] | None = None) -> list[float]:
        """Return `count` finite numbers. Raises ConfigError if the setting is not such a list, or is missing and has no
        default.
        """
        values = self.get(name, default)
        if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_number, values)):
            raise ConfigError(f"config.json: {name} must be a list of {count} numbers; got {values!r}", field="model")
        return [float(value) for value in values]

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises ConfigError if the setting is not a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name} must be true or false; got {value!r}", field="model")
        return value

    def indices(self, name: str, default: Iterable[int] = ()) -> frozenset[int]:
        """Return the indices of some of the layers. Raises ConfigError if the setting is not a list of integers."""
        values = self.get(name)
        if values is None:
            return frozenset(default)
        if not isinstance(values, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
            raise ConfigError(f"config.json: {name} must be a list of layers; got {values!r}", field="model")
        return frozenset(values)

    def group(self, name: str) -> Mapping[str, Any]:
        """Return an object of config.json; empty if missing or null. Raises ConfigError if it is not an object."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} must be an object; got {value!r}", field="model")
        return value

    def layers(self, name: str) -> list[Any] | None:
        """Return a list with one entry per layer; None if missing or empty. Raises ConfigError for another length."""
        values = self.get(name)
        if values is None or values == []:
            return None
        num_layers = self.size("num_hidden_layers")
        if not isinstance(values, list) or len(values) != num_layers:
            raise ConfigError(f"config.json: {name} must have {num_layers} entries", field="model")
        return values

    def refuse(self, **wanted: Any) -> None:
        """Raise an error if a setting has any value other than the supported one.

        Raises:
            UnsupportedError: The message names the setting.
        """
        for name, value in wanted.items():
            if self.get(name, value) != value:
                raise UnsupportedError(f"{name} {self.get(name)!r} of config.json is not supported", field="model")


def plain(s: Settings, **changes: Any) -> DecoderDescription:
    """Return the description of a Llama-like decoder with some changes. Raises UnsupportedError if the activation or
    rope type is not supported, or ConfigError if a setting is missing or invalid.
    """
    num_heads, hidden_size = s.size("num_attention_heads"), s.size("hidden_size")
    num_layers = s.size("num_hidden_layers")
    head_dim = s.size("head_dim", default=hidden_size // num_heads)
    fields: dict[str, Any] = {
        "architecture": str(s.get("model_type")),
        "vocab_size": s.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": changes.get("intermediate_size") or s.size("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": s.size("num_key_value_heads", default=num_heads),
        "head_dim": head_dim,
        "norm_eps": s.number("rms_norm_eps", 1e-6),
        "windows": (None,) * num_layers,
        "ties_embeddings": s.flag("tie_word_embeddings", False),
        "has_mlp_bias": s.flag("mlp_bias", False),
        "has_attention_bias": None if s.flag("attention_bias", True) else False,
        "max_sequence_length": s.size("max_position_embeddings"),
        "scale": head_dim**-0.5,
        "activation": activation_of(s.get("hidden_act", "silu")),
    }
    if "rotary" not in changes:
        fields["rotary"] = (rotary_of(s, head_dim),) * num_layers
    return DecoderDescription(**{**fields, **changes})


def activation_of(name: object) -> Activation:
    """Return an activation, given its name in transformers. Raises UnsupportedError if it is not supported."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedError(f"activation {name!r} of config.json is not supported", field="model")
    return _ACTIVATIONS[name]


def rotary_of(s: Settings, head_dim: int, *, part: float | None = None, is_interleaved: bool = False) -> Rotary:
    """Return the rotary embedding defined by `rope_parameters` or, in older files, by `rope_theta` and
    `rope_scaling`.

    Args:
        part: Default of the fraction of a head that is rotated; None if the family rotates whole heads.

    Raises:
        UnsupportedError: The `rope_type` is not supported, or the family has no partial rotary embedding.
        ConfigError: A setting is missing or invalid.
    """
    settings = s.group("rope_scaling") or s.group("rope_parameters")
    # Unlike settings for each type of layer, these are overridden by the length at the top level.
    original = s.get("original_max_position_embeddings")
    rope = rope_of(s, settings if original is None else {**settings, "original_max_position_embeddings": original})
    share = Settings(settings).number("partial_rotary_factor", s.number("partial_rotary_factor", part or 1.0))
    if part is None and share != 1.0:
        raise UnsupportedError(f"partial_rotary_factor {share} of config.json is not supported", field="model")
    return checked_rotary(rope, int(head_dim * share), head_dim, is_interleaved=is_interleaved)


def checked_rotary(rope: Mapping[str, Any], dim: int, head_dim: int, *, is_interleaved: bool = False) -> Rotary:
    """Return a rotary embedding of `dim` elements with settings of `rope_of`. Raises ConfigError if they do not fit."""
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"config.json: the rotary embedding covers {dim} elements of head_dim {head_dim}; must be even",
            field="model",
        )
    if rope["rope_type"] == "longrope":
        Settings(rope).numbers("short_factor", dim // 2)
    return Rotary(rope, dim, is_interleaved)


def rope_of(s: Settings, settings: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Return one set of rotary settings, with defaults for missing ones. Raises UnsupportedError if the `rope_type` is
    not supported, or ConfigError if a setting is missing or invalid.
    """
    given = Settings(settings)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_TYPES:
        known = ", ".join(_ROPE_TYPES)
        raise UnsupportedError(f"rope_type {kind!r} of config.json is not one of {known}", field="model")
    rope = {**settings, "rope_type": kind, "rope_theta": given.positive("rope_theta", s.positive("rope_theta", theta))}
    for name in _ROPE_NUMBERS[kind]:
        rope[name] = given.positive(name)
    for name in _OPTIONAL_ROPE_NUMBERS:
        if given.get(name) is not None:
            rope[name] = given.number(name) if name.startswith("mscale") else given.positive(name)
    if kind in ("llama3", "yarn", "longrope"):
        longest = s.size("max_position_embeddings")
        rope["original_max_position_embeddings"] = given.size("original_max_position_embeddings", default=longest)
        if rope.get("factor") is None:
            rope["factor"] = longest / rope["original_max_position_embeddings"]
    if kind == "dynamic":
        # The frequencies change only in sequences that are longer than max_position_embeddings.
        rope["rope_type"] = "default"
    return rope


def windows_of(s: Settings, window: object, kinds: list[Any] | None) -> tuple[int | None, ...]:
    """Return each layer's window according to its kind in `layer_types`; if there are no kinds, all layers have the
    window. Raises ConfigError if the window is not a positive number, or UnsupportedError if a layer is of another
    kind.
    """
    num_layers = s.size("num_hidden_layers")
    kinds = ["sliding_attention"] * num_layers if kinds is None else kinds
    check_kinds(kinds, {"full_attention", "sliding_attention"})
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window <= 0):
        raise ConfigError(f"config.json: sliding_window must be a positive number; got {window!r}", field="model")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_kinds(kinds: Iterable[object], known: Set[str]) -> None:
    """Raise UnsupportedError if a layer is of an unknown kind."""
    unknown = sorted({str(kind) for kind in kinds} - known)
    if unknown:
        raise UnsupportedError(f"layers of type {', '.join(unknown)} in config.json are not supported", field="model")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
