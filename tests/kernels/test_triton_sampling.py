"""The sampling kernel in Triton's interpreter, compared with the worker's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.sampling.sampler import Sampler
from kernels import triton as operations
from kernels.triton import sampling as kernel


def drawn_by_worker(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    rows = Rows(len(params), 64, 16, 64, logits.shape[1])
    for i, sampling in enumerate(params):
        tokens = np.zeros(i + 1, dtype=np.int32)
        rows.add(NewSequence(row=i, token_ids=tokens, num_prompt_tokens=i + 1, sampling=sampling, sequence_index=i % 3))
    drawn: list[int] = Sampler(rows).sample(logits, np.arange(len(params), dtype=np.int32)).token_ids.tolist()
    return drawn


def drawn_by_kernel(logits: Tensor, params: list[SamplingParams], first: int = 0, **limits: bool) -> list[int]:
    places = torch.arange(first, first + len(params), dtype=torch.int32)
    return operations.sample(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.from_numpy(np.array([p.seed for p in params], dtype=np.uint64).view(np.int64)),
        places % 3,
        places + 1,
        **limits,
    ).tolist()


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.fixture(params=[1024, 1], ids=["one program for each row", "passes"], autouse=True)
def most_candidates(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with a search by one program per row, and with a search in passes of several programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_FEW", request.param)
        yield


@settings(
    max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(params=st.lists(sampling_params, min_size=1, max_size=6), num_tokens=st.integers(2, 5000))
def test_draws_what_the_worker_draws(params: list[SamplingParams], num_tokens: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(params), num_tokens) * 4
    logits[:, 0] = -torch.inf
    assert drawn_by_kernel(logits, params) == drawn_by_worker(logits, params)


def test_few_tokens_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search considers only tokens that might be among the 50 most likely, or that are so likely that top-p might
    keep them.
    """
    called: dict[str, tuple[Tensor, ...]] = {}
    run = InterpretedFunction.__getitem__

    def note(function: InterpretedFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*args: Tensor, **kwargs: int) -> None:
            called[function.__name__] = args
            run(function, grid)(*args, **kwargs)

        return call

    monkeypatch.setattr(InterpretedFunction, "__getitem__", note)
    torch.manual_seed(3)
    logits = torch.randn(2, 20_000) * 6
    params = [SamplingParams(top_k=50, seed=1), SamplingParams(top_p=0.9, seed=2)]
    assert drawn_by_kernel(logits, params) == drawn_by_worker(logits, params)
    num_candidates = called["_gather"][4]
    of_top_k, of_top_p = num_candidates.sum(dim=1).tolist()
    p = torch.softmax(logits[1].double(), 0)
    assert 50 <= of_top_k < 100
    assert int((p >= 0.1 / 20_000).sum()) <= of_top_p <= int((p >= 0.04 / 20_000).sum()) < 2_000


def test_tokens_as_likely_as_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 5.0, 0.0, 0.0]]).repeat(8, 1)
    params = [SamplingParams(top_k=2, seed=seed) for seed in range(8)]
    drawn = drawn_by_kernel(logits, params)
    assert drawn == drawn_by_worker(logits, params)
    assert set(drawn) == {1, 2, 3}


def test_the_first_of_the_highest_logits_of_all_blocks_is_chosen() -> None:
    logits = torch.zeros(1, 9001)
    logits[0, [4000, 5000, 9000]] = 3.0
    assert drawn_by_kernel(logits, [SamplingParams(temperature=0.0)]) == [4000]


def test_probabilities_that_differ_in_the_last_bits_are_told_apart() -> None:
    logits = torch.full((8, 40), -20.0)
    logits[:, 3], logits[:, 30], logits[:, 9] = 1.0, 1.0 + 2e-6, torch.linspace(-3, 0, 8)
    params = [SamplingParams(top_k=1, seed=seed) for seed in range(8)]
    assert drawn_by_kernel(logits, params) == [30] * 8


def test_top_p_applies_to_the_probability_of_exactly_top_k_tokens() -> None:
    """One token has a probability of 0.5, and five have 0.1, so the three tokens that top-k keeps have 0.7 in total.
    Top-p keeps 0.8 of this, which is more than the first token has; the other five are tied, so all are kept.
    """
    logits = torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]]).log().repeat(4, 1)
    params = [SamplingParams(top_k=3, top_p=0.8, seed=seed) for seed in range(4)]
    drawn = drawn_by_kernel(logits, params)
    assert drawn == drawn_by_worker(logits, params)
    assert len({*drawn}) > 1


def test_every_last_bit_of_a_threshold_of_top_k_leaves_top_p_its_share() -> None:
    """The last four bits take all values, so that the search ends at each of the 16 pivots."""
    torch.manual_seed(4)
    logits = torch.randn(200, 12) * 2
    # Compute the sums over 16 numbers in the same order as the kernel, since the last bits depend on the order.
    padded = torch.nn.functional.pad(logits, (0, 4), value=-torch.inf).numpy()
    weights = np.exp(padded - padded.max(axis=1, keepdims=True))
    fifth = np.sort(np.array([row / row.sum() for row in weights]), axis=1)[:, -5].view(np.int32)
    # Only one row is used for each value of the last four bits, since the interpreter is slow.
    rows = np.unique(fifth & 15, return_index=True)[1].tolist()
    assert len(rows) == 16
    logits = logits[rows]
    # Each row has the one of 32 seeds with which it draws the least likely token: if fewer tokens were kept, it would
    # draw another one.
    seeds, least = [0] * 16, [-1] * 16
    for seed in range(32):
        drawn = drawn_by_worker(logits, [SamplingParams(top_k=5, top_p=0.6, seed=seed)] * 16)
        for i, token in enumerate(drawn):
            place = int((logits[i] > logits[i, token]).sum())
            if place > least[i]:
                seeds[i], least[i] = seed, place
    params = [SamplingParams(top_k=5, top_p=0.6, seed=seed) for seed in seeds]
    assert drawn_by_kernel(logits, params) == drawn_by_worker(logits, params)


def test_a_draw_over_many_blocks_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_BLOCK", 1024)  # blocks of two parts instead of eight, since the interpreter is slow
    torch.manual_seed(1)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=11),
        SamplingParams(seed=12, top_k=40, top_p=0.9),
        SamplingParams(seed=13, temperature=3.0, top_p=0.99),
    ]
    logits = torch.randn(len(params), 2300) * 3  # three blocks, the last one partial
    together = drawn_by_kernel(logits, params)
    assert together == drawn_by_worker(logits, params)
    for i, sampling in enumerate(params):
        limits = {"has_top_k": sampling.top_k > 0, "has_top_p": sampling.top_p < 1}
        assert drawn_by_kernel(logits[i : i + 1], [sampling], i, **limits) == together[i : i + 1]


def test_every_pass_over_the_vocabulary_is_divided_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program reads at most 4,096 of 128,256 tokens, and passes over candidates have enough programs to fill the
    device. Without top-k and top-p there is no search.
    """
    launched: list[tuple[str, tuple[int, ...]]] = []

    def note(function: InterpretedFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        launched.append((function.__name__, grid))
        return lambda *args, **kwargs: None

    monkeypatch.setattr(InterpretedFunction, "__getitem__", note)
    monkeypatch.setattr(kernel, "num_processors", lambda device: 1)
    logits, params = torch.zeros(2, 128_256), [SamplingParams(), SamplingParams()]
    first = [("_find_highest", (2, 32)), ("_weigh", (2, 32))]
    last = [("_keep", (2, 8)), ("_draw", (2,))]
    gather = [("_find_floor", (2,)), ("_gather", (2, 32)), ("_search_few", (2,))]
    search = [("_search", (2, 8))] * 8 + [("_end_search", (2,))]
    for limits, expected in (
        ((False, False), [*first, *last]),
        ((True, False), [*first, *gather, *search, *last]),
        ((False, True), [*first, *gather, search[-1], *search, *last]),
        ((True, True), [*first, *gather, *search, *search, *last]),
    ):
        launched.clear()
        drawn_by_kernel(logits, params, has_top_k=limits[0], has_top_p=limits[1])
        assert launched == expected


def test_searches_that_no_row_needs_change_nothing() -> None:
    torch.manual_seed(2)
    logits = torch.randn(2, 700) * 4  # only two parts of a block, since the interpreter is slow
    for sampling in (SamplingParams(seed=3), SamplingParams(seed=3, top_k=9), SamplingParams(seed=3, top_p=0.7)):
        params = [replace(sampling, seed=seed) for seed in range(2)]
        limits = {"has_top_k": sampling.top_k > 0, "has_top_p": sampling.top_p < 1}
        assert drawn_by_kernel(logits, params, **limits) == drawn_by_kernel(logits, params)
