"""Model families with native support; each file describes one family's architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpu_worker.models.description import DecoderDescription, DeltaNet, Mamba, Mixture, narrowed
from gpu_worker.models.families.alibi import BLOOM, FALCON, GPT_NEOX, MPT
from gpu_worker.models.families.arcee import ARCEE
from gpu_worker.models.families.cohere2 import COHERE, COHERE2
from gpu_worker.models.families.deepseek import DEEPSEEK, GLM_LITE
from gpu_worker.models.families.dots import DOTS1
from gpu_worker.models.families.ernie import ERNIE4_5, ERNIE4_5_MIXTURE
from gpu_worker.models.families.exaone import EXAONE4, EXAONE_MIXTURE
from gpu_worker.models.families.family import Family, Settings
from gpu_worker.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from gpu_worker.models.families.glm import GLM, GLM4, GLM_MIXTURE, SOLAR_OPEN
from gpu_worker.models.families.gpt import GPT2, OPT, PHI, STABLELM, STARCODER2
from gpu_worker.models.families.gpt_oss import GPT_OSS
from gpu_worker.models.families.granite import GRANITE, GRANITE_MIXTURE
from gpu_worker.models.families.lfm2 import LFM2
from gpu_worker.models.families.llama import CWM, HELIUM, LLAMA, SEED_OSS
from gpu_worker.models.families.llama4 import LLAMA4
from gpu_worker.models.families.mamba import BAMBA, FALCON_H1, GRANITE_HYBRID, MAMBA, MAMBA2, NEMOTRON_H
from gpu_worker.models.families.minimax import MINIMAX_M2
from gpu_worker.models.families.mistral import MINISTRAL, MISTRAL, MIXTRAL
from gpu_worker.models.families.multimodal import IDEFICS3, INTERNVL, LLAVA, LLAVA_NEXT, MISTRAL3
from gpu_worker.models.families.olmo import FLEX_OLMO, OLMO2, OLMO3, OLMOE
from gpu_worker.models.families.phi3 import PHI3
from gpu_worker.models.families.qwen import QWEN, QWEN3_5, QWEN_MIXTURE, QWEN_NEXT
from gpu_worker.models.families.smollm3 import SMOLLM3
from midstream.errors import ConfigError, UnsupportedError

FAMILIES = (
    LLAMA, LLAMA4, QWEN, QWEN_MIXTURE, MISTRAL, MIXTRAL, GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, OLMOE, GRANITE, GLM, GLM4,
    GLM_MIXTURE, GPT_OSS, DEEPSEEK, SMOLLM3, COHERE2, QWEN_NEXT, QWEN3_5, MAMBA2, NEMOTRON_H, GRANITE_HYBRID,
    BAMBA, FALCON_H1, LFM2, PHI, STARCODER2, STABLELM, GPT2, OPT, OLMO3, SEED_OSS,
    EXAONE4, ERNIE4_5, MINIMAX_M2, IDEFICS3, ARCEE, DOTS1, GRANITE_MIXTURE,
    GLM_LITE, ERNIE4_5_MIXTURE, COHERE, MINISTRAL, SOLAR_OPEN, EXAONE_MIXTURE, CWM, HELIUM, FLEX_OLMO,
    GPT_NEOX, FALCON, BLOOM, MPT, MAMBA, LLAVA, LLAVA_NEXT, MISTRAL3, INTERNVL,
)  # fmt: skip
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.types}


def family_of(model_type: str) -> Family:
    """Return the family for a `model_type` of config.json.

    Raises:
        UnsupportedError: No family has this type; the message lists the supported ones.
    """
    if model_type not in _BY_TYPE:
        known = ", ".join(_BY_TYPE)
        raise UnsupportedError(f"architecture {model_type!r} is not supported; supported are {known}", field="model")
    return _BY_TYPE[model_type]


def describe(
    config: Mapping[str, Any], window_limits: Sequence[int] = (), sink_token_length: int = 0
) -> DecoderDescription:
    """Return the description of the decoder that `config` (config.json) defines.

    Args:
        window_limits: Upper limits of the tokens that layers attend to, as in `narrowed`; empty means the model's own.
        sink_token_length: Number of first tokens in each layer's window, which layers always attend to.

    Raises:
        UnsupportedError: An architecture, activation or rope type has no native support; the message names it.
        ConfigError: A setting is missing or contradicts another.
    """
    family = family_of(str(config.get("model_type")))
    Settings(config).refuse(per_layer_config=None)
    description = family.read(config)
    _check(description)
    if sink_token_length and any(description.chunks):
        raise ConfigError("cannot be used with layers that attend to chunks; use 0", field="sink_token_length")
    # Beyond this length, LongRoPE changes the angles of all positions, including those already cached.
    lengths = [
        int(rotary.settings["original_max_position_embeddings"])
        for rotary in description.rotary
        if rotary is not None and rotary.settings["rope_type"] == "longrope"
    ]
    return replace(
        description,
        windows=narrowed(description.windows, window_limits, sink_token_length),
        num_sink_tokens=sink_token_length,
        max_sequence_length=min([description.max_sequence_length, *lengths]),
    )


def _check(d: DecoderDescription) -> None:
    """Raise ConfigError if sizes do not fit together."""
    _must_divide("num_attention_heads", d.num_heads, "num_key_value_heads", d.num_kv_heads)
    for kind in d.recurrent:
        if kind is not None and kind.kernel < 2:
            raise ConfigError("config.json: a convolution must cover at least 2 tokens", field="model")
        if isinstance(kind, DeltaNet):
            _must_divide("linear_num_value_heads", kind.value_heads, "linear_num_key_heads", kind.key_heads)
        elif isinstance(kind, Mamba):
            _must_divide("the number of Mamba heads", kind.num_heads, "the number of groups", kind.num_groups)
    for mixture in d.mixtures:
        if mixture is not None:
            _check_mixture(mixture)


def _check_mixture(mixture: Mixture) -> None:
    """Raise ConfigError if too few experts can be chosen."""
    _must_divide("the number of experts", mixture.num_experts, "n_group", mixture.num_groups)
    if mixture.num_active_groups > mixture.num_groups:
        raise ConfigError(
            f"config.json: topk_group is {mixture.num_active_groups}; n_group is {mixture.num_groups}", field="model"
        )
    if mixture.num_active_groups < mixture.num_groups and mixture.num_experts < 2 * mixture.num_groups:
        raise ConfigError(
            f"config.json: {mixture.num_experts} experts in {mixture.num_groups} groups; each must have at least 2",
            field="model",
        )
    num_candidates = mixture.num_experts // mixture.num_groups * mixture.num_active_groups
    if mixture.num_active > num_candidates:
        raise ConfigError(
            f"config.json: each token uses {mixture.num_active} experts; must be at most {num_candidates}",
            field="model",
        )


def _must_divide(name: str, number: int, divisor_name: str, divisor: int) -> None:
    if number % divisor:
        raise ConfigError(
            f"config.json: {name} ({number}) must be a multiple of {divisor_name} ({divisor})", field="model"
        )


__all__ = ["FAMILIES", "Family", "describe", "family_of"]
