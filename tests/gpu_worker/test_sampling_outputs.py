"""The output `sampling.K` states how each token was chosen, with equal bits in a run that continues at that token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, OutputParams, SamplingParams, StepOutput
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampling.guided import Constraints
from gpu_worker.sampling.sampler import Sampler
from tests.gpu_worker.tiny_models import SHAPE, Driver, ints, make_runner

K, NUM_NEW = 4, 20
OUTPUTS = OutputParams(generation_logits=True, sampling=(K,))
PROMPT = np.random.default_rng(8).integers(3, SHAPE["vocab_size"], 40).tolist()
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.3, seed=5),
    "cut": SamplingParams(temperature=2.0, seed=6, top_k=40, top_p=0.9, min_p=0.01, top_p_decay=0.97),
    "steered": SamplingParams(
        temperature=1.1,
        seed=7,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        no_repeat_ngram_size=2,
        min_tokens=12,
        end_ids=(2, 9),
        bad_words=((17,), (4, 5)),
        embedding_bias=((3, 2.5),),
    ),
}


@pytest.fixture(scope="module", params=["native", "torch"])
def runner(request: pytest.FixtureRequest, tiny_folder: Path) -> ModelRunner:
    return make_runner(tiny_folder, kernels=request.param)


class Trace:
    """The three tensors about one token."""

    def __init__(self, output: StepOutput, count: int = K) -> None:
        tensors = {tensor.name: tensor for tensor in output.tensors}
        about, ids, draw = (tensors[f"sampling.{count}{end}"] for end in ("", ".ids", ".draw"))
        self.first_rows = {tensor.first_row for tensor in tensors.values()}
        self.bits = tuple(tensor.values.tobytes() for tensor in tensors.values())
        self.logits = tensors["generation_logits"].values[0] if "generation_logits" in tensors else None
        self.ids = ids.values[0].tolist()
        self.columns: NDArray[Any] = about.values.reshape(1 + count, 4)
        self.number, self.begin, self.end = draw.values[0, :6].view(np.float64).tolist()
        self.temperature, self.top_p, self.least = draw.values[0, 6:9].view(np.float32).tolist()
        self.num_allowed, self.num_kept = draw.values[0, 9:].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_continued_sequence_has_the_same_state(runner: ModelRunner, way: str) -> None:
    driver = Driver(runner)
    index = 3
    outputs = [
        driver.step(
            [driver.sequence(0, PROMPT, WAYS[way], outputs=OUTPUTS, sequence_index=index)], [(0, 0, len(PROMPT))]
        )
    ]
    outputs += [driver.step(generation=[0]) for _ in range(NUM_NEW - 1)]
    tokens = driver.output(0)
    for place, output in enumerate(outputs):
        run = Trace(output)
        assert run.first_rows == {place}
        assert run.ids[0] == tokens[place]
        assert run.begin <= (0 if way == "greedy" else run.number) < run.end
        assert run.logits is not None
        assert run.columns[:, 0].tolist() == run.logits[run.ids].tolist()
        assert sorted(run.columns[1:, 0].tolist(), reverse=True) == sorted(run.logits.tolist(), reverse=True)[:K]
        known = [*PROMPT, *tokens[:place]]
        again = driver.sequence(
            1, known, WAYS[way], num_prompt_tokens=len(PROMPT), outputs=OUTPUTS, sequence_index=index
        )
        found = Trace(driver.step([given(again)], [(1, 0, len(known))]))
        driver.release(1)
        assert found.first_rows == {0}
        assert found.bits == run.bits


def given(new: NewSequence) -> NewSequence:
    """Return the sequence as the request of its continuation gives it: all of its output was given."""
    return replace(new, num_given_tokens=len(new.token_ids) - new.num_prompt_tokens)


def sampled(logits: list[float], sampling: SamplingParams, tokens: list[int], mask: int | None = None) -> Trace:
    """Sample the token after `tokens` of a row whose prompt is its first token."""
    rows = Rows(2, 32, 16, 4, len(logits))
    outputs = OutputParams(sampling=(2,))
    rows.add(NewSequence(row=0, token_ids=ints(tokens), num_prompt_tokens=1, sampling=sampling, outputs=outputs))
    masks = {} if mask is None else {0: np.array([mask], dtype=np.uint8)}
    rows.features[0] |= 512 if masks else 0  # GUIDED
    found = Sampler(rows).sample(torch.tensor([logits]), ints([0]), Constraints(masks))
    assert not found.errors
    trace = Trace(StepOutput(found.token_ids, (), (), 0.0, tensors=found.traces), count=2)
    assert trace.ids[0] == found.token_ids[0]
    return trace


def test_the_numbers_are_those_worked_out_by_hand() -> None:
    """Token 1 occurred twice, and loses 2 * 0.5 + 1; the grammar allows tokens 0 and 2, top_p then only token 2."""
    sampling = SamplingParams(temperature=0.5, seed=1, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.5)
    found = sampled([1.0, 4.0, 2.0], sampling, [0, 1, 1], mask=0b101)
    assert found.ids == [2, 1, 2]
    assert found.columns.tolist() == [[2, 2, 2, 1], [4, 2, -np.inf, 0], [2, 2, 2, 1]]
    assert (found.temperature, found.top_p, found.least) == (0.5, 0.5, 1.0)
    assert (found.num_allowed, found.num_kept) == (2, 1)
    assert (found.begin, found.end) == (0.0, 1.0)


def test_the_draw_is_the_place_in_the_cumulative_distribution() -> None:
    """Weights are 1, e^-1 and 1, of a total of 2.3679; the first random number of seed 3 at position 2 is known."""
    found = sampled([1.0, 0.0, 1.0], SamplingParams(temperature=1.0, seed=3), [0, 1])
    starts = np.array([0.0, 1.0, 1.0 + np.exp(-1), 2 + np.exp(-1)]) / (2 + np.exp(-1))
    token = found.ids[0]
    assert (found.begin, found.end) == pytest.approx((starts[token], starts[token + 1]))
    assert found.begin <= found.number < found.end
    assert found.columns[0, 3] == pytest.approx(starts[token + 1] - starts[token])
    assert (found.num_allowed, found.num_kept) == (3, 3)
    greedy = sampled([1.0, 0.0, 2.0], SamplingParams(temperature=0.0), [0, 1])
    assert np.isnan(greedy.number)
    assert (greedy.ids[0], greedy.begin, greedy.end, greedy.num_kept) == (2, 0.0, 1.0, 1)
