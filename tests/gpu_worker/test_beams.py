"""Beam search on the embedded model gives the same sequences and scores as transformers, in any batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import ModelFolder, open_model_folder
from protos import generation_pb2 as pb
from scheduler.core.request import FinishReason, Request, Sequence
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents, outputs
from tests.gpu_worker.tiny_models import make_runner

PROMPTS = ("The capital of France is", "1, 1, 2, 3, 5, 8,", "Roses are red,")
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 2, "length_penalty": 0.0, "early_stopping": 1},
    {"beam_width": 4, "length_penalty": 1.0, "early_stopping": 0, "num_return_sequences": 4},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": 2, "num_return_sequences": 2},
    {"beam_width": 3, "length_penalty": -1.0, "early_stopping": 0, "num_return_sequences": 3},
]
EARLY_STOPPING: dict[int, bool | str] = {0: False, 1: True, 2: "never"}
MAX_TOKENS = 8
PAD = 5
# The score of a beam is a sum of log probabilities; it differs by up to 1e-3 if layers are summed in another order.
BOUND = 5e-3


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return open_model_folder("smollm2")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = make_runner("smollm2", activations="f32", max_kv_tokens=4096, max_batch_size=64, max_sequence_length=512)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def prompts(folder: ModelFolder) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def end_ids(folder: ModelFolder) -> tuple[int, ...]:
    """Return the model's own end ids and some frequent tokens (line breaks, full stops), so that beams end early."""
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return (*folder.end_ids, *(tokenizer.encode(text).ids[0] for text in ("\n", ".", ",")))


def request_of(number: int, prompt: list[int], search: dict[str, Any]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"b{number}",
        token_ids=pb.TokenIds(values=prompt),
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingConfig(**search),
    )


def expected_of(
    model: Any, request: pb.GenerateRequest, search: dict[str, Any], end_ids: tuple[int, ...], **more: Any
) -> Any:
    """Return the result of transformers' beam search."""
    with torch.inference_mode():
        return model.generate(
            torch.tensor([request.token_ids.values[:]]),
            num_beams=search["beam_width"],
            length_penalty=search["length_penalty"],
            early_stopping=EARLY_STOPPING[search["early_stopping"]],
            num_return_sequences=search.get("num_return_sequences", 1),
            max_new_tokens=request.max_tokens,
            eos_token_id=list(end_ids),
            pad_token_id=PAD,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )


def check_search(made: Request, request: pb.GenerateRequest, search: dict[str, Any], expected: Any) -> list[Sequence]:
    """Compare the sequences and scores of a search with those of transformers; return the sequences."""
    num_prompt, scores = len(request.token_ids.values), expected.sequences_scores.tolist()
    for sequence, tokens, score in zip(made.sequences, expected.sequences.tolist(), scores, strict=True):
        assert sequence.end is not None
        assert sequence.end.cumulative_log_prob is not None
        own = sequence.output.tolist()
        assert own == tokens[num_prompt : num_prompt + len(own)], (request, search)
        assert set(tokens[num_prompt + len(own) :]) <= {PAD}
        assert sequence.end.cumulative_log_prob / len(own) ** search["length_penalty"] == pytest.approx(
            score,
            abs=BOUND,
            rel=1e-4,  # the score is a sum of many log probabilities, whose rounding errors add up
        )
    return made.sequences


def test_sequences_and_scores_equal_those_of_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]], end_ids: tuple[int, ...]
) -> None:
    """All prompts and searches run here in one batch, whereas transformers runs them one at a time."""
    requests = [request_of(i, prompts[i % 3], search) for i, search in enumerate(SEARCHES)]
    num_ended = 0
    found = CoreWithRunners(runner, end_ids).run(requests)
    for made, request, search in zip(found, requests, SEARCHES, strict=True):
        expected = expected_of(transformers_model, request, search, end_ids)
        sequences = check_search(made, request, search, expected)
        num_ended += sum(sequence.end is not None and sequence.end.stop_token_id is not None for sequence in sequences)
    assert num_ended > 2


# For each search, the index of a prompt and stop words, which end within a token, at its end, or span two. None of them
# is found in a text that begins in the prompt, where transformers looks too. Transformers prepares each list slowly.
STOP_WORDS = [(1, ["\n", "e s", "3,"]), (2, ["\n", "e s", "3,"]), (2, [" the", "hit"]), (0, ["\n", "e s", "3,"])]


def test_beams_end_at_stop_words_as_in_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]], folder: ModelFolder
) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder.path / "tokenizer.json"))
    requests = []
    for number, (search, (prompt, words)) in enumerate(zip(SEARCHES, STOP_WORDS, strict=True)):
        requests.append(request_of(number, prompts[prompt], search))
        requests[-1].stopping.stop_words.extend(words)
    num_stopped = 0
    found = CoreWithRunners(runner, folder.end_ids).run(requests)
    for made, request, search in zip(found, requests, SEARCHES, strict=True):
        words = list(request.stopping.stop_words)
        expected = expected_of(
            transformers_model, request, search, folder.end_ids, stop_strings=words, tokenizer=tokenizer
        )
        sequences = check_search(made, request, search, expected)
        assert len({tuple(sequence.output) for sequence in sequences}) == len(sequences)
        for sequence in sequences:
            if sequence.end is not None and sequence.end.stop_word:
                assert sequence.end.stop_word in tokenizer.decode(sequence.output.tolist())
                assert sequence.end.stop_word not in tokenizer.decode(sequence.output.tolist()[:-1])
                num_stopped += 1
    assert num_stopped > 3


class Sequences(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Ends a row with one of these sequences of tokens."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        return torch.tensor([self.end(row) for row in input_ids.tolist()])

    def end(self, row: list[int]) -> bool:
        return any(row[-len(sequence) :] == sequence for sequence in self._sequences)


def test_beams_end_at_stop_sequences_as_in_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]], folder: ModelFolder
) -> None:
    num_stopped = 0
    system = CoreWithRunners(runner, folder.end_ids)
    plain = [request_of(100 + number, prompts[number % 3], search) for number, search in enumerate(SEARCHES)]
    for number, (whole, search) in enumerate(zip(system.run(plain), SEARCHES, strict=True)):
        request = request_of(number, prompts[number % 3], search)
        prompt, tokens = request.token_ids.values[:], whole.sequences[0].output.tolist()
        # The last one begins in the prompt, and the second ends like the first.
        choices = [tokens[2:4], tokens[1:4], tokens[3:6], [*prompt[-1:], *tokens[:1]]]
        criteria = Sequences(choices[number:])
        request.stopping.stop_word_token_ids.extend(pb.TokenIds(values=ids) for ids in choices[number:])
        (made,) = system.run([request])
        expected = expected_of(transformers_model, request, search, folder.end_ids, stopping_criteria=[criteria])
        for sequence in check_search(made, request, search, expected):
            own = sequence.output.tolist()
            is_stopped = criteria.end(prompt + own)
            is_complete = not is_stopped and own[-1] not in folder.end_ids
            assert sequence.end is not None
            assert sequence.end.reason is (FinishReason.LENGTH if is_complete else FinishReason.STOP)
            num_stopped += is_stopped
    assert num_stopped > 2


def test_beams_are_the_same_alone_paused_moved_and_recovered(
    runner: ModelRunner, prompts: list[list[int]], end_ids: tuple[int, ...]
) -> None:
    requests = [request_of(i, prompt, SEARCHES[i % 3]) for i, prompt in enumerate(prompts)]
    others = [
        pb.GenerateRequest(
            request_id=f"s{i}",
            token_ids=pb.TokenIds(values=prompt),
            max_tokens=12,
            sampling=pb.SamplingConfig(seed=i, num_return_sequences=2),
        )
        for i, prompt in enumerate(prompts)
    ]
    together = [outputs(request) for request in CoreWithRunners(runner, end_ids).run([*requests, *others])]
    alone = [outputs(CoreWithRunners(runner, end_ids).run([request])[0]) for request in (*requests, *others)]
    assert alone == together
    small = CoreWithRunners(runner, end_ids, num_blocks=10)
    assert [outputs(request) for request in small.run([*requests, *others])] == together
    assert small.core.totals.num_preemptions > 0
    moved = CoreWithRunners(runner, end_ids)
    made = [moved.submit(request) for request in (*requests, *others)]
    for _ in range(6):
        moved.step()
    later = CoreWithRunners(runner, end_ids)
    for request in made:
        if request.live_sequences:
            later.recover(request)
    while later.step():
        pass
    ended = [later.core.lifecycle.requests.get(request.request_id) or request for request in made]
    assert [outputs(request) for request in ended] == together
    moved.lose_worker()
    while moved.step():
        pass
    assert [outputs(request) for request in made] == together


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_prompt_outputs_are_reported_once_despite_losses(
    runner: ModelRunner, end_ids: tuple[int, ...], tmp_path: Path, num_steps: int
) -> None:
    """The prompt takes three steps. The worker is lost after `num_steps` steps: during the prompt or after it."""
    request = request_of(0, [7 + i % 30 for i in range(40)], SEARCHES[0])
    request.output.prompt_log_probs = 2
    (alone,) = CoreWithRunners(runner, end_ids).run([request])
    expected = contents(alone)
    assert len(expected[0].prompt_log_probs) == 39
    system = CoreWithRunners(runner, end_ids, max_num_tokens=16, journal=tmp_path / "journal")
    made = system.submit(request)
    for _ in range(num_steps):
        assert system.step()
    system.lose_worker()
    system.run([])
    assert contents(made) == expected
    # Repeat with a replaced scheduler instead of a lost worker.
    request.request_id = "again"
    system.submit(request)
    for _ in range(num_steps):
        assert system.step()
    system.lose_scheduler()
    system.run([])
    assert contents(system.core.lifecycle.requests["again"]) == expected


REPORTED: dict[str, Any] = {"beam_width": 3, "num_return_sequences": 3, "length_penalty": 1.0, "early_stopping": 1}


def reported(number: int, prompt: list[int], **search: Any) -> pb.GenerateRequest:
    """Return a beam-search request that asks for every reportable output."""
    request = request_of(number, prompt, REPORTED | search)
    request.output.log_probs = 4
    request.output.prompt_log_probs = 2
    request.output.return_context_logits = True
    request.output.return_generation_logits = True
    for name in ("hidden_states.30", "topk_logits.3"):
        request.output.additional_outputs.add(name=name, gather_context=True)
    return request


def expected_way(model: Any, request: pb.GenerateRequest, end_ids: tuple[int, ...], **more: Any) -> Any:
    """Return the result of beam search in transformers, with the logits and hidden states of each step."""
    outputs = {"output_logits": True, "output_hidden_states": True}
    return expected_of(model, request, REPORTED, end_ids, **outputs, **more)


def test_beam_outputs_equal_those_of_transformers_along_each_path(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]], end_ids: tuple[int, ...]
) -> None:
    """A token's logits are those of the beam that it extended, not of the row in which the beam ended."""
    requests = [reported(i, prompt) for i, prompt in enumerate(prompts)]
    num_parted = 0
    for sent, request in zip(requests, CoreWithRunners(runner, end_ids).run(requests), strict=True):
        prompt = sent.token_ids.values[:]
        expected = expected_way(transformers_model, sent, end_ids)
        with torch.inference_mode():
            whole = transformers_model(torch.tensor([prompt]), output_hidden_states=True)
        for place, made in enumerate(contents(request)):
            assert made.tokens == expected.sequences[place, len(prompt) : len(prompt) + len(made.tokens)].tolist()
            way = expected.beam_indices[place].tolist()[: len(made.tokens)]
            num_parted += len(set(way)) > 1
            logits = torch.stack([expected.logits[step][beam] for step, beam in enumerate(way)])
            states = torch.stack([expected.hidden_states[step][-1][beam, -1] for step, beam in enumerate(way)])
            assert close(made.array("generation_logits", 49152), logits)
            assert close(made.array("hidden_states.30", 576), states)
            assert close(made.array("topk_logits.3", 3), logits.topk(3).values)
            log_probs = torch.log_softmax(logits, dim=1)
            assert [item.rank for item in made.log_probs] == [
                int((row > row[token]).sum()) + 1 for row, token in zip(log_probs, made.tokens, strict=True)
            ]
            for item, row, token in zip(made.log_probs, log_probs, made.tokens, strict=True):
                assert item.log_prob == pytest.approx(float(row[token]), abs=BOUND)
                assert [log_prob for _, log_prob in item.top] == pytest.approx(row.topk(4).values.tolist(), abs=BOUND)
            # The first sequence reports the outputs of the prompt.
            assert ("context_logits" in made.tensors) == (place == 0) == bool(made.prompt_log_probs)
            if place == 0:
                assert close(made.array("context_logits", 49152), whole.logits[0])
                assert close(made.array("context_hidden_states.30", 576), whole.hidden_states[-1][0])
                assert len(made.prompt_log_probs) == len(prompt) - 1
    assert num_parted > 3


def close(found: Any, wanted: torch.Tensor) -> bool:
    return bool((torch.from_numpy(found.copy()) - wanted).abs().max() < 0.02)


class Digits:
    """Allows only digit tokens, at most six; after two digits, allows an end token."""

    def __init__(self, texts: list[str], num_prompt_tokens: int, end_ids: tuple[int, ...]) -> None:
        self._lengths = torch.tensor([len(text) if re.fullmatch("[0-9]+", text) else 0 for text in texts])
        self._num_prompt_tokens, self._end_ids = num_prompt_tokens, list(end_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for tokens, row in zip(input_ids[:, self._num_prompt_tokens :], scores, strict=True):
            length = int(self._lengths[tokens].sum())
            is_allowed = (self._lengths > 0) & (self._lengths + length <= 6)
            is_allowed[self._end_ids] = length >= 2
            row[~is_allowed] = -torch.inf
        return scores


def test_beams_follow_a_grammar_as_those_of_transformers_do(
    runner: ModelRunner, transformers_model: Any, folder: ModelFolder, prompts: list[list[int]]
) -> None:
    """The reference is a logits processor that does not use grammars; the distribution is renormalized after it."""
    requests = []
    for i, prompt in enumerate(prompts[:2]):
        request = reported(i, prompt)
        request.guided_decoding.guide_type = pb.GUIDE_TYPE_REGEX
        request.guided_decoding.guide = "[0-9]{2,6}"
        requests.append(request)
    found = CoreWithRunners(runner, folder.end_ids).run(requests)
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(folder.vocab_size)]
    for prompt, request, made_request in zip(prompts, requests, found, strict=False):
        digits = Digits(texts, len(prompt), folder.end_ids)
        expected = expected_way(
            transformers_model,
            request,
            folder.end_ids,
            logits_processor=transformers.LogitsProcessorList([digits]),
            renormalize_logits=True,
        )
        for place, made in enumerate(contents(made_request)):
            tokens = expected.sequences[place, len(prompt) :].tolist()
            assert made.tokens == tokens[: len(made.tokens)]
            assert set(tokens[len(made.tokens) :]) <= {PAD}
            assert made.cumulative_log_prob is not None
            score = made.cumulative_log_prob / len(made.tokens)
            assert score == pytest.approx(float(expected.sequences_scores[place]), abs=BOUND)
            # The reported values come from the distribution that was searched.
            assert made.cumulative_log_prob == pytest.approx(sum(item.log_prob for item in made.log_probs), abs=1e-4)
            assert all(item.rank <= len(item.top) for item in made.log_probs if item.log_prob >= item.top[-1][1])


@pytest.mark.parametrize("is_guided", [False, True])
def test_beam_outputs_are_identical_despite_losses(
    runner: ModelRunner, end_ids: tuple[int, ...], tmp_path: Path, prompts: list[list[int]], is_guided: bool
) -> None:
    def make(name: str, *, has_tensors: bool) -> pb.GenerateRequest:
        request = reported(0, prompts[1] * 3)
        request.request_id = name
        if is_guided:
            request.guided_decoding.guide_type = pb.GUIDE_TYPE_REGEX
            request.guided_decoding.guide = "[0-9 ,]{1,20}"
        if not has_tensors:
            request.output.return_context_logits = request.output.return_generation_logits = False
            del request.output.additional_outputs[:]
        return request

    for has_tensors in (True, False):
        (alone,) = CoreWithRunners(runner, end_ids).run([make("alone", has_tensors=has_tensors)])
        expected = contents(alone)
        assert all(item.log_probs for item in expected)
        # Requests without tensors run the same steps, so one order of losses is enough for them.
        for order in (("worker", "scheduler"), ("scheduler", "worker"))[: 2 if has_tensors else 1]:
            name = f"{order[0]} first"
            system = CoreWithRunners(runner, end_ids, max_num_tokens=16, journal=tmp_path / f"{has_tensors}{order[0]}")
            system.submit(make(name, has_tensors=has_tensors))
            # The first of the two is lost during the prompt, the second during generation.
            for part, num_steps in zip(order, (2, 4), strict=True):
                for _ in range(num_steps):
                    system.step()
                getattr(system, f"lose_{part}")()
            system.run([])
            assert contents(system.core.lifecycle.requests[name]) == expected
