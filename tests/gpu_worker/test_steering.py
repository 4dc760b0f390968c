"""Logits processing before sampling, compared with transformers' processors and with values computed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.sampling import logits_processors
from gpu_worker.sampling.logits_processors import (
    allow,
    bad_word_ends,
    decayed_top_p,
    repeated_ngram_ends,
    steer,
    unpacked,
)
from gpu_worker.sampling.sampler import Sampler
from midstream.errors import InvalidArgumentError
from tests.gpu_worker.tiny_models import ints

VOCAB_SIZE = 30


def make_rows(tokens: list[list[int]], sampling: list[SamplingParams], num_prompt: int = 2) -> Rows:
    rows = Rows(len(tokens), 256, 16, 8, VOCAB_SIZE)
    for row, (known, params) in enumerate(zip(tokens, sampling, strict=True)):
        rows.add(NewSequence(row=row, token_ids=ints(known), num_prompt_tokens=num_prompt, sampling=params))
    assert not rows.failed
    return rows


def steered(logits: Tensor, rows: Rows) -> Tensor:
    result = logits.clone()
    steer(result, rows, ints(range(len(logits))))
    return result


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_ngram_repeats_as_in_transformers(size: int) -> None:
    generator = np.random.default_rng(size)
    tokens = [generator.integers(0, 4, length).tolist() for length in (2, 3, 4, 9, 40, 80)]
    rows = make_rows(tokens, [SamplingParams(no_repeat_ngram_size=size)] * len(tokens))
    logits = torch.randn(len(tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    processor = transformers.NoRepeatNGramLogitsProcessor(size)
    expected = torch.cat([processor(torch.tensor([t]), logits[i : i + 1]) for i, t in enumerate(tokens)])
    assert torch.equal(steered(logits, rows), expected)
    assert expected.isinf().any()


def test_bad_words_without_an_end_behave_as_in_transformers() -> None:
    words = [[3], [1, 2], [2, 1, 2], [0, 0, 0, 0, 5], [7, 8]]
    generator = np.random.default_rng(1)
    tokens = [[0, 2], [2, 1], [0, 2, 1], [0, 0, 0, 0], [0, 7], *(generator.integers(0, 3, 12).tolist() for _ in "abcd")]
    rows = make_rows(tokens, [SamplingParams(bad_words=tuple(map(tuple, words)))] * len(tokens))
    logits = torch.randn(len(tokens), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    processor = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=[VOCAB_SIZE - 1])
    expected = torch.cat([processor(torch.tensor([t]), logits[i : i + 1]) for i, t in enumerate(tokens)])
    assert torch.equal(steered(logits, rows), expected)
    assert steered(logits, rows)[2].isinf().nonzero().flatten().tolist() == [2, 3]


def test_a_word_longer_than_the_text_bans_nothing() -> None:
    assert bad_word_ends(ints([5]), ((5, 5, 6), (9, 6))) == []
    assert repeated_ngram_ends(ints([5]), 3).tolist() == []
    assert repeated_ngram_ends(ints([5, 6, 5]), 2).tolist() == [6]


def test_top_p_decays_from_token_to_token() -> None:
    """top_p is 0.8, then 0.8 / 2, 0.8 / 4, and never below 0.15; token 9 resets it."""
    params = SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_min=0.15, top_p_reset_id=9)
    outputs: list[list[int]] = [[], [1], [1, 1], [1, 1, 1], [1, 1, 9], [1, 9, 1], [9, 9, 9, 1, 1]]
    rows = make_rows([[9, 9, *output] for output in outputs], [params] * len(outputs))
    top_p = decayed_top_p(rows, ints(range(len(outputs))))
    assert top_p.tolist() == pytest.approx([0.8, 0.4, 0.2, 0.15, 0.8, 0.4, 0.2])


def test_a_decayed_top_p_is_used_for_the_draw() -> None:
    """The probabilities are 0.5, 0.3 and 0.2: a top_p of 1 keeps all three tokens, and 0.4 only the first."""
    decaying = [SamplingParams(top_p=1.0, top_p_decay=0.4, top_p_min=0.4, seed=seed) for seed in range(60)]
    logits = torch.full((60, VOCAB_SIZE), -torch.inf)
    logits[:, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    for output, kept in (([], {0, 1, 2}), ([4], {0})):
        rows = make_rows([[1, 2, *output]] * 60, decaying)
        assert set(Sampler(rows).sample(logits, ints(range(60))).token_ids.tolist()) == kept


def test_virtual_tokens_of_a_prompt_are_skipped() -> None:
    rows = make_rows([[1, 1]], [SamplingParams(repetition_penalty=2.0, no_repeat_ngram_size=1)])
    rows.tokens[0, :2] = [VOCAB_SIZE, 3]
    logits = torch.ones(1, VOCAB_SIZE)
    assert steered(logits, rows)[0].isinf().nonzero().flatten().tolist() == [3]


def test_a_long_list_of_allowed_tokens_is_not_read_again_in_each_step() -> None:
    class Ids(tuple[int, ...]):
        num_reads = 0

        def __iter__(self) -> Iterator[int]:
            Ids.num_reads += 1
            return super().__iter__()

    rows = make_rows([[1, 2]], [SamplingParams(allowed_token_ids=Ids((3, 5)))])
    num_reads = Ids.num_reads
    for _ in range(2):
        assert steered(torch.ones(1, VOCAB_SIZE), rows)[0].isfinite().nonzero().flatten().tolist() == [3, 5]
    assert Ids.num_reads == num_reads


def test_only_allowed_tokens_remain_as_if_all_others_were_suppressed_in_transformers() -> None:
    allowed: list[tuple[int, ...]] = [(), (4,), (0, 7, 29), tuple(range(VOCAB_SIZE))]
    rows = make_rows([[1, 2]] * 4, [SamplingParams(allowed_token_ids=ids) for ids in allowed])
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    others = [[token for token in range(VOCAB_SIZE) if ids and token not in ids] for ids in allowed]
    expected = [
        transformers.SuppressTokensLogitsProcessor(ids)(torch.tensor([[1, 2]]), logits[i : i + 1])
        for i, ids in enumerate(others)
    ]
    assert torch.equal(steered(logits, rows), torch.cat(expected))
    given = logits.clone()
    sampled = Sampler(rows).sample(logits, ints([0, 1, 2]))
    assert sampled.token_ids[1] == 4
    assert sampled.token_ids[2] in (0, 7, 29)
    assert torch.equal(logits, given)


def test_an_allowed_token_is_still_biased_and_banned() -> None:
    """Tokens 3, 5 and 6 are allowed; the best of them is banned, and the bias makes 6 better than 5."""
    params = SamplingParams(
        temperature=0.0, allowed_token_ids=(3, 5, 6), bad_words=((3,),), embedding_bias=((6, 2.0), (9, 100.0))
    )
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3], logits[0, 5] = 9.0, 1.0
    assert Sampler(make_rows([[1, 2]], [params])).sample(logits, ints([0])).token_ids.tolist() == [6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_bans_every_token_fails_alone(temperature: float) -> None:
    everything = SamplingParams(temperature=temperature, bad_words=tuple((token,) for token in range(VOCAB_SIZE)))
    rows = make_rows([[1, 2], [1, 2]], [everything, SamplingParams(temperature=0.0, bad_words=((4,),))])
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 4], logits[:, 6] = 2.0, 1.0
    sampled = Sampler(rows).sample(logits, ints([0, 1]))
    ((place, error),) = sampled.errors
    assert (place, type(error)) == (0, InvalidArgumentError)
    assert sampled.token_ids[1] == 6


def test_changes_that_ban_all_that_a_mask_allows_are_dropped_in_that_row_alone() -> None:
    """Tokens 1 and 2 are allowed; the first row bans both, the second row only the first."""
    raw = torch.tensor([[9.0, 1.0, 2.0, 0.0], [9.0, 5.0, 2.0, 0.0], [9.0, 5.0, 2.0, 0.0]])
    logits = raw.clone()
    logits[0, 1:3] = logits[1, 1] = -torch.inf
    mask = np.array([0b0110], dtype=np.uint8)
    allow(logits, raw, [0, 1], [mask, mask])
    gone = -torch.inf
    assert logits.tolist() == [[gone, 1.0, 2.0, gone], [gone, gone, 2.0, gone], raw[2].tolist()]


def test_masks_are_unpacked_on_a_device_as_on_the_host() -> None:
    masks = np.random.default_rng(0).integers(0, 256, (3, 5), dtype=np.uint8)
    expected = np.unpackbits(masks, axis=1, bitorder="little")[:, :37] == 1
    assert unpacked(torch.from_numpy(masks), 37).tolist() == expected.tolist()


def test_masks_reach_a_device_packed_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, tuple[int, ...]]] = []

    def note(values: NDArray[Any], device: torch.device) -> Tensor:
        sent.append((values.dtype.name, values.shape))
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(logits_processors, "send", note)
    logits = torch.empty(3, 1001, device="meta")
    mask = np.full(126, 255, dtype=np.uint8)
    allow(logits, logits.clone(), [0, 2], [mask, mask])
    assert sent == [("uint8", (2, 126)), ("int64", (2,))]
