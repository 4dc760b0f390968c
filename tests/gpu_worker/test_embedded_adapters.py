"""The embedded model with adapters made by PEFT, in one batch and alone, compared with transformers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker.batch.step import NewSequence
from gpu_worker.model_runner import ModelRunner
from tests.gpu_worker.adapters import ALL_MODULES, adapted, make_lora, make_prompt, ref_of
from tests.gpu_worker.test_embedded_model import BOUND
from tests.gpu_worker.test_models import Recorder
from tests.gpu_worker.tiny_models import Driver, make_runner

NUM_NEW, NUM_VIRTUAL = 6, 4
# Tolerance for logits of about 20 after thirty layers, whose sums are computed in another order.
TOLERANCE = 5e-3
LORAS = {
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r16": {"r": 16, "lora_alpha": 16, "target_modules": ALL_MODULES, "use_rslora": True},
    "r64": {"r": 64, "lora_alpha": 32, "target_modules": ["o_proj", "down_proj"]},
}
NAMES = ("", "r4", "r16", "soft", "r64", "r16")
TEXT = range(1000, 1400, 7)
PROMPTS = [[*TEXT[i : i + 5 + 7 * i]] for i in range(len(NAMES))]


@pytest.fixture(scope="module")
def folder(transformers_model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, settings) in enumerate(LORAS.items()):
        make_lora(transformers_model, folder / name, seed, scale=0.04, **settings)
    make_prompt(transformers_model, folder / "soft", 7, NUM_VIRTUAL)
    return folder


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("smollm2", max_sequence_length=512, activations="f32")


def sequence(driver: Driver, folder: Path, i: int, row: int) -> NewSequence:
    name = NAMES[i]
    vocab_size = driver.runner.model.description.vocab_size
    if name == "soft":
        tokens = [*range(vocab_size, vocab_size + NUM_VIRTUAL), *PROMPTS[i]]
        return replace(driver.sequence(row, tokens), prompt=ref_of(driver.runner, folder / name))
    return replace(driver.sequence(row, PROMPTS[i]), lora=ref_of(driver.runner, folder / name) if name else None)


def expected(model: torch.nn.Module, folder: Path, name: str, tokens: list[int]) -> Tensor:
    with adapted(model, folder / name) if name else contextlib.nullcontext(model) as made, torch.no_grad():
        logits: Tensor = made(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens))).logits[0]
    return logits[len(logits) - len(tokens) :]


def test_each_sequence_of_a_batch_is_what_peft_computes_and_what_it_is_alone(
    transformers_model: torch.nn.Module, folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, recorder = Driver(runner), Recorder(runner, monkeypatch)
    rows = range(len(NAMES))
    new = [sequence(driver, folder, i, i) for i in rows]
    driver.step(new, [(i, 0, len(new[i].token_ids)) for i in rows])
    for _ in range(NUM_NEW - 1):
        driver.step(generation=list(rows))
    together = [torch.stack([logits[i] for logits in recorder.logits]) for i in rows]
    for i, name in enumerate(NAMES):
        output = driver.output(i)
        wanted = expected(transformers_model, folder, name, [*PROMPTS[i], *output])[len(PROMPTS[i]) - 1 : -1]
        assert float((together[i] - wanted).abs().max()) < TOLERANCE, name
        for token, logits in zip(output, wanted, strict=True):  # greedy choice, except for ties
            assert float(logits.max() - logits[token]) < BOUND, name
    assert len({tuple(driver.output(i)) for i in rows}) == len(NAMES)

    for i in rows:
        recorder.logits.clear()
        alone = Driver(runner)
        item = sequence(alone, folder, i, 0)
        alone.step([item], [(0, 0, len(item.token_ids))])
        for _ in range(NUM_NEW - 1):
            alone.step(generation=[0])
        assert alone.output(0) == driver.output(i)
        assert torch.equal(torch.cat(recorder.logits), together[i])
