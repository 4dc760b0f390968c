"""Models whose layers have attention windows produce the same tokens as transformers when KV blocks are scarce."""

from __future__ import annotations

import copy
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpu_worker.models.description import narrowed
from gpu_worker.models.families import describe
from midstream.errors import ConfigError, UnsupportedError
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.greedy import wrong_tokens
from tests.gpu_worker.tiny_models import SHAPE, make_runner, make_tiny_model

WINDOW, NUM_REQUESTS, MAX_TOKENS = 16, 24, 32
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 32, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "layer_types": [SLIDING, FULL, SLIDING]}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    # As in gpt-oss, every other layer has a window.
    "qwen3": ("Qwen3", {"head_dim": 32, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]}),
}
# Models whose blocks are freed once they are outside the window.
ALL_WINDOWED = {"mistral"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that creates transformers' model and its folder, once per family."""

    @cache
    def make(name: str) -> tuple[Any, Path]:
        family, settings = FAMILIES[name]
        folder = tmp_path_factory.mktemp(name)
        return make_tiny_model(folder, family, sliding_window=WINDOW, **settings), folder

    return make


def requests(seed: int = 0, **fields: Any) -> list[pb.GenerateRequest]:
    """Return prompts of 20 to 60 tokens, half of them with a common prefix; a third of the requests use drafts."""
    draw = random.Random(seed)
    prefix = [draw.randrange(3, 331) for _ in range(40)]
    made = []
    for i in range(NUM_REQUESTS):
        tokens = [draw.randrange(3, 331) for _ in range(draw.randint(20, 60))]
        if i % 2:
            num_shared = min(len(tokens) - 1, draw.choice((17, 33, 40)))
            tokens[:num_shared] = prefix[:num_shared]
        request = pb.GenerateRequest(
            request_id=f"r{i}",
            token_ids=pb.TokenIds(values=tokens),
            max_tokens=MAX_TOKENS,
            sampling=pb.SamplingConfig(temperature=0),
            **fields,
        )
        if i % 3 == 0:
            request.speculative.num_draft_tokens = 3
        made.append(request)
    return made


def num_right(model: Any, system: CoreWithRunners, made: list[pb.GenerateRequest]) -> int:
    """Return the number of requests whose output has the requested length and equals that of transformers."""
    answers = [outputs(answer)[0] for answer in system.run(made)]
    pairs = [(list(request.token_ids.values), answer) for request, answer in zip(made, answers, strict=True)]
    return sum(len(answer) == MAX_TOKENS and not wrong_tokens(model, prompt, answer) for prompt, answer in pairs)


@pytest.mark.parametrize("chunk", [1, 7, 64, 0])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_under_pressure_are_those_of_transformers(folders: Any, name: str, chunk: int) -> None:
    model, folder = folders(name)
    runner = make_runner(folder, kv="f32", max_kv_tokens=800, max_batch_size=32)
    system = CoreWithRunners(runner, (), max_context_chunk=chunk)
    assert num_right(model, system, requests(seed=chunk)) == NUM_REQUESTS
    group = system.core.groups[0]
    assert group.tables.has_window == (name in ALL_WINDOWED)
    assert system.core.totals.num_preemptions > 0
    assert group.blocks.counts.reused > 0


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_cached_blocks_of_windowed_sequences_are_reused(folders: Any, name: str) -> None:
    """The same prompts run again after blocks outside the window were freed, and after the loss of the worker."""
    model, folder = folders(name)
    system = CoreWithRunners(make_runner(folder, kv="f32", max_kv_tokens=2048, max_batch_size=32), ())
    assert num_right(model, system, requests()) == NUM_REQUESTS
    again = requests()
    for request in again:
        request.request_id += " again"
        system.submit(request)
    for _ in range(20):
        system.step()
    system.lose_worker()
    system.run([])
    answers = [system.core.lifecycle.requests[request.request_id] for request in again]
    assert sum(answer.counters.num_cached_tokens for answer in answers) > 0
    pairs = [
        (list(request.token_ids.values), outputs(answer)[0]) for request, answer in zip(again, answers, strict=True)
    ]
    assert [wrong_tokens(model, *pair) for pair in pairs] == [[]] * NUM_REQUESTS


NARROW = 8
# Family and settings of the model; family and settings of the transformers reference, in which every layer can have a
# window (the test sets it to NARROW).
NARROWED: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("Llama", {}, "Mistral", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}, "Mistral", {}),
    "qwen2": ("Qwen2", FAMILIES["qwen2"][1], "Qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    "gemma2": ("Gemma2", FAMILIES["gemma2"][1], "Gemma2", {**FAMILIES["gemma2"][1], "layer_types": [SLIDING] * 3}),
}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", NARROWED)
def test_a_setting_below_the_models_window_limits_attention(tmp_path: Path, name: str, kernels: str) -> None:
    family, settings, narrow_family, narrow_settings = NARROWED[name]
    whole_model = make_tiny_model(tmp_path, family, **settings)
    config = getattr(transformers, f"{narrow_family}Config")(**{**SHAPE, **narrow_settings, "sliding_window": NARROW})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(whole_model.state_dict())
    if name == "gemma2" and kernels == "native":
        kernels = "auto"
    runner = make_runner(tmp_path, kv="f32", max_attention_window=NARROW, kernels=kernels, max_kv_tokens=800)
    assert runner.model.description.windows == (NARROW,) * 3
    system = CoreWithRunners(runner, (), max_attention_window=NARROW)
    made = requests()[:8]
    assert num_right(model, system, made) == len(made)
    assert system.core.groups[0].tables.has_window
    assert num_right(whole_model, CoreWithRunners(runner, (), max_attention_window=NARROW), made) < len(made)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_layers_may_have_different_limits(tmp_path: Path, implementation: str) -> None:
    """The limits are repeated: two windows for three layers are those of a model whose second layer is narrow."""
    whole_model = make_tiny_model(tmp_path, "Gemma2", **FAMILIES["gemma2"][1] | {"layer_types": [FULL] * 3})
    narrow = FAMILIES["gemma2"][1] | {"layer_types": [FULL, SLIDING, FULL], "sliding_window": NARROW}
    config = transformers.Gemma2Config(**{**SHAPE, **narrow})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(whole_model.state_dict())
    runner = make_runner(
        tmp_path, kv="f32", implementation=implementation, layer_attention_windows=f"500, {NARROW}", max_kv_tokens=800
    )
    assert runner.model.description.windows == (500, NARROW, 500)
    made = requests()[:8]
    assert num_right(model, CoreWithRunners(runner, ()), made) == len(made)
    assert num_right(whole_model, CoreWithRunners(runner, ()), made) < len(made)


@pytest.mark.parametrize("windows", ["8,x", "8,,4", "0", "9", "8,-1"])
def test_a_window_of_a_layer_is_a_number_within_the_limit(tmp_path: Path, windows: str) -> None:
    make_tiny_model(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="layer_attention_windows"):
        make_runner(tmp_path, max_attention_window=8, layer_attention_windows=windows)


class WithSinks:
    """transformers' model in float64, whose layers attend to `window` tokens: the first `num_sinks`, and the last."""

    def __init__(self, model: Any, num_sinks: int, window: int) -> None:
        self._model, self._num_sinks, self._num_last = copy.deepcopy(model).double(), num_sinks, window - num_sinks

    def __call__(self, token_ids: torch.Tensor) -> Any:
        places = torch.arange(token_ids.shape[1])
        distance = places[:, None] - places
        is_seen = (distance >= 0) & ((distance < self._num_last) | (places < self._num_sinks))
        mask = torch.zeros(is_seen.shape, dtype=torch.float64).masked_fill(~is_seen, -torch.inf)
        return self._model(token_ids, attention_mask=mask[None, None])


@pytest.mark.parametrize(("num_sinks", "window"), [(3, 8), (20, 25)])
@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "native"), ("gemma2", "native"), ("llama", "transformers")]
)
def test_sink_tokens_are_part_of_the_window(
    tmp_path: Path, name: str, implementation: str, num_sinks: int, window: int
) -> None:
    """This also holds when KV blocks are scarce, with cached prefixes, and after the loss of the worker."""
    family, settings, *_ = NARROWED[name]
    model = make_tiny_model(tmp_path, family, **settings)
    limits: dict[str, Any] = {"max_attention_window": window, "sink_token_length": num_sinks}
    runner = make_runner(tmp_path, kv="f32", implementation=implementation, max_kv_tokens=300, **limits)
    system = CoreWithRunners(runner, (), max_context_chunk=7, **limits)
    reference, made = WithSinks(model, num_sinks, window), requests()[:12]
    for request in made:
        system.submit(request)
    for _ in range(30):
        system.step()
    system.lose_worker()
    system.run([])
    answers = [outputs(system.core.lifecycle.requests[request.request_id])[0] for request in made]
    pairs = [(list(request.token_ids.values), answer) for request, answer in zip(made, answers, strict=True)]
    assert [wrong_tokens(reference, *pair) for pair in pairs] == [[]] * len(made)
    assert any(wrong_tokens(WithSinks(model, 0, window), *pair) for pair in pairs)
    assert system.core.totals.num_preemptions > 0
    assert system.core.groups[0].blocks.counts.reused > 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "sink_token_length"),
        ({"max_attention_window": 4}, "sink_token_length"),
        ({"max_attention_window": 8, "kernels": "native"}, "kernels"),
    ],
)
def test_sink_tokens_are_rejected_if_not_supported(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    """Sink tokens are rejected without a window, if they fill it, and with the native kernels."""
    make_tiny_model(tmp_path, "Llama")
    with pytest.raises(ConfigError) as raised:
        make_runner(tmp_path, **{"sink_token_length": 4, **settings})
    assert raised.value.field == field


def test_blocks_of_another_window_are_not_taken_over(tmp_path: Path) -> None:
    """The contents of a block depend on the attention windows of its layers."""
    make_tiny_model(tmp_path, "Llama")
    store = tmp_path / "store"
    runners = [
        make_runner(
            tmp_path,
            max_kv_tokens=64,
            shared_kv_folder=str(store),
            max_attention_window=window,
            sink_token_length=num_sinks,
            kernels="torch",
        )
        for window, num_sinks in ((0, 0), (8, 0), (16, 0), (8, 0), (8, 4))
    ]
    names = [runner.kv.store_name for runner in runners]
    for runner in runners:
        runner.close()
    assert names[1] == names[3] != ""
    assert len(set(names)) == 4


def test_a_setting_above_a_layers_window_does_not_change_it() -> None:
    assert narrowed((5, None, 16), (8,)) == (5, 8, 8)
    assert narrowed((5, None, 16), (4, 8)) == (4, 8, 4)
    assert narrowed((5, None, 16), ()) == (5, None, 16)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 7, "use_sliding_window": False}, (7, 7)),
        ({"model_type": "qwen2", "sliding_window": 7}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": [FULL, SLIDING]}, (None, 4096)),
        ({"model_type": "llama", "sliding_window": 7}, (None, None)),
    ],
)
def test_native_windows_are_those_of_transformers(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    shape = {**SHAPE, "num_hidden_layers": 2}
    assert describe(shape | config).windows == windows
    settings = {name: value for name, value in config.items() if name != "model_type"}
    family = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[config["model_type"]]
    theirs = getattr(transformers, f"{family}Config")(**shape, **settings)
    model = transformers.AutoModelForCausalLM.from_config(theirs)
    # Only some families pass the window to each layer; in the others, the model applies it in its attention mask.
    found = (
        [getattr(layer.self_attn, "sliding_window", theirs.sliding_window) for layer in model.model.layers]
        if (family != "Llama")
        else [None, None]
    )
    assert tuple(found) == windows


@pytest.mark.parametrize("setting", [{"layer_types": [SLIDING]}, {"sliding_window": -1}, {"sliding_window": "many"}])
def test_invalid_windows_are_rejected(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        describe(SHAPE | {"model_type": "qwen2", "use_sliding_window": True} | setting)


def test_layers_that_attend_in_another_way_are_refused() -> None:
    kinds = [FULL, "chunked_attention", SLIDING]
    with pytest.raises(UnsupportedError, match="chunked_attention"):
        describe(SHAPE | {"model_type": "qwen2", "use_sliding_window": True, "layer_types": kinds})
