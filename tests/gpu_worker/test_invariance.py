"""The output of a sequence is bit-identical in any batch, however it is chunked, cached, preempted or moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.batch.step import GREEDY, NewSequence, RowLogProbs, SamplingParams
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.native import CpuDecoder
from tests.gpu_worker.tiny_models import Driver, ints, make_runner

NUM_NEW = 14
SAMPLING = [
    GREEDY,
    SamplingParams(seed=1, temperature=1.2),
    SamplingParams(seed=2, top_k=20, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.4, min_tokens=6, end_ids=(7,)),
    SamplingParams(seed=3, min_p=0.02, log_probs=2),
]


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder, kernels=request.param, max_kv_tokens=8192)


class Plan:
    """Sequences with a common prefix, and the output of each sequence when run alone."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        generator = np.random.default_rng(seed)
        prefix = generator.integers(3, 331, 48).tolist()
        self.prompts = [prefix + generator.integers(3, 331, generator.integers(1, 150)).tolist() for _ in range(5)]
        self.log_probs: list[list[RowLogProbs]] = []
        self.outputs: list[list[int]] = []
        for tokens, sampling in zip(self.prompts, SAMPLING, strict=True):
            driver = Driver(runner)
            outputs = [driver.step([driver.sequence(0, tokens, sampling)], [(0, 0, len(tokens))])]
            outputs += [driver.step(generation=[0]) for _ in range(NUM_NEW - 1)]
            self.outputs.append(driver.output(0))
            self.log_probs.append([item for output in outputs for item in output.log_probs])


@pytest.fixture(scope="module")
def plan(runner: ModelRunner) -> Plan:
    return Plan(runner, seed=11)


class RandomSchedule:
    """Runs the sequences of the plan with random start times, chunks, shared blocks and preemptions."""

    def __init__(self, runner: ModelRunner, plan: Plan, seed: int) -> None:
        self._plan, self._generator = plan, np.random.default_rng(seed)
        self.driver = Driver(runner)
        # Sequence i is in row self._rows[i].
        self._rows = self._generator.permutation(8)[:5].tolist()
        self._done: dict[int, int] = {}  # positions whose keys and values are cached
        self.log_probs: list[list[RowLogProbs]] = [[] for _ in plan.prompts]

    def run(self) -> list[list[int]]:
        while any(len(output) < NUM_NEW for output in self._outputs()):
            self._step()
        return self._outputs()

    def _outputs(self) -> list[list[int]]:
        return [self.driver.output(row) if row in self.driver.tokens else [] for row in self._rows]

    def _step(self) -> None:
        new, contexts, generation = [], [], []
        for i, row in enumerate(self._rows):
            choice = self._generator.random()
            if row not in self._done:
                if choice < 0.5:
                    new.append(self._begin(i, row))
                continue
            known = len(self.driver.tokens[row])
            if len(self.driver.output(row)) >= NUM_NEW or choice < 0.2:
                continue
            if choice < 0.25:
                self.driver.step(
                    released_rows=ints([row])
                )  # preempted: the sequence is recomputed from its tokens later
                del self._done[row]
            elif self._done[row] == known - 1 and known > len(self._plan.prompts[i]):
                generation.append(row)
            else:
                length = min(known - self._done[row], int(self._generator.integers(1, 70)))
                contexts.append((row, self._done[row], length))
        output = self.driver.step(new, contexts, generation)
        for row, start, length in contexts:
            self._done[row] = start + length
        for row in generation:
            self._done[row] += 1
        for item in output.log_probs:
            self.log_probs[self._rows.index(item.row)].append(item)

    def _begin(self, i: int, row: int) -> NewSequence:
        prompt = self._plan.prompts[i]
        tokens = self.driver.tokens.get(row, prompt)
        sharers = [other for other, done in self._done.items() if done >= 48 and other != row]
        shared = self.driver.blocks[sharers[0]][:3] if sharers and self._generator.random() < 0.7 else []
        self._done[row] = 48 if shared else 0
        return self.driver.sequence(row, tokens, SAMPLING[i], num_prompt_tokens=len(prompt), shared_blocks=shared)


def without_row(items: list[RowLogProbs]) -> list[tuple[float, int, tuple[int, ...], tuple[float, ...]]]:
    return [(item.token_log_prob, item.token_rank, item.top_token_ids, item.top_log_probs) for item in items]


def test_outputs_are_bit_identical_under_any_schedule(runner: ModelRunner, plan: Plan) -> None:
    for seed in range(8 if isinstance(runner.model.decoder, CpuDecoder) else 2):
        schedule = RandomSchedule(runner, plan, seed)
        assert schedule.run() == plan.outputs
        for actual, expected in zip(schedule.log_probs, plan.log_probs, strict=True):
            assert without_row(actual) == without_row(expected)


def test_a_prefix_is_shared_within_one_step(runner: ModelRunner, plan: Plan) -> None:
    """Two sequences arrive together; the second reads the blocks that the first writes in the same step."""
    driver = Driver(runner)
    first = driver.sequence(0, plan.prompts[0], SAMPLING[0])
    second = driver.sequence(1, plan.prompts[1], SAMPLING[1], shared_blocks=driver.blocks[0][:3])
    lengths = [len(plan.prompts[0]), len(plan.prompts[1]) - 48]
    driver.step([first, second], [(0, 0, lengths[0]), (1, 48, lengths[1])])
    for _ in range(NUM_NEW - 1):
        driver.step(generation=[0, 1])
    assert [driver.output(0), driver.output(1)] == plan.outputs[:2]


@pytest.fixture
def two_threads(tiny_folder: Path, runner: ModelRunner) -> Iterator[ModelRunner]:
    kind = "native" if isinstance(runner.model.decoder, CpuDecoder) else "torch"
    yield make_runner(tiny_folder, kernels=kind, num_threads=2)
    torch.set_num_threads(1)


def test_outputs_do_not_depend_on_the_number_of_threads(two_threads: ModelRunner, plan: Plan) -> None:
    for tokens, sampling, expected in zip(plan.prompts, SAMPLING, plan.outputs, strict=True):
        assert Driver(two_threads).run_alone(tokens, NUM_NEW, sampling) == expected
