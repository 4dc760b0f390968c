"""Random combinations of features with greedy decoding: tokens, ends and log probabilities are those of transformers.

TEST_EXAMPLES=500 runs that many examples instead of a few.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.model_runner import ModelRunner
from midstream.text.sequence import SequenceText, TextRules
from protos import generation_pb2 as pb
from scheduler.core.events import StopWordFound
from scheduler.core.request import FinishReason, Request
from tests.gpu_worker.core_with_runners import Contents, CoreWithRunners, LogProb, contents
from tests.gpu_worker.greedy import MARGIN
from tests.gpu_worker.tiny_models import SHAPE, make_runner, make_tiny_model

VOCAB = SHAPE["vocab_size"]
LETTERS = "abcd"
PREFIXES = ([7] * 16, list(range(100, 133)), [5, 6, 5, 6, 5, 6, 9])
CLOSE = 2e-4


@dataclass(frozen=True)
class Case:
    """One request; features that are not set are off."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_sequences: int = 1
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    ngram: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    log_probs: int | None = None
    prompt_log_probs: int | None = None
    num_drafts: int = 0

    def request(self, name: str) -> pb.GenerateRequest:
        """Return the native request."""
        request = pb.GenerateRequest(
            request_id=name,
            token_ids=pb.TokenIds(values=self.prompt),
            max_tokens=self.max_tokens,
            sampling=pb.SamplingConfig(
                temperature=0.0,
                num_return_sequences=self.num_sequences,
                repetition_penalty=self.repetition,
                presence_penalty=self.presence,
                frequency_penalty=self.frequency,
                min_tokens=self.min_tokens,
                no_repeat_ngram_size=self.ngram,
                embedding_bias=dict(self.bias),
            ),
            stopping=pb.StoppingConfig(
                ignore_eos=True,
                stop_token_ids=self.stop_ids,
                bad_word_token_ids=[pb.TokenIds(values=word) for word in self.bad_words],
            ),
            output=pb.OutputConfig(log_probs=self.log_probs, prompt_log_probs=self.prompt_log_probs),
        )
        if self.num_drafts:
            request.speculative.method = pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP
            request.speculative.num_draft_tokens = self.num_drafts
        return request


@dataclass(frozen=True)
class Setting:
    """How the requests run: chunk size, cache, pool size, and the steps after which the worker is lost."""

    chunk: int
    reuse: bool
    num_blocks: int
    losses: tuple[int, ...]


TOKENS = st.integers(3, VOCAB - 1)
CASES = st.builds(
    Case,
    prompt=st.builds(lambda prefix, rest: (*prefix, *rest), st.sampled_from(PREFIXES), st.lists(TOKENS, max_size=4)),
    max_tokens=st.integers(1, 10),
    num_sequences=st.sampled_from([1, 1, 1, 2, 3]),
    repetition=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    frequency=st.sampled_from([0.0, 0.0, 1.1, -0.4]),
    min_tokens=st.sampled_from([0, 0, 2, 6, 12]),
    ngram=st.sampled_from([0, 0, 0, 1, 2, 3]),
    # The stop tokens, if any, are one token or a quarter of the vocabulary, so that many outputs end early.
    stop_ids=st.sampled_from([(), (), (7,), tuple(range(3, 64))]),
    stop_words=st.sampled_from([(), (), ("aa",), ("ab", "dca"), ("d", "ad")]),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    bias=st.dictionaries(TOKENS, st.sampled_from([4.0, 9.0, -6.0]), max_size=4).map(lambda items: tuple(items.items())),
    log_probs=st.sampled_from([None, 0, 3]),
    prompt_log_probs=st.sampled_from([None, None, None, 2]),
    num_drafts=st.sampled_from([0, 0, 0, 3]),
)
SETTINGS = st.builds(
    Setting,
    chunk=st.sampled_from([1, 7, 64, 2048]),
    reuse=st.booleans(),
    num_blocks=st.sampled_from([14, 64]),
    losses=st.sampled_from([(), (), (2,), (1, 5)]),
)


class Letters:
    """A decoder that maps each token to one of a few letters."""

    def open(self, *, skip_special_tokens: bool) -> Letters:
        return self

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(LETTERS[token % len(LETTERS)] for token in token_ids)

    def copy(self) -> Letters:
        return self

    def finish(self) -> str:
        return ""


class Readers:
    """Reads the tokens that requests emit, as a detokenizer does, and reports stop words to the scheduler."""

    def __init__(self, system: CoreWithRunners, cases: list[Case], made: list[Request]) -> None:
        self._system = system
        self._texts = {
            sequence: SequenceText(TextRules(TextRules.words(case.stop_words), min_tokens=case.min_tokens), Letters())
            for case, request in zip(cases, made, strict=True)
            for sequence in request.sequences
            if case.stop_words
        }

    def read(self) -> None:
        """Read the tokens that were emitted since the previous call."""
        for sequence, text in self._texts.items():
            new = sequence.output[text.num_tokens :]
            if new and text.stop_at is None:
                text.push(new)
                if text.stop_at is not None:
                    name, word = sequence.request.request_id, text.stop_word or ""
                    self._system.handle(StopWordFound(1, name, sequence.index, text.stop_at, word))


@dataclass(slots=True)
class Expected:
    """The result of transformers, truncated before the first token whose choice could depend on rounding."""

    tokens: list[int] = field(default_factory=list)
    is_whole: bool = True
    reason: FinishReason = FinishReason.LENGTH
    log_probs: list[torch.Tensor] = field(default_factory=list)


class Penalties:
    """OpenAI's penalties, which transformers does not have."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(self._case.prompt) :], minlength=VOCAB)
        penalties = self._case.presence * (counts > 0) + self._case.frequency * counts
        return scores - penalties


def processors_of(case: Case) -> transformers.LogitsProcessorList:
    """Return transformers' processors, in the documented order."""
    found: list[Any] = []
    if case.bias:
        found.append(transformers.SequenceBiasLogitsProcessor({(token,): value for token, value in case.bias}))
    found += [transformers.RepetitionPenaltyLogitsProcessor(case.repetition), Penalties(case)]
    if case.min_tokens and case.stop_ids:
        ends = list(case.stop_ids)
        found.append(transformers.MinNewTokensLengthLogitsProcessor(len(case.prompt), case.min_tokens, ends))
    if case.bad_words:
        found.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in case.bad_words]))
    if case.ngram:
        found.append(transformers.NoRepeatNGramLogitsProcessor(case.ngram))
    return transformers.LogitsProcessorList(found)


def expected_of(model: Any, case: Case) -> Expected:
    """Run greedy search in transformers, and apply stop words to its text."""
    made = model.generate(
        torch.tensor([case.prompt]),
        max_new_tokens=case.max_tokens,
        eos_token_id=list(case.stop_ids) or None,
        pad_token_id=0,
        do_sample=False,
        logits_processor=processors_of(case),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    result = Expected()
    output = made.sequences[0, len(case.prompt) :].tolist()
    for token, scores, logits in zip(output, made.scores, made.logits, strict=True):
        best = scores[0].topk(2).values
        if not best[0] - best[1] > MARGIN:
            result.is_whole = False
            return result
        result.tokens.append(token)
        result.log_probs.append(torch.log_softmax(logits[0], dim=0))
        text = Letters().decode(result.tokens)
        is_stop = token in case.stop_ids and len(output) == len(result.tokens)
        if len(text) >= case.min_tokens and text.endswith(case.stop_words or "-"):
            result.reason = FinishReason.STOP
            return result
        if is_stop:
            result.reason = FinishReason.STOP
    return result


@pytest.fixture(scope="module")
def model_and_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ModelRunner]]:
    folder = tmp_path_factory.mktemp("model")
    model: Any = make_tiny_model(folder, "Llama")
    model.generation_config.eos_token_id = None
    runner = make_runner(folder, kv="f32", max_batch_size=64)
    yield model, runner
    runner.close()


@given(setting=SETTINGS, cases=st.lists(CASES, min_size=2, max_size=5))
@settings(
    max_examples=int(os.environ.get("TEST_EXAMPLES", "15")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_features_together_give_what_transformers_does(
    model_and_runner: tuple[Any, ModelRunner], setting: Setting, cases: list[Case]
) -> None:
    model, runner = model_and_runner
    system = CoreWithRunners(
        runner,
        (),
        num_blocks=setting.num_blocks,
        max_num_tokens=setting.chunk,
        enable_block_reuse=setting.reuse,
    )
    numbers = itertools.count(1)
    # The second half of the requests reuses blocks of the first half.
    for half in (cases[::2], cases[1::2]):
        made = [system.submit(case.request(f"r{next(numbers)}")) for case in half]
        readers = Readers(system, half, made)
        for count in itertools.count():
            if not system.step():
                break
            readers.read()
            if count in setting.losses:
                system.lose_worker()
        for case, request in zip(half, made, strict=True):
            compare(case, contents(request), expected_of(model, case))
    with torch.inference_mode():
        prompt_rows = model(torch.tensor([cases[0].prompt])).logits[0].log_softmax(dim=1)
    compare_prompt(cases[0], contents(system.core.lifecycle.requests["r1"])[0].prompt_log_probs, prompt_rows)


def compare(case: Case, found: list[Contents], expected: Expected) -> None:
    assert len(found) == case.num_sequences
    for item in found:
        num_known = len(expected.tokens)
        assert item.tokens[:num_known] == expected.tokens, case
        if expected.is_whole:
            assert (len(item.tokens), item.reason) == (num_known, expected.reason), case
        assert (len(item.log_probs) > 0) == (case.log_probs is not None)
        for token, one, row in zip(item.tokens, item.log_probs, expected.log_probs, strict=False):
            compare_log_prob(one, token, row, case.log_probs or 0)


def compare_log_prob(one: LogProb, token: int, row: torch.Tensor, top: int) -> None:
    assert one.log_prob == pytest.approx(float(row[token]), abs=CLOSE)
    assert int((row > row[token] + CLOSE).sum()) < one.rank <= int((row > row[token] - CLOSE).sum())
    assert [value for _, value in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=CLOSE)


def compare_prompt(case: Case, found: list[LogProb], rows: torch.Tensor) -> None:
    assert len(found) == (0 if case.prompt_log_probs is None else len(case.prompt) - 1)
    for one, token, row in zip(found, case.prompt[1:], rows, strict=False):
        compare_log_prob(one, token, row, case.prompt_log_probs or 0)
