"""The embedded model: greedy tokens equal those of transformers with the same weights, and are bit-identical in every
batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.batch.step import NewSequence
from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import ModelFolder, open_model_folder
from tests.gpu_worker.tiny_models import Driver, make_runner

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 20, 25, 31, 33, 40, 50, 64, 80, 100, 150, 260, 330, 700)
# Lengths of the prompts that are compared with transformers, which takes several times as long per token. They cover
# both kinds of prompt, lengths close to a block's, and several blocks.
COMPARED = (1, 2, 5, 7, 15, 16, 17, 31, 33, 64, 330)
NUM_NEW = 10
Logits = Callable[[tuple[int, ...]], torch.Tensor]
# Rounding may change the order of two logits that are this close in transformers. Our logits, of about 20, differ by up
# to a few 1e-4 after thirty layers whose sums are computed in another order, and by up to 1e-2 if inputs are rounded to
# 16 bits.
BOUND, ROUNDED_BOUND = 2e-3, 2e-2


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return open_model_folder("smollm2")


@pytest.fixture(scope="module")
def runner(folder: ModelFolder) -> ModelRunner:
    return make_runner("smollm2", max_kv_tokens=12000, max_batch_size=32, max_sequence_length=2048)


@pytest.fixture(scope="module")
def prompts(folder: ModelFolder) -> list[list[int]]:
    """Return prompts that are alternately random tokens and pieces of text."""
    generator = np.random.default_rng(7)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    words = Tokenizer.from_file(str(folder.path / "tokenizer.json")).encode(text).ids
    made = []
    for i, length in enumerate(LENGTHS):
        start = int(generator.integers(0, len(words) - length))
        made.append(words[start : start + length] if i % 2 else generator.integers(300, 49000, length).tolist())
    return made


@pytest.fixture(scope="module")
def outputs(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Return the output of each prompt when run alone and prefilled in one chunk."""
    return [Driver(runner).run_alone(tokens, NUM_NEW) for tokens in prompts]


def run_together(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_chunk: int, seed: int, *, share: bool
) -> list[list[int]]:
    """Run all prompts in one batch: random chunks alongside decodes and, with `share`, blocks of earlier prompts."""
    driver, generator = Driver(runner), np.random.default_rng(seed)
    new: list[NewSequence] = []
    done: dict[int, int] = {}
    owners: dict[int, int] = {}  # for each row, the row whose blocks it shares, or the row itself
    for row in generator.permutation(len(prompts)).tolist():
        tokens = prompts[row]
        blocks: list[int] = []
        owners[row] = row
        for other in done:
            common = 0
            while common < min(len(tokens) - 1, len(prompts[other])) and tokens[common] == prompts[other][common]:
                common += 1
            if share and common // 16 > len(blocks):
                blocks, owners[row] = driver.blocks[other][: common // 16], other
        new.append(driver.sequence(row, tokens, shared_blocks=blocks))
        done[row] = len(blocks) * 16
    waiting = list(done)
    while waiting or any(len(driver.output(row)) < NUM_NEW for row in done):
        contexts = []
        ready = [row for row in waiting if owners[row] == row or owners[row] not in waiting]
        for row in ready[: int(generator.integers(1, 6))]:
            length = min(int(generator.integers(1, max_chunk)), len(prompts[row]) - done[row])
            contexts.append((row, done[row], length))
        generation = [row for row in done if row not in waiting and len(driver.output(row)) < NUM_NEW]
        driver.step(new, contexts, generation)
        new = []
        for row, start, length in contexts:
            done[row] = start + length
        waiting = [row for row in waiting if done[row] < len(prompts[row])]
    return [driver.output(row) for row in range(len(prompts))]


@pytest.mark.parametrize(("max_chunk", "num_prompts"), [(40, 21), (700, 24)])
def test_outputs_are_bit_identical_in_any_mix(
    runner: ModelRunner, prompts: list[list[int]], outputs: list[list[int]], max_chunk: int, num_prompts: int
) -> None:
    mixed = run_together(runner, prompts[:num_prompts], max_chunk, seed=max_chunk, share=False)
    assert mixed == outputs[:num_prompts]


def test_prefix_hits_change_nothing(runner: ModelRunner, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Each long prompt runs twice; the second run reads most of its prefix from the blocks of the first run."""
    long = [i for i, tokens in enumerate(prompts) if 16 < len(tokens) < 200]
    twice = [prompts[i] for i in long for _ in range(2)]
    assert run_together(runner, twice, 300, seed=1, share=True) == [outputs[i] for i in long for _ in range(2)]


@pytest.fixture(scope="module")
def transformers_logits(transformers_model: Any) -> Logits:
    @functools.cache
    def logits(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = transformers_model(torch.tensor([tokens]), logits_to_keep=NUM_NEW).logits[0]
            return logits

    return logits


def assert_equal_up_to_ties(logits: Logits, prompts: list[list[int]], outputs: list[list[int]], bound: float) -> None:
    """Assert equality up to the first position where the two highest logits in transformers differ by at most
    `bound`.
    """
    num_compared = 0
    for tokens, output in zip(prompts, outputs, strict=True):
        top = logits((*tokens, *output[:-1])).topk(2, dim=1)
        for token, best, (first, second) in zip(output, top.indices[:, 0].tolist(), top.values.tolist(), strict=True):
            if first - second <= bound:
                break
            assert token == best
            num_compared += 1
    assert num_compared >= 0.9 * NUM_NEW * len(prompts)


def test_greedy_tokens_equal_transformers(
    prompts: list[list[int]], outputs: list[list[int]], transformers_logits: Logits
) -> None:
    some = [LENGTHS.index(length) for length in COMPARED]
    compared = [prompts[i] for i in some], [outputs[i] for i in some]
    assert_equal_up_to_ties(transformers_logits, *compared, ROUNDED_BOUND)


def test_greedy_tokens_of_float_inputs_equal_transformers(
    prompts: list[list[int]], transformers_logits: Logits
) -> None:
    runner = make_runner("smollm2", max_kv_tokens=2048, max_sequence_length=2048, activations="f32")
    some = [prompts[LENGTHS.index(length)] for length in COMPARED]
    outputs = [Driver(runner).run_alone(tokens, NUM_NEW) for tokens in some]
    assert_equal_up_to_ties(transformers_logits, some, outputs, BOUND)
