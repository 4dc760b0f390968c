"""The sampler, compared with transformers' logits processors and with values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import GREEDY, NewSequence, SamplingParams
from gpu_worker.features import Feature
from gpu_worker.sampling.distribution import threshold, weights
from gpu_worker.sampling.guided import Constraints
from gpu_worker.sampling.logits_processors import allow, unpacked
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.sampling.uniforms import uniforms
from kernels import dispatch
from kernels import triton as operations
from midstream.errors import InvalidArgumentError
from tests.gpu_worker.tiny_models import ints
from tests.kernels.libraries import threads

VOCAB_SIZE = 1000


def make_rows(*sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> Rows:
    """Return one row for each item of `sampling`; all rows have the same tokens."""
    rows = Rows(len(sampling), 64, 16, 8, VOCAB_SIZE)
    prompt = prompt or [1, 2, 3]
    for i, params in enumerate(sampling):
        rows.add(
            NewSequence(
                row=i,
                token_ids=ints(prompt + (output or [])),
                num_prompt_tokens=len(prompt),
                sampling=params,
            )
        )
    assert not rows.failed
    return rows


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3


def sample(logits: Tensor, *sampling: SamplingParams, **tokens: list[int]) -> list[int]:
    """Return the token sampled for each row; PyTorch's operations and the CPU kernels must sample the same ones."""
    rows, places, given = make_rows(*sampling, **tokens), ints(range(len(sampling))), logits.clone()
    token_ids: list[int] = Sampler(rows).sample(logits, places).token_ids.tolist()
    assert Sampler(rows, threads=threads("avx2")).sample(logits, places).token_ids.tolist() == token_ids
    assert torch.equal(logits, given)
    return token_ids


def drawn_from(logits: Tensor, params: dict[str, Any], num_draws: int = 4000) -> NDArray[np.float64]:
    """Return the frequencies of tokens drawn with different seeds."""
    rows = [SamplingParams(seed=seed, **params) for seed in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1).contiguous(), *rows)
    return np.bincount(tokens, minlength=VOCAB_SIZE) / num_draws


def processed(logits: Tensor, *processors: Any, ids: list[int] | None = None) -> Tensor:
    """Return the logits after transformers' processors."""
    for processor in processors:
        logits = processor(torch.tensor([ids or [1, 2, 3]]), logits)
    return logits


def test_greedy_takes_the_first_of_the_highest() -> None:
    logits = random_logits(3)
    logits[0, [7, 400]] = 50.0
    assert sample(logits, GREEDY, GREEDY, GREEDY) == [7, *logits[1:].argmax(dim=1).tolist()]


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.5}, [transformers.TemperatureLogitsWarper(0.5)]),
        ({"top_k": 5}, [transformers.TopKLogitsWarper(5)]),
        ({"top_k": 400}, [transformers.TopKLogitsWarper(400)]),
        ({"top_p": 0.4}, [transformers.TopPLogitsWarper(0.4)]),
        ({"top_p": 0.999}, [transformers.TopPLogitsWarper(0.999)]),
        ({"min_p": 0.1}, [transformers.MinPLogitsWarper(0.1)]),
        (
            {"temperature": 2.0, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
            [
                transformers.TemperatureLogitsWarper(2.0),
                transformers.TopKLogitsWarper(300),
                transformers.TopPLogitsWarper(0.8),
                transformers.MinPLogitsWarper(0.02),
            ],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_draws_follow_transformers_distribution(params: dict[str, Any], processors: list[Any]) -> None:
    logits = random_logits(1, seed=3)
    expected = processed(logits, *processors).softmax(dim=-1)[0].numpy()
    found = weights(logits, torch.tensor([params.get("temperature", 1.0)]))
    least = threshold(found, ints([params.get("top_k", 0)]), np.array([params.get("top_p", 1.0)], dtype=np.float32))
    is_kept = (found >= least.clamp(min=params.get("min_p", 0.0)))[0].numpy()
    assert (is_kept == (expected > 0)).all()
    shares = drawn_from(logits, params)
    assert (shares[expected == 0] == 0).all()
    # Five standard deviations of a frequency among 4,000 draws.
    assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3).all()


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.51}, 2), ({"min_p": 0.5}, 2)],
    ids=str,
)
def test_top_k_top_p_and_min_p_of_four_tokens(params: dict[str, Any], kept: int) -> None:
    """The probabilities of the tokens are 0.5, 0.25, 0.125 and 0.125."""
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, :4] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert np.flatnonzero(drawn_from(logits, params, 300)).tolist() == list(range(kept))


def test_penalties_equal_transformers_and_count_output_alone() -> None:
    logits = random_logits(1)
    output = [5, 5, 9]
    ids = [1, 2, 3, *output]
    expected = processed(logits.clone(), transformers.RepetitionPenaltyLogitsProcessor(1.7), ids=ids)
    expected[0, 5] -= 0.5 + 2 * 0.25
    expected[0, 9] -= 0.5 + 0.25
    params: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    for token in (1, 2, 3, 5, 9):
        # The token's raw logit is set so that, after the penalties, it is just above or just below the highest of the
        # others.
        others = expected.clone()
        others[0, token] = -torch.inf
        gap = float(others.max()) - float(expected[0, token])
        for extra, is_chosen in ((0.01, True), (-0.01, False)):
            raw = logits.clone()
            scale = 1.7 if float(raw[0, token]) < 0 else 1 / 1.7
            lifted = (
                float(expected[0, token]) + gap + extra + (float(raw[0, token]) * scale - float(expected[0, token]))
            )
            raw[0, token] = lifted / (1.7 if lifted < 0 else 1 / 1.7)
            chosen = sample(raw, SamplingParams(temperature=0.0, **params), output=output)
            assert (chosen == [token]) is is_chosen


def test_the_bias_comes_before_the_penalties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 1], logits[0, 8] = 1.0, 2.0
    biased = SamplingParams(temperature=0.0, repetition_penalty=2.0, embedding_bias=((1, 4.0),))
    assert sample(logits, biased) == [1]  # (1 + 4) / 2 > 2
    assert sample(logits, SamplingParams(temperature=0.0, repetition_penalty=2.0, embedding_bias=((1, 2.5),))) == [8]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.5, 100.0])
@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"embedding_bias": ((11, 3.4e38),)}, {11}),
        ({"embedding_bias": tuple((token, 3.4e38) for token in range(VOCAB_SIZE))}, set(range(VOCAB_SIZE))),
        ({"embedding_bias": tuple((token, -3.4e38) for token in range(VOCAB_SIZE))}, set(range(VOCAB_SIZE))),
        ({"repetition_penalty": 1e-38}, {2}),
        ({"embedding_bias": ((3, 3.4e38),), "repetition_penalty": 1e-3}, {3}),
        ({"top_k": (1 << 32) - 1}, set(range(VOCAB_SIZE))),
    ],
)
def test_the_largest_permitted_values_give_a_token(
    params: dict[str, Any], wanted: set[int], temperature: float
) -> None:
    """These values used to overflow, which made the step fail for all requests."""
    logits = random_logits(1)
    logits[0, :4] = torch.tensor([0.0, -1.0, 1.0, -2.0])
    assert sample(logits, SamplingParams(temperature=temperature, seed=1, **params))[0] in wanted
    beam = SamplingParams(temperature=temperature, beam_width=2, **params)
    (found,) = Sampler(make_rows(beam)).sample(logits, ints([0])).candidates.values()
    assert found.token_ids[0] in wanted
    assert not np.isnan(found.log_probs).any()


def test_end_tokens_are_held_back_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0
    params = SamplingParams(temperature=0.0, min_tokens=2, end_ids=(7, 8))
    assert sample(logits, params) == [9]
    assert sample(logits, params, output=[4]) == [9]
    assert sample(logits, params, output=[4, 4]) == [7]


def test_log_probs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(2)
    rows = make_rows(SamplingParams(temperature=0.0, log_probs=3, embedding_bias=((11, 100.0),)), GREEDY)
    sampled = Sampler(rows).sample(logits, ints([0, 1]))
    assert sampled.token_ids.tolist() == [11, int(logits[1].argmax())]
    (found,) = sampled.log_probs
    expected = logits[0].log_softmax(dim=0)
    assert (found.row, found.token_rank) == (0, int((logits[0] > logits[0, 11]).sum()) + 1)
    assert found.token_log_prob == pytest.approx(float(expected[11]), abs=1e-5)
    assert found.top_token_ids == tuple(expected.topk(3).indices.tolist())
    assert found.top_log_probs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_a_row_with_broken_logits_fails_alone() -> None:
    logits = random_logits(4)
    logits[0, 500], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    rows = make_rows(SamplingParams(seed=1), GREEDY, SamplingParams(top_k=3), SamplingParams(seed=9))
    sampled = Sampler(rows).sample(logits, ints(range(4)))
    assert [place for place, _ in sampled.errors] == [0, 1, 2]
    assert sampled.token_ids[3] == sample(logits[3:], SamplingParams(seed=9))[0]


def test_a_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_k": 40},
        {"top_k": 500, "top_p": 0.7},
        {"top_p": 0.9999},
        {"min_p": 0.05, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "log_probs": 2},
        {"embedding_bias": ((5, 2.0),), "min_tokens": 9, "end_ids": (4, 6)},
    ]
    generator = np.random.default_rng(5)
    sampling = [SamplingParams(seed=i, **kinds[i % len(kinds)]) for i in range(61)]
    logits = random_logits(61, seed=4)
    rows = make_rows(*sampling, output=[5, 5, 8])
    alone = [int(Sampler(rows).sample(logits[i : i + 1], ints([i])).token_ids[0]) for i in range(61)]
    for number in range(20):
        some = generator.permutation(61)[: generator.integers(1, 62)].astype(np.int32)
        sampler = Sampler(rows, threads=threads("avx2") if number % 2 else None)
        batch = sampler.sample(logits[torch.from_numpy(some).long()], some)
        assert batch.token_ids.tolist() == [alone[i] for i in some]


@pytest.mark.parametrize("has_triton", [False, True])
def test_tokens_chosen_on_the_device_equal_the_samplers(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_triton:
        monkeypatch.setattr(dispatch, "triton", operations, raising=False)
        monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    rows = make_rows(GREEDY, SamplingParams(seed=3, top_k=9), SamplingParams(seed=4, temperature=0.5), GREEDY)
    logits, places = random_logits(4), ints(range(4))
    logits[3, 1] = torch.inf
    sampler = Sampler(rows)
    assert sampler.is_plain(places)
    chosen = sampler.choose(logits, places).token_ids.tolist()
    assert chosen[:3] == sampler.sample(logits, places).token_ids.tolist()[:3]
    assert chosen[3] == -1
    assert not Sampler(make_rows(SamplingParams(log_probs=1))).is_plain(ints([0]))
    assert not Sampler(make_rows(SamplingParams(beam_width=2))).can_choose(ints([0]))


@pytest.mark.parametrize("has_triton", [False, True])
def test_rows_with_features_are_chosen_on_the_device_as_they_are_sampled(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_triton:
        monkeypatch.setattr(dispatch, "triton", operations, raising=False)
        monkeypatch.setattr(dispatch, "_takes_triton", lambda x: True)
    everything = tuple((token,) for token in range(VOCAB_SIZE))
    rows = make_rows(
        SamplingParams(temperature=0.0, log_probs=3),
        SamplingParams(seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, log_probs=1),
        SamplingParams(seed=4, temperature=0.7, bad_words=((7, 9),), no_repeat_ngram_size=2, log_probs=0),
        SamplingParams(seed=5, embedding_bias=((11, 40.0),), min_tokens=9, end_ids=(11,)),
        SamplingParams(seed=6, top_p=0.9, top_p_decay=0.5, allowed_token_ids=tuple(range(5, VOCAB_SIZE, 3))),
        SamplingParams(temperature=0.0, bad_words=everything),
        SamplingParams(temperature=0.0, log_probs=2),
        SamplingParams(temperature=0.0, presence_penalty=30.0),
        SamplingParams(seed=9),
        SamplingParams(seed=8, log_probs=1),
        SamplingParams(seed=8),
        output=[7, 9, 7],
    )
    rows.features[[7, 8, 9]] |= np.uint16(Feature.GUIDED)
    logits, places = random_logits(11), ints(range(11))
    logits[6, 1] = torch.nan
    # The mask of the eighth row allows two tokens of its prompt, and that of the ninth allows all tokens; the grammar
    # of the tenth row has failed.
    allowed = np.zeros((2, VOCAB_SIZE), dtype=np.bool_)
    allowed[0, [1, 3]], allowed[1] = True, True
    masks = np.packbits(allowed, axis=1, bitorder="little")
    constraints = Constraints({7: masks[0], 8: masks[1]}, {9: InvalidArgumentError("no")})
    sampler = Sampler(rows)
    assert sampler.can_choose(places)
    chosen = sampler.choose(logits, places, constraints)
    found, wanted = chosen.read(chosen.values.numpy()), sampler.sample(logits, places, constraints)
    natively = Sampler(rows, threads=threads("avx2")).sample(logits, places, constraints)
    assert natively.token_ids.tolist() == wanted.token_ids.tolist()
    assert dict(natively.errors) == dict(wanted.errors)
    assert natively.log_probs == wanted.log_probs
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert dict(found.errors) == dict(wanted.errors)
    assert sorted(place for place, _ in found.errors) == [5, 6, 9]
    assert found.log_probs == wanted.log_probs
    assert [item.row for item in found.log_probs] == [0, 1, 2]


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 30])
def test_packed_masks_are_unpacked_on_a_device(num_tokens: int) -> None:
    allowed = torch.rand(3, num_tokens) < 0.5
    allowed[0, -1], allowed[1, -1] = True, False
    masks = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    assert torch.equal(unpacked(masks, num_tokens), allowed)


def test_a_mask_without_a_token_left_undoes_the_other_processors_of_its_row_alone() -> None:
    raw = torch.arange(12.0).view(2, 6)
    logits = raw - 100
    logits[0, :3] = -torch.inf
    allow(logits, raw, [0, 1], [np.array([0b000011], np.uint8), np.array([0b110000], np.uint8)])
    inf = torch.inf
    assert logits.tolist() == [[0, 1, -inf, -inf, -inf, -inf], [-inf, -inf, -inf, -inf, -90, -89]]


def test_draws_depend_on_seed_sequence_and_position() -> None:
    rows = make_rows(*[SamplingParams(seed=5)] * 3)
    rows.add(
        NewSequence(
            row=1, token_ids=ints([1, 2, 3]), num_prompt_tokens=3, sampling=SamplingParams(seed=5), sequence_index=1
        )
    )
    rows.append_tokens(ints([2]), ints([4]))
    logits = torch.zeros(3, VOCAB_SIZE)
    first, other_sequence, later = Sampler(rows).sample(logits, ints([0, 1, 2])).token_ids.tolist()
    assert len({first, other_sequence, later}) == 3
    rows.append_tokens(ints([0]), ints([4]))
    assert Sampler(rows).sample(logits[:1], ints([0])).token_ids.tolist() == [later]


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds = np.arange(20000, dtype=np.uint64)
    zeros = np.zeros(20000, dtype=np.int32)
    by_seed = uniforms(seeds, zeros, zeros)
    by_position = uniforms(np.zeros_like(seeds), zeros, seeds.astype(np.int32))
    for numbers in (by_seed, by_position):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert (np.abs(counts - 1000) < 5 * np.sqrt(1000)).all()
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.03


def test_a_bias_outside_the_vocabulary_fails_its_row() -> None:
    rows = Rows(1, 64, 16, 8, VOCAB_SIZE)
    params = SamplingParams(embedding_bias=((VOCAB_SIZE, 1.0),))
    rows.add(NewSequence(row=0, token_ids=ints([1]), num_prompt_tokens=1, sampling=params))
    assert isinstance(rows.failed[0], InvalidArgumentError)
