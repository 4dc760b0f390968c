"""Unusual, damaged and missing settings in config.json: the model's logits equal those of transformers, or the model is
rejected with an error that names the setting.

By default a sample of the settings of each family is tested. To test all of them, set TEST_ALL_FAMILIES=1.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_worker.models.description import DecoderDescription, Rotary
from gpu_worker.models.families import describe
from gpu_worker.models.layers.rotary import rotary_table
from midstream.errors import ConfigError, UnsupportedError
from tests.gpu_worker.test_families import MODELS, OTHER_TYPES, TOLERANCE, WINDOWED
from tests.gpu_worker.test_models import Recorder, expected_logits, prompt
from tests.gpu_worker.tiny_models import SHAPE, Driver, make_runner, make_tiny_model

FAMILIES = MODELS | OTHER_TYPES
NUM_SETTINGS = None if os.environ.get("TEST_ALL_FAMILIES") else 2
JUNK: tuple[Any, ...] = ("x", "", -1, 0, 1.5, float("nan"), float("inf"), True, [], ["x"], [None], {}, {"a": 1}, 10**12)
# If one of these settings is missing, the shapes of the weights reveal the mistake, so it is not tested here.
SHOWN_BY_WEIGHTS = ("num_key_value_heads", "attention_bias", "num_experts", "intermediate_size")


def config_of(name: str) -> tuple[type[transformers.PretrainedConfig], dict[str, Any]]:
    """Return a family's class of configurations in transformers, and the config.json of its tiny model."""
    family, settings = FAMILIES[name]
    kind = getattr(transformers, f"{family}Config")
    settings = copy.deepcopy(settings)
    if "text_config" in kind.sub_configs:
        settings["text_config"] = SHAPE | settings["text_config"]
    else:
        settings = SHAPE | settings
    return kind, json.loads(kind(**settings).to_json_string(use_diff=False))


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def refusal(config: dict[str, Any]) -> str | None:
    """Return why a configuration is refused; None if it is accepted."""
    try:
        describe(config)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return None


def sample(name: str, keys: list[str], count: int | None) -> list[str]:
    return keys if count is None else random.Random(name).sample(keys, min(count, len(keys)))


def effect(d: DecoderDescription) -> dict[str, object]:
    """Return everything in a description that affects results, in comparable form."""

    def angles(rotary: Rotary | None) -> object:
        if rotary is None:
            return None
        cos, sin = rotary_table(rotary.settings, rotary.dim, 64)
        return rotary.dim, rotary.is_interleaved, cos[-1].tolist(), sin[33].tolist()

    fields = {field.name: getattr(d, field.name) for field in dataclasses.fields(d)}
    kinds = {id(rotary): angles(rotary) for rotary in d.rotary}
    return fields | {"rotary": [kinds[id(rotary)] for rotary in d.rotary]}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_setting_has_the_value_that_transformers_gives_it(name: str) -> None:
    kind, config = config_of(name)
    keys = [key for key in text_of(config) if key not in (*SHOWN_BY_WEIGHTS, "model_type")]
    for key in sample(name, keys, NUM_SETTINGS):
        bare = copy.deepcopy(config)
        del text_of(bare)[key]
        try:
            completed = json.loads(kind.from_dict(copy.deepcopy(bare)).to_json_string(use_diff=False))
            expected = effect(describe(completed))
        except Exception:  # noqa: BLE001 (transformers raises anything for an odd configuration)
            continue
        message = refusal(bare)
        if message is None:
            assert effect(describe(bare)) == expected, key
        else:
            assert "config.json" in message


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_of_a_wrong_type_are_refused_by_name_or_have_no_effect(name: str) -> None:
    _, config = config_of(name)
    keys = [key for key in text_of(config) if key != "model_type"]
    for key in sample(name, keys, NUM_SETTINGS):
        for junk in JUNK:
            changed = copy.deepcopy(config)
            text_of(changed)[key] = junk
            assert "config.json" in (refusal(changed) or "config.json"), (key, junk)


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


def logits_of(folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the logits of the last token of a prompt, computed by the implementation that a worker would choose."""
    runner = make_runner(folder, kv="f32", max_sequence_length=128)
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([driver.sequence(0, tokens)], [(0, 0, len(tokens))])
    return recorder.logits[-1][0]


ODD: list[tuple[str, dict[str, Any]]] = [
    (
        "llama",
        {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10, "vocab_size": 97},
    ),
    ("llama", {"hidden_size": 72, "intermediate_size": 33, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_act": "relu2"}),
    ("llama", {"partial_rotary_factor": 0.5}),  # transformers' Llama ignores it
    ("llama", rope("dynamic", factor=4.0)),
    ("llama", rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    ("llama", rope("proportional", partial_rotary_factor=0.5)),
    ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=1, beta_slow=32)),
    ("qwen3", rope("yarn", factor=None, original_max_position_embeddings=128)),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma3", {"final_logit_softcapping": 2.0}),  # only the text-only class applies this cap
    ("stablelm", {"use_parallel_residual": True}),
    ("qwen2_moe", {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    ("qwen3_5", {"layer_types": ["full_attention"] * 3}),
    ("glm4_moe_lite", {"kv_lora_rank": 1}),
    ("bamba", {"num_key_value_heads": 1, "mamba_proj_bias": True, "head_dim": 24}),
    ("smollm3", {"use_sliding_window": False, "layer_types": WINDOWED}),
    ("nemotron_h", {"layers_block_type": ["mlp", "moe"], "use_cache": False}),  # no layer has a cache
]


@pytest.mark.parametrize(("name", "change"), ODD, ids=lambda value: str(value)[:40])
def test_odd_settings_give_the_logits_of_transformers(
    name: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = FAMILIES[name]
    if "text_config" in settings:
        settings = {**settings, "text_config": settings["text_config"] | change}
        change = {}
    model = make_tiny_model(tmp_path, family, **{**settings, **change})
    tokens = [token % model.config.get_text_config().vocab_size for token in prompt(40, seed=1)]  # type: ignore[union-attr, operator]
    wanted = expected_logits(model, tokens)[-1]
    found = logits_of(tmp_path, tokens, monkeypatch)
    assert float((found - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def edit(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    (folder / "midstream.json").unlink(missing_ok=True)


@pytest.mark.parametrize("has_own_head", [True, False])
def test_a_head_that_differs_from_the_embedding_is_not_tied_to_it(
    has_own_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers, `tie_word_embeddings` is ignored in this case."""
    make_tiny_model(tmp_path, "Llama", num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    if not has_own_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit(tmp_path, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    wanted = expected_logits(model, prompt(20))[-1]
    found = logits_of(tmp_path, prompt(20), monkeypatch)
    assert float((found - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attention_bias": False}, r"q_proj\.bias, but according to config\.json attention has none"),
        ({"mlp_bias": False}, r"gate_proj\.bias, but according to config\.json a feed-forward layer has none"),
    ],
)
def test_biases_that_config_json_denies_are_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama", num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    edit(tmp_path, **settings)
    with pytest.raises(ConfigError, match=named):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, "15 elements of head_dim 15; must be even"),
        ({"hidden_act": "mesh"}, "activation 'mesh' .*transformers cannot load"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' .*transformers cannot load"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number; got None"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number; got None"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8 numbers"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"per_layer_config": {"0": {"intermediate_size": 48}}}, "per_layer_config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_no_model_can_have_are_refused_by_name(
    settings: dict[str, Any], named: str, tiny_folder: Path, tmp_path: Path
) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path, **settings)
    with pytest.raises((ConfigError, UnsupportedError), match=named):
        make_runner(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, r"moe_norm_min 0\.5"),
    ],
)
def test_settings_without_native_support_are_refused_by_name(name: str, settings: dict[str, Any], named: str) -> None:
    _, config = config_of(name)
    with pytest.raises(UnsupportedError, match=named):
        describe(config | settings)


def test_experts_must_be_enough() -> None:
    _, config = config_of("deepseek_v3")
    for settings, named in (
        ({"num_experts_per_tok": 5}, "each token uses 5 experts; must be at most 4"),
        ({"n_group": 3, "topk_group": 1}, r"the number of experts \(8\) must be a multiple of n_group \(3\)"),
        ({"topk_group": 5}, "topk_group is 5; n_group is 4"),
        ({"n_group": 8, "topk_group": 4}, "8 experts in 8 groups; each must have at least 2"),
    ):
        with pytest.raises(ConfigError, match=named):
            describe(config | settings)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_early_names_of_longrope_in_phi3(old: str) -> None:
    _, config = config_of("phi3_long")
    changed = copy.deepcopy(config)
    changed["rope_parameters"] |= {"rope_type": old}
    assert effect(describe(changed)) == effect(describe(config))
    assert describe(changed).max_sequence_length == 512


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_positions_beyond_the_original_length_of_longrope_are_refused(
    is_nested: bool, implementation: str, tmp_path: Path
) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    settings = rope("longrope", **factors)
    if is_nested:
        kinds = {"full_attention": settings["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
        settings = {"rope_parameters": kinds, "layer_types": ["full_attention"], "head_dim": 16}
    make_tiny_model(tmp_path, "Gemma3Text" if is_nested else "Llama", num_hidden_layers=1, **settings)
    with pytest.raises(ConfigError, match="max_sequence_length: 128 exceeds the model's limit of 64"):
        make_runner(tmp_path, implementation=implementation, max_sequence_length=128)
    runner = make_runner(tmp_path, implementation=implementation, max_sequence_length=64)
    assert runner.max_sequence_length == 64


def test_rope_scaling_is_preferred_to_rope_parameters() -> None:
    """As in transformers; the files that it writes contain only one of the two."""
    _, config = config_of("llama")
    both = config | rope("default") | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    (rotary, *_) = describe(both).rotary
    assert rotary is not None
    assert (rotary.settings["rope_type"], rotary.settings["rope_theta"]) == ("linear", 10000.0)
    completed = transformers.LlamaConfig.from_dict(copy.deepcopy(both)).rope_parameters
    assert completed == {"type": "linear", "factor": 2.0, "rope_type": "linear", "rope_theta": 10000.0}


def test_an_original_length_at_the_top_level_does_not_affect_settings_for_each_type_of_layer() -> None:
    _, config = config_of("olmo3")
    config["original_max_position_embeddings"] = 32
    completed = transformers.Olmo3Config.from_dict(copy.deepcopy(config)).to_dict()
    assert completed["rope_parameters"]["full_attention"]["original_max_position_embeddings"] == 128
    del completed["original_max_position_embeddings"]
    assert effect(describe(config)) == effect(describe(completed))


def test_the_rotary_base_in_older_files_of_gpt_oss_replaces_the_one_of_its_default_scaling() -> None:
    _, config = config_of("gpt_oss")
    del config["rope_parameters"]
    config["rope_theta"] = 500.0
    completed = transformers.GptOssConfig.from_dict(copy.deepcopy(config)).to_dict()
    assert completed["rope_parameters"]["rope_theta"] == 500.0
    assert effect(describe(config)) == effect(describe(completed))
