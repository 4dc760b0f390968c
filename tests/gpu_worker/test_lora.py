"""LoRA adapters made by PEFT for tiny random models: compared with transformers, in mixed batches, and in small
caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from gpu_worker.batch.step import AdapterRef, Fork, NewSequence
from gpu_worker.lora.adapter import padded_rank
from gpu_worker.model_runner import ModelRunner
from midstream.errors import ConfigError, NotFoundError, OverloadedError
from tests.gpu_worker.adapters import ALL_MODULES, adapted, make_lora, ref_of
from tests.gpu_worker.test_models import TOLERANCE, Recorder, prompt
from tests.gpu_worker.tiny_models import Driver, ints, make_runner, make_tiny_model

NUM_NEW = 6
KINDS = {
    "few": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 4, "target_modules": ALL_MODULES, "use_rslora": True},
    "uneven": {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"down_proj": 12},
        "alpha_pattern": {"^mlp.down_proj": 7, r"^model\.layers\.0\.mlp\.down_proj$": 6, "mlp.down_proj": 24},
    },
    "one_layer": {"r": 16, "lora_alpha": 16, "target_modules": ["o_proj"], "layers_to_transform": [1]},
}
NAMES: tuple[str, ...] = ("", "few", "all", "", "uneven", "one_layer", "all")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    folder = tmp_path_factory.mktemp("lora")
    model = make_tiny_model(folder / "model", "Llama")
    for seed, (name, settings) in enumerate(KINDS.items()):
        make_lora(model, folder / name, seed, **settings)  # type: ignore[arg-type]
    return model, folder


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, model_folder: tuple[torch.nn.Module, Path]) -> ModelRunner:
    return make_runner(model_folder[1] / "model", kernels=request.param, kv="f32")


@pytest.fixture(scope="module")
def refs(runner: ModelRunner, model_folder: tuple[torch.nn.Module, Path]) -> dict[str, AdapterRef]:
    return {name: ref_of(runner, model_folder[1] / name) for name in KINDS}


def sequence(driver: Driver, row: int, tokens: Sequence[int], lora: AdapterRef | None) -> NewSequence:
    return replace(driver.sequence(row, tokens), lora=lora)


def adapted_logits(model: torch.nn.Module, folder: Path, name: str, tokens: list[int]) -> Tensor:
    with adapted(model, folder / name) if name else contextlib.nullcontext(model) as made, torch.no_grad():
        logits: Tensor = made(torch.tensor([tokens])).logits[0]
    return logits


def run_solo(runner: ModelRunner, row: int, tokens: list[int], lora: AdapterRef | None) -> list[int]:
    driver = Driver(runner)
    driver.step([sequence(driver, row, tokens, lora)], [(row, 0, len(tokens))])
    for _ in range(NUM_NEW - 1):
        driver.step(generation=[row])
    return driver.output(row)


def test_logits_equal_pefts_in_one_batch(
    model_folder: tuple[torch.nn.Module, Path],
    runner: ModelRunner,
    refs: dict[str, AdapterRef],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, folder = model_folder
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    prompts = [prompt(10 + 3 * i, seed=i) for i in range(len(NAMES))]
    new = [sequence(driver, i, prompts[i], refs.get(name)) for i, name in enumerate(NAMES)]
    driver.step(new, [(i, 0, len(prompts[i])) for i in range(len(NAMES))])
    driver.step(generation=list(range(len(NAMES))))
    plain = adapted_logits(model, folder, "", driver.tokens[1])
    for i, name in enumerate(NAMES):
        wanted = adapted_logits(model, folder, name, driver.tokens[i])
        for step, position in ((0, len(prompts[i]) - 1), (1, len(prompts[i]))):
            error = float((recorder.logits[step][i] - wanted[position]).abs().max())
            assert error <= TOLERANCE * max(1.0, float(wanted[position].abs().max())), (name, step)
    assert float((plain[5] - adapted_logits(model, folder, "few", driver.tokens[1])[5]).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("excluded", "found"),
    [
        (["model.layers.0.self_attn.q_proj", "2.self_attn.v_proj", "down_proj", "lm_head"], ["v", "qv", "q"]),
        (r"model\.layers\.[01]\..*(q|down)_proj|.*2\.mlp.*|lm_head|self_attn", ["v", "v", "qv"]),
    ],
)
def test_logits_equal_pefts_without_the_modules_that_an_adapter_excludes(
    model_folder: tuple[torch.nn.Module, Path],
    runner: ModelRunner,
    excluded: list[str] | str,
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    make_lora(model_folder[0], tmp_path / "some", 1, r=4, target_modules=targets, exclude_modules=excluded)
    ref, tokens = ref_of(runner, tmp_path / "some"), prompt(20, seed=1)
    assert ["".join(sorted(pairs)) for pairs in runner.adapters.get(ref).layers] == found
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    driver.step([sequence(driver, 0, tokens, ref)], [(0, 0, 20)])
    wanted = adapted_logits(model_folder[0], tmp_path, "some", tokens)[-1]
    assert float((recorder.logits[0][0] - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_a_mixed_batch_gives_each_sequence_the_bits_that_it_has_alone(
    runner: ModelRunner, refs: dict[str, AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(20 + 5 * i, seed=i) for i in range(len(NAMES))]
    recorder = Recorder(runner, monkeypatch)
    alone, alone_logits = [], []
    for i, name in enumerate(NAMES):
        recorder.logits.clear()
        alone.append(run_solo(runner, i % 3, prompts[i], refs.get(name)))
        alone_logits.append(torch.cat(recorder.logits))
    recorder.logits.clear()
    driver = Driver(runner)
    order = np.random.default_rng(5).permutation(len(NAMES)).tolist()
    running: list[int] = []
    rows_of_logits: list[list[int]] = []
    for i in order:  # one sequence starts per step, and is prefilled in two chunks
        driver.step([sequence(driver, i, prompts[i], refs.get(NAMES[i]))], [(i, 0, 13)], generation=running)
        rows_of_logits.append(sorted(running))
        driver.step([], [(i, 13, len(prompts[i]) - 13)], generation=running)
        rows_of_logits.append([i, *sorted(running)])
        running = [row for row in [*running, i] if len(driver.output(row)) < NUM_NEW]
    while running:
        driver.step(generation=running)
        rows_of_logits.append(sorted(running))
        running = [row for row in running if len(driver.output(row)) < NUM_NEW]
    found: list[list[Tensor]] = [[] for _ in NAMES]
    for rows, logits in zip(rows_of_logits, recorder.logits, strict=True):
        for row, values in zip(rows, logits, strict=True):
            found[row].append(values)
    for i in range(len(NAMES)):
        assert driver.output(i)[:NUM_NEW] == alone[i]
        assert torch.equal(torch.stack(found[i][:NUM_NEW]), alone_logits[i])
    assert len({tuple(output) for output in alone}) == len(NAMES)


def test_a_sequence_that_is_rebuilt_goes_on_with_its_adapter(
    runner: ModelRunner, refs: dict[str, AdapterRef], model_folder: tuple[torch.nn.Module, Path]
) -> None:
    tokens = prompt(30, seed=9)
    whole = run_solo(runner, 0, tokens, refs["all"])
    other = make_runner(model_folder[1] / "model", kernels="native" if "Cpu" in str(runner.model.decoder) else "torch")
    driver = Driver(other)  # the worker does not have the adapter
    known = [*tokens, *whole[:3]]
    driver.step([sequence(driver, 4, known, refs["all"])], [(4, 0, len(known))])
    for _ in range(NUM_NEW - 4):
        driver.step(generation=[4])
    assert driver.output(4) == whole[3:]


def bytes_of(folder: Path, model: torch.nn.Module, name: str) -> int:
    """Return the size of an adapter, computed from its modules."""
    with adapted(model, folder / name) as made:
        pairs = [
            (module.in_features, module.out_features, module.r["default"])
            for module in made.modules()
            if isinstance(module, peft.tuners.lora.Linear)
        ]
    return sum(padded_rank(rank) * (inputs + outputs) * 4 for inputs, outputs, rank in pairs)


def test_the_least_recently_used_idle_adapter_is_evicted(
    model_folder: tuple[torch.nn.Module, Path],
) -> None:
    model, folder = model_folder
    sizes = {name: bytes_of(folder, model, name) for name in KINDS}
    host_bytes = max((folder / name / "adapter_model.safetensors").stat().st_size for name in KINDS)
    runner = make_runner(folder / "model", lora_host_cache_bytes=host_bytes)
    cache = runner.adapters
    cache.device_bytes = max(sizes["all"] + sizes["few"], sizes["few"] + sizes["uneven"] + sizes["one_layer"])
    refs = {name: ref_of(runner, folder / name) for name in KINDS}
    driver, tokens = Driver(runner), prompt(8)

    def add(row: int, name: str) -> type[Exception] | None:
        output = driver.step([sequence(driver, row, tokens, refs[name])], [(row, 0, len(tokens))])
        return type(output.errors[0][1]) if output.errors else None

    assert add(0, "few") is None
    assert cache.num_device_bytes == sizes["few"]
    assert add(1, "all") is None
    assert add(2, "few") is None  # already loaded
    assert cache.num_device_bytes == sizes["few"] + sizes["all"]
    assert add(3, "uneven") is OverloadedError
    driver.release(3)
    driver.release(1)
    assert add(1, "uneven") is None  # replaces the adapter `all`, which is unused
    assert add(3, "one_layer") is None
    assert cache.num_device_bytes == sizes["few"] + sizes["uneven"] + sizes["one_layer"]
    assert 0 < cache.num_host_bytes <= host_bytes
    runner.clear()
    driver = Driver(runner)
    assert add(0, "all") is None
    assert cache.num_device_bytes <= cache.device_bytes


@pytest.mark.parametrize(
    "field",
    [
        "lora_host_cache_bytes",
        "lora_num_host_module_layer",
        "lora_num_device_module_layer",
        "lora_device_cache_percent",
    ],
)
def test_a_negative_size_is_rejected_by_name(model_folder: tuple[torch.nn.Module, Path], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must"):
        make_runner(model_folder[1] / "model", **{field: -1})


def test_another_adapter_under_the_same_path_is_not_taken_for_the_first(
    model_folder: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    model, folder = model_folder
    runner = make_runner(folder / "model", lora_host_cache_bytes=1 << 20)
    make_lora(model, tmp_path / "x", 1, r=4, target_modules=["q_proj"])
    ref = ref_of(runner, tmp_path / "x")
    make_lora(model, tmp_path / "x", 2, r=4, target_modules=["q_proj"])
    runner.adapters.unload(ref.fingerprint)
    driver = Driver(runner)
    output = driver.step(
        [sequence(driver, 0, prompt(4), ref), sequence(driver, 1, prompt(4), None)], [(0, 0, 4), (1, 0, 4)]
    )
    ((row, error),) = output.errors
    assert (row, type(error)) == (0, NotFoundError)
    assert output.token_ids[1] == run_solo(runner, 0, prompt(4), None)[0]
    driver.step(released_rows=ints([0]))


def test_a_row_that_is_forked_keeps_the_adapter(runner: ModelRunner, refs: dict[str, AdapterRef]) -> None:
    tokens = prompt(21, seed=4)
    expected = run_solo(runner, 0, tokens, refs["all"])
    driver = Driver(runner)
    driver.step([sequence(driver, 0, tokens, refs["all"])], [(0, 0, 21)])
    driver.step(generation=[0])
    # Row 5, which has never held a sequence, is forked from row 0, which is then reassigned.
    whole, rest = driver.blocks[0][:1], driver.blocks[0][1:]
    driver.sequence(5, tokens, shared_blocks=whole)
    target = driver.blocks[5]
    driver.tokens[5] = list(driver.tokens[0])
    copies = len(rest)
    driver.step(
        generation=[0, 5],
        forks=(Fork(0, 5, ints(target)),),
        copy_sources=ints(rest[:copies]),
        copy_targets=ints(target[1 : 1 + copies]),
    )
    driver.release(0)
    driver.step([sequence(driver, 0, prompt(9), None)], [(0, 0, 9)], generation=[5])
    driver.step(generation=[5])
    driver.step(generation=[5])
    assert driver.output(5) == expected
