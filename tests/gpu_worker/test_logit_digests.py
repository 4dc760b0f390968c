"""Digests of logits: equal however a row is computed, and different as soon as one bit of the logits is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.batch.step import OutputParams, SamplingParams, StepOutput
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampling.sampler import digests_of
from tests.gpu_worker.tiny_models import SHAPE, Driver, make_runner

PROMPT = np.random.default_rng(9).integers(3, SHAPE["vocab_size"], 37).tolist()
SAMPLED = SamplingParams(temperature=1.0, seed=3)
NUM_FLIPS = 100


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder, kernels="native")


def test_the_digest_is_the_specified_one() -> None:
    """BLAKE2b of two little-endian floats, as computed by `b2sum -l 64`."""
    assert digests_of(torch.tensor([[1.0, -2.0]])) == (int.from_bytes(bytes.fromhex("fb5b1f897c7a7fe8"), "little"),)


def test_a_row_has_the_same_digest_alone_and_in_a_batch_and_recomputed(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.step([driver.sequence(0, PROMPT, SAMPLED), driver.sequence(1, PROMPT[:9])], [(0, 0, 37), (1, 0, 9)])
    driver.step(generation=[0, 1])
    batch = driver.step(generation=[0, 1], reports_digests=True)
    assert len(batch.logit_digests) == 2
    known = driver.tokens[0][:-1]
    again = driver.sequence(2, known, SAMPLED, num_prompt_tokens=len(PROMPT))
    for start, length in ((0, 20), (20, len(known) - 20)):
        new = [again] if not start else []
        check = driver.step(new, [(2, start, length)], reports_digests=True)
    assert check.logit_digests == batch.logit_digests[:1]
    assert check.token_ids.tolist() == batch.token_ids[:1].tolist()
    assert driver.step(generation=[0]).logit_digests == ()


def weights_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the weights with which a decoder computes; `source` are those of the files, before they are packed."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from weights_of(item, depth)
    elif depth < 5 and type(value).__module__.partition(".")[0] in ("gpu_worker", "kernels"):
        for name in (*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())):
            if name not in ("_native", "_cos", "_sin", "source"):
                yield from weights_of(getattr(value, name, None), depth + 1)


def test_every_flipped_bit_that_changes_logits_changes_the_digest(runner: ModelRunner) -> None:
    dice, weights = random.Random(1), list(weights_of(runner.model.decoder))
    assert sum(weight.nbytes for weight in weights) > 100_000

    def last_step(flipped: Any = None) -> StepOutput:
        driver = Driver(runner)
        outputs = OutputParams(generation_logits=True)
        driver.step([driver.sequence(0, PROMPT, SAMPLED, outputs=outputs)], [(0, 0, len(PROMPT))])
        driver.step(generation=[0])
        if flipped is not None:
            flipped()  # the blocks of the tokens before are right
        return driver.step(generation=[0], reports_digests=True)

    right = last_step()
    num_changed = 0
    for _ in range(NUM_FLIPS):
        weight = dice.choices(weights, [item.nbytes for item in weights])[0].flatten().view(torch.uint8)
        place, bit = dice.randrange(len(weight)), 1 << dice.randrange(8)

        def flip(weight: torch.Tensor = weight, place: int = place, bit: int = bit) -> None:
            weight[place] ^= bit

        found = last_step(flip)
        flip()
        is_changed = found.tensors[0].values.tobytes() != right.tensors[0].values.tobytes()
        assert (found.logit_digests != right.logit_digests) == is_changed
        num_changed += is_changed
    assert num_changed > NUM_FLIPS / 4
    assert last_step().logit_digests == right.logit_digests
