"""Draws by the CPU kernels, compared with the PyTorch reference and with exact fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.sampling.distribution import MIN_TEMPERATURE, threshold, weights
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.uniforms import uniforms
from kernels.cpu import draw, empty_draws
from tests.gpu_worker.tiny_models import ints
from tests.kernels.libraries import each_build, library, runnable_builds, threads

SMALLEST = 1.4e-45
logit = st.sampled_from([0.0, 1.0, 1.0, 2.5, -3.0, 7.0, -40.0, -torch.inf, 1e30, -1e30, SMALLEST])
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, SMALLEST, 1e-6, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 17, 300, 1_000_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-6, SMALLEST, 1 - 2**-24]),
    min_p=st.sampled_from([0.0, SMALLEST, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def make_rows(params: list[SamplingParams], vocab_size: int) -> Rows:
    """Return rows whose sequences have different indices and lengths."""
    rows = Rows(len(params), 16, 16, 4, vocab_size)
    for i, sampling in enumerate(params):
        tokens = np.zeros(i % 7 + 1, dtype=np.int32)
        rows.add(
            NewSequence(row=i, token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling, sequence_index=i % 3)
        )
    assert not rows.failed
    return rows


def exact_draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """Return the token according to the definition of a draw, computed with exact fractions over sorted weights."""
    if params.temperature == 0:
        return int(logits.argmax())
    temperature = torch.tensor([max(params.temperature, MIN_TEMPERATURE)])
    all_weights = [Fraction(value) for value in weights(logits[None], temperature)[0].tolist()]
    likeliest = sorted(all_weights, reverse=True)[: params.top_k or None]
    top_p = Fraction(float(np.float32(params.top_p)))
    count = len(likeliest)
    if top_p < 1:
        wanted = Fraction(float(top_p) * float(sum(likeliest)))
        count = next(i for i, mass in enumerate(accumulate(likeliest), 1) if mass >= wanted)
    least = max(likeliest[count - 1], Fraction(float(np.float32(params.min_p))))
    kept = [weight if weight >= least else Fraction(0) for weight in all_weights]
    target = Fraction(number * float(sum(kept)))
    return next(
        (i for i, mass in enumerate(accumulate(kept)) if mass > target),
        max(i for i, weight in enumerate(kept) if weight),
    )


@each_build
@settings(max_examples=25, derandomize=True)
@given(
    logits=st.lists(logit, min_size=1, max_size=40).filter(lambda values: max(values) > -torch.inf),
    num_repeats=st.sampled_from([1, 3, 70]),
    params=st.lists(sampling_params, min_size=1, max_size=6),
)
def test_draws_are_exact_ones_and_the_references(
    name: str, logits: list[float], num_repeats: int, params: list[SamplingParams]
) -> None:
    row = torch.tensor(logits * num_repeats)
    together, places = row.repeat(len(params), 1), ints(range(len(params)))
    rows = make_rows(params, len(row))
    drawn = Sampler(rows, threads=threads(name)).sample(together, places).token_ids.tolist()
    assert drawn == Sampler(rows).sample(together, places).token_ids.tolist()
    if num_repeats < 70:
        numbers = uniforms(rows.seeds[places], rows.sequence_indices[places], rows.lengths[places])
        assert drawn == [exact_draw(row, *each) for each in zip(params, numbers.tolist(), strict=True)]


@each_build
def test_a_large_vocabulary_is_drawn_from_as_by_the_reference(name: str) -> None:
    """Likely tokens are in one or many parts of the vocabulary; some distributions are so flat that most tokens are
    kept.
    """
    generator = np.random.default_rng(3)
    scales, num_tokens = (6.0, 1.0, 0.01), 20_001
    logits = torch.stack([torch.randn(num_tokens) * scales[i % 3] for i in range(24)])
    logits[::4] = logits[::4].round()
    logits[:, ::5] = -torch.inf
    kinds = [{"top_p": 0.9}, {"top_k": 50}, {}, {"top_k": 5000, "top_p": 0.99}, {"min_p": 0.2}, {"top_p": 0.9999}]
    params = [
        SamplingParams(seed=int(generator.integers(2**62)), temperature=(0.8, 1.5)[i % 2], **kinds[i % len(kinds)])  # type: ignore[arg-type]
        for i in range(24)
    ]
    rows, places = make_rows(params, num_tokens), ints(range(24))
    expected = Sampler(rows).sample(logits, places).token_ids
    for num_threads in (1, 3):
        sampler = Sampler(rows, threads=threads(name, num_threads))
        assert sampler.sample(logits, places).token_ids.tolist() == expected.tolist()
        some = generator.permutation(24)[:7].astype(np.int32)
        alone = sampler.sample(logits[torch.from_numpy(some).long()], some).token_ids
        assert alone.tolist() == expected[some].tolist()


@pytest.mark.parametrize("num_tokens", [2, 1000, 49_152])
def test_weights_are_exponentials_whose_float64_sums_are_exact(num_tokens: int) -> None:
    logits = torch.linspace(-90, 0, num_tokens)[None] * 0.7
    found = weights(logits, torch.tensor([0.7]))[0]
    quantum = 2.0 ** ((num_tokens - 1).bit_length() - 53)
    exact = ((logits[0] - logits.max()) / torch.tensor(0.7)).double().exp()
    assert bool(((found.double() - exact).abs() <= exact * 2**-22 + quantum / 2).all())
    assert found[-1] == 1
    units = found.double() / quantum
    assert torch.equal(units, units.round())
    assert sum(map(int, units.tolist())) == int(found.sum(dtype=torch.float64) / quantum)


def test_draws_take_their_share_of_seeds() -> None:
    """The probabilities are 0.5, 0.3 and 0.2; the counts in 10,000 draws must be within five standard deviations of
    them.
    """
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    draws = empty_draws(10_000)
    draws["seed"], draws["temperature"], draws["top_p"] = np.arange(10_000), 1, 1
    for field in ("min_p", "top_k", "sequence_index", "position"):
        draws[field] = 0
    tokens, _ = draw(threads(runnable_builds[0]), logits, np.zeros(10_000, dtype=np.int32), draws)
    counts = np.bincount(tokens.numpy())
    assert (np.abs(counts - [5000, 3000, 2000]) < [250, 230, 200]).all()


@each_build
def test_rows_without_a_finite_highest_logit_are_reported(name: str) -> None:
    logits = torch.zeros(4, 100)
    logits[0, 70], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    draws = empty_draws(3)
    draws[:] = 0
    draws["temperature"] = draws["top_p"] = 1
    tokens, highest = draw(threads(name), logits, ints([2, 1, 0]), draws)
    assert tokens.tolist() == [0, 3, 70]
    assert highest.tolist()[:2] == [-torch.inf, torch.inf]
    assert highest[2].isnan()


def test_wrong_arguments_are_refused() -> None:
    pool, draws = threads(runnable_builds[0]), empty_draws(1)
    with pytest.raises(ValueError, match=r"logits are torch.float64 \[1, 4\]"):
        draw(pool, torch.zeros(1, 4).double(), ints([0]), draws)
    with pytest.raises(ValueError, match=r"rows must be in 0..0"):
        draw(pool, torch.zeros(1, 4), ints([1]), draws)
    with pytest.raises(ValueError, match=r"expected contiguous draws \[2\]"):
        draw(pool, torch.zeros(1, 4), ints([0, 0]), draws)
    assert library(runnable_builds[0]) is pool.library


def test_the_least_weight_kept_is_that_of_the_last_token() -> None:
    """The weights are 1, 0.5, 0.5, 0.25 and 0.125."""
    logits = torch.tensor([[0.5, 1.0, 0.25, 0.5, 0.125]]).log().repeat(6, 1)
    found = weights(logits, torch.ones(6))
    top_k = ints([0, 2, 4, 4, 0, 1])
    top_p = np.array([0.42, 1.0, 1.0, 0.5, 0.95, 1.0], dtype=np.float32)
    assert threshold(found, top_k, top_p).squeeze(1).tolist() == pytest.approx([1, 0.5, 0.25, 0.5, 0.125, 1], rel=1e-6)
