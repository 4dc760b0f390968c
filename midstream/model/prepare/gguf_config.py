"""Writes the metadata of a GGUF file as config.json, with transformers' names.

Where a file leaves a setting out, llama.cpp's default is written: transformers has others for some families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from midstream.errors import ConfigError, UnsupportedError
from midstream.model.prepare.gguf_file import Metadata, MetadataValue
from midstream.model.prepare.gguf_special_tokens import special_tokens_of

_Config = dict[str, object]


class Keys:
    """The keys of a file's architecture.

    Attributes:
        tensors: Names of the tensors.
        vector: Returns the values of a tensor of float32.
    """

    def __init__(self, metadata: Metadata, tensors: Collection[str], vector: Callable[[str], list[float]]) -> None:
        self.metadata, self.tensors, self.vector = metadata, tensors, vector
        self.architecture = str(metadata.get("general.architecture", ""))

    def get(self, name: str, default: MetadataValue | None = None) -> MetadataValue:
        """Return a value. Raises ConfigError if it is missing and has no default."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ConfigError(f"the GGUF file lacks {self.architecture}.{name}", field="model")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ConfigError otherwise."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self.architecture}.{name} must be a positive integer; got {value}", field="model")
        return value

    def count(self, name: str) -> int:
        """Return an integer of at least 0, by default 0. Raises ConfigError otherwise."""
        return self.size(name) if self.get(name, 0) != 0 else 0

    def number(self, name: str) -> float | None:
        """Return a number; None if there is none. Raises ConfigError if the value is of another type."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.architecture}.{name} must be a number; got {value!r}", field="model")
        return value

    @property
    def head_dim(self) -> int:
        heads = self.size("attention.head_count")
        return self.size("attention.key_length", self.size("embedding_length") // heads)

    @property
    def rotated(self) -> int:
        """Number of rotated elements of each head."""
        return self.size("rope.dimension_count", self.head_dim)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How an architecture is described to transformers.

    Attributes:
        settings: Returns what differs from Llama's config.json.
        rotates_parts: Whether a part of each head may be rotated.
        has_experts: Whether it may have experts.
    """

    model_type: str
    class_name: str
    settings: Callable[[Keys], _Config] = lambda _: {}
    rotates_parts: bool = False
    has_experts: bool = False


def build_config(
    metadata: Metadata, tensors: Collection[str], vector: Callable[[str], list[float]] = lambda _: []
) -> _Config:
    """Return the contents of config.json.

    Args:
        tensors: Names of the tensors.
        vector: Returns the values of a tensor of float32.

    Raises:
        ConfigError: A setting is missing or has a wrong type.
        UnsupportedError: The architecture or a setting is not supported.
    """
    keys = Keys(metadata, tensors, vector)
    described = _described(keys)
    if not described.has_experts and (num_experts := keys.get("expert_count", 0)):
        raise UnsupportedError(f"{keys.architecture}.expert_count {num_experts} is not supported", field="model")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    assert not isinstance(tokens, (int, float))
    config: _Config = {
        "architectures": [described.class_name],
        "model_type": described.model_type,
        "vocab_size": keys.get("vocab_size", len(tokens)),
        "hidden_size": keys.size("embedding_length"),
        "num_hidden_layers": keys.size("block_count") - keys.count("nextn_predict_layers"),
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": keys.get("attention.head_count_kv", keys.size("attention.head_count")),
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.get("context_length"),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
        **special_ids(metadata),
    }
    if (epsilon := keys.number("attention.layer_norm_rms_epsilon")) is not None:
        config["rms_norm_eps"] = epsilon
    elif keys.number("attention.layer_norm_epsilon") is None:
        raise ConfigError(f"the GGUF file lacks {keys.architecture}.attention.layer_norm_rms_epsilon", field="model")
    config["intermediate_size"] = metadata.get(f"{keys.architecture}.feed_forward_length")
    # The setting is also written if there is no window: a missing setting would get a default.
    config["sliding_window"] = keys.count("attention.sliding_window") or None
    if keys.rotated != keys.head_dim:
        if not described.rotates_parts:
            raise UnsupportedError(
                f"{keys.architecture}.rope.dimension_count {keys.rotated} is not supported; must be {keys.head_dim}, a "
                "whole head",
                field="model",
            )
        config["partial_rotary_factor"] = keys.rotated / keys.head_dim
    elif described.rotates_parts:
        config["partial_rotary_factor"] = 1.0
    own = described.settings(keys)
    if "rope_scaling" not in own and (scaling := _rope_scaling(keys)) is not None:
        config["rope_scaling"] = scaling
    config |= own
    if config["intermediate_size"] is None:
        raise ConfigError(f"the GGUF file lacks {keys.architecture}.feed_forward_length", field="model")
    return config


def _described(keys: Keys) -> _Architecture:
    described = _ARCHITECTURES.get(keys.architecture)
    if described is None:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedError(
            f"GGUF architecture {keys.architecture!r} is not supported; supported are {known}", field="model"
        )
    if keys.architecture == "llama" and keys.count("expert_count"):
        return _MIXTRAL
    if keys.architecture == "olmo2" and keys.count("attention.sliding_window"):
        return _OLMO3
    return described


def special_ids(metadata: Metadata) -> _Config:
    """Return the ids of the special tokens that config.json and generation_config.json name."""
    special = special_tokens_of(metadata)
    found: _Config = {
        name: special.named[key]
        for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding"))
        if key in special.named
    }
    if special.ends:
        found["eos_token_id"] = special.ends[0] if len(special.ends) == 1 else list(special.ends)
    return found


def _rope_scaling(keys: Keys) -> _Config | None:
    """Return `rope_scaling` of config.json; None if rotary frequencies are not scaled."""
    number, prefix = keys.number, f"{keys.architecture}.rope."
    # Older files have the factor of linear scaling under another name.
    factor = number("rope.scaling.factor") or number("rope.scale_linear")
    kind = keys.get("rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"rope scaling {kind!r} is not known", field="model")
    multiplier = number("rope.scaling.attn_factor")
    if kind != "yarn" and multiplier not in (None, 1):
        raise UnsupportedError(f"{prefix}scaling.attn_factor {multiplier} is supported only with yarn", field="model")
    if kind == "none":
        return None
    _check_extrapolation(number("rope.scaling.yarn_ext_factor"), kind, prefix)
    if factor is None:
        raise ConfigError(f"the GGUF file lacks {prefix}scaling.factor", field="model")
    scaling: _Config = {"rope_type": kind, "factor": factor}
    if original := keys.count("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        magnitude = number("rope.scaling.yarn_attn_factor")
        # llama.cpp's attn_factor multiplies the factor derived from the scale; transformers' attention_factor replaces
        # it.
        if multiplier is not None:
            magnitude = multiplier * (magnitude or 1 + 0.1 * math.log(max(factor, 1)))
        found = {
            "attention_factor": magnitude,
            "beta_fast": number("rope.scaling.yarn_beta_fast"),
            "beta_slow": number("rope.scaling.yarn_beta_slow"),
        }
        scaling |= {name: value for name, value in found.items() if value is not None}
    return scaling


def _check_extrapolation(factor: float | None, kind: MetadataValue, prefix: str) -> None:
    """Raise UnsupportedError if `factor` mixes two kinds of scaling; a negative factor means the kind's default."""
    usual = int(kind == "yarn")
    if factor is not None and factor >= 0 and factor != usual:
        raise UnsupportedError(
            f"{prefix}scaling.yarn_ext_factor {factor:g} is not supported with {kind}; must be {usual}", field="model"
        )


# Where llama.cpp takes the scale of attention from the model's size, by the number of layers: those of 27B.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _gemma(_: Keys) -> _Config:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys) -> _Config:
    return {
        **_gemma_scale(keys),
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping") or 30.0,
    }


def _gemma3(keys: Keys) -> _Config:
    return {
        **_gemma_scale(keys),
        "sliding_window": keys.size("attention.sliding_window", 1024),
        "sliding_window_pattern": _pattern(keys, 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa") or 10000.0,
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }


def _gemma_scale(keys: Keys) -> _Config:
    is_27b = keys.size("block_count") == _GEMMA_27B_LAYERS[keys.architecture]
    scaled = keys.size("embedding_length") // keys.size("attention.head_count") if is_27b else keys.head_dim
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scaled}


def _pattern(keys: Keys, default: int) -> int:
    """Return n if every n-th layer attends to all tokens. Raises UnsupportedError for other patterns."""
    value = keys.get("attention.sliding_window_pattern", default)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, list):
        first = next((i for i, has_window in enumerate(value) if not has_window), len(value))
        if all(bool(has_window) == bool((i + 1) % (first + 1)) for i, has_window in enumerate(value)):
            return first + 1
    raise UnsupportedError(
        f"{keys.architecture}.attention.sliding_window_pattern {value} is not supported", field="model"
    )


def _phi3(keys: Keys) -> _Config:
    original = keys.count("rope.scaling.original_context_length") or keys.size("context_length")
    found: _Config = {"original_max_position_embeddings": original}
    if "rope_factors_short.weight" in keys.tensors:
        scaling: _Config = {
            "rope_type": "longrope",
            "short_factor": keys.vector("rope_factors_short.weight"),
            "long_factor": keys.vector("rope_factors_long.weight"),
        }
        if (factor := keys.number("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = factor
        found["rope_scaling"] = scaling
    return found


def _granite(keys: Keys) -> _Config:
    return {
        "embedding_multiplier": keys.number("embedding_scale") or 1.0,
        "attention_multiplier": keys.number("attention.scale") or keys.head_dim**-0.5,
        "residual_multiplier": keys.number("residual_scale") or 1.0,
        "logits_scaling": keys.number("logit_scale") or 1.0,
    }


def _granite_moe(keys: Keys) -> _Config:
    return {
        **_granite(keys),
        **_experts(keys),
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length"),
    }


def _experts(keys: Keys) -> _Config:
    count, used = keys.size("expert_count"), keys.size("expert_used_count")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def _qwen3_moe(keys: Keys) -> _Config:
    return {
        **_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size": keys.size("feed_forward_length", keys.size("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _qwen2_moe(keys: Keys) -> _Config:
    return {
        **_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _olmoe(keys: Keys) -> _Config:
    return {**_experts(keys), "norm_topk_prob": False}


def _gpt_oss(keys: Keys) -> _Config:
    scaling = _rope_scaling(keys)
    return {
        **_experts(keys),
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "attention_bias": True,
        # OpenAI's frequencies are not rounded to whole dimensions.
        "rope_parameters": {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False},
        "rope_scaling": None,
    }


def _glm4_moe(keys: Keys) -> _Config:
    if (function := keys.get("expert_gating_func", 2)) != 2:
        raise UnsupportedError(f"glm4moe.expert_gating_func {function} is not supported; must be 2", field="model")
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def _cohere(keys: Keys) -> _Config:
    return {
        "layer_norm_eps": keys.get("attention.layer_norm_epsilon"),
        "logit_scale": keys.get("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
    }


def _cohere2(keys: Keys) -> _Config:
    return {**_cohere(keys), "sliding_window_pattern": _pattern(keys, 4)}


def _lfm2(keys: Keys) -> _Config:
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, list) or not all(type(number) is int for number in heads):
        raise ConfigError("lfm2.attention.head_count_kv must be a list with a number for each layer", field="model")
    return {
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "num_key_value_heads": max(heads),
        "norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in keys.tensors,
    }


def _lfm2_moe(keys: Keys) -> _Config:
    return {
        **_lfm2(keys),
        **_experts(keys),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "num_dense_layers": keys.count("leading_dense_block_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def _deepseek2(keys: Keys) -> _Config:
    if (function := keys.get("expert_gating_func", 1)) != 2:  # DeepSeek-V2 has softmax
        raise UnsupportedError(f"deepseek2.expert_gating_func {function} is not supported; must be 2", field="model")
    key_size = keys.size("attention.key_length_mla", keys.size("attention.key_length"))
    rotated = keys.size("rope.dimension_count")
    found: _Config = {
        "head_dim": rotated,  # that of the part of a head which is rotated as a whole
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": keys.size("attention.head_count"),
        "q_lora_rank": keys.count("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_size - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.size("attention.value_length_mla", keys.size("attention.value_length")),
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "n_group": keys.count("expert_group_count") or 1,
        "topk_group": keys.count("expert_group_used_count") or 1,
    }
    scaling = _rope_scaling(keys)
    if scaling is not None:
        # The converter multiplies this setting by 0.1.
        magnitude = 10 * (keys.number("rope.scaling.yarn_log_multiplier") or 0.0)
        scaling = {key: value for key, value in scaling.items() if key != "attention_factor"}
        found["rope_scaling"] = {**scaling, "mscale": magnitude, "mscale_all_dim": magnitude}
    return found


def _bert(keys: Keys) -> _Config:
    if keys.metadata.get(f"{keys.architecture}.attention.causal"):
        raise UnsupportedError(f"{keys.architecture}.attention.causal is not supported; must be false", field="model")
    if any(name.startswith("cls.") for name in keys.tensors):
        raise UnsupportedError("GGUF files of rerankers and classifiers are not supported", field="model")
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": keys.get("attention.layer_norm_epsilon"),
        "type_vocab_size": keys.metadata.get("tokenizer.ggml.token_type_count", 1),
        "pad_token_id": special_tokens_of(keys.metadata).ids.get("padding", 0),
    }


def _nomic_bert(keys: Keys) -> _Config:
    theta = keys.number("rope.freq_base") or 10000.0
    scaling = _rope_scaling(keys) or {"rope_type": "default"}
    return {**_bert(keys), "hidden_act": "silu", "rope_parameters": {**scaling, "rope_theta": theta}}


def pooling_of(metadata: Metadata) -> str | None:
    """Return how the states of a text's tokens become its vector, by the name in sentence-transformers; None if the
    file does not say.
    """
    return _POOLING.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))


# By llama.cpp's number. 0 is none, and 4 scores of a head.
_POOLING: dict[MetadataValue | None, str] = {1: "mean", 2: "cls", 3: "lasttoken"}


def _with_biases(keys: Keys) -> _Config:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.tensors, "attention_out_bias": False}


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", has_experts=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": _Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, has_experts=True),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, has_experts=True),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", _gemma),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", _phi3, rotates_parts=True),
    "granite": _Architecture("granite", "GraniteForCausalLM", _granite),
    "granitemoe": _Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", _granite_moe, has_experts=True),
    "olmo2": _Architecture("olmo2", "Olmo2ForCausalLM"),
    "olmoe": _Architecture("olmoe", "OlmoeForCausalLM", _olmoe, has_experts=True),
    "glm4": _Architecture("glm4", "Glm4ForCausalLM", _with_biases, rotates_parts=True),
    "glm4moe": _Architecture("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, rotates_parts=True, has_experts=True),
    "gpt-oss": _Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, has_experts=True),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM"),
    "command-r": _Architecture("cohere", "CohereForCausalLM", _cohere),
    "cohere2": _Architecture("cohere2", "Cohere2ForCausalLM", _cohere2),
    "seed_oss": _Architecture("seed_oss", "SeedOssForCausalLM", _with_biases),
    "ernie4_5": _Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "lfm2": _Architecture("lfm2", "Lfm2ForCausalLM", _lfm2),
    "lfm2moe": _Architecture("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2_moe, has_experts=True),
    "deepseek2": _Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", _deepseek2, rotates_parts=True, has_experts=True
    ),
    "bert": _Architecture("bert", "BertModel", _bert),
    "nomic-bert": _Architecture("nomic_bert", "NomicBertModel", _nomic_bert),
    "arcee": _Architecture("arcee", "ArceeForCausalLM", lambda _: {"hidden_act": "relu2"}),
}
# These have the architecture of another family in their files.
_MIXTRAL = _Architecture("mixtral", "MixtralForCausalLM", _experts, has_experts=True)
_OLMO3 = _Architecture("olmo3", "Olmo3ForCausalLM")


def sampling_of(metadata: Metadata) -> Mapping[str, object]:
    """Return the sampling parameters that a file recommends, by their names in generation_config.json."""
    values = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in values.items() if value is not None}


# Names of sampling parameters in llama.cpp, and in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
