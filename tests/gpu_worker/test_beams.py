"""Beam search on the embedded model: sequences and scores as transformers', the same whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import ModelFolder, open_model_folder
from protos import generation_pb2 as pb
from tests.gpu_worker.tiny_models import make_runner
from tests.gpu_worker.whole import Whole, contents, outputs

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
# A beam's score is a sum of log probabilities that differ by up to 1e-3 where layers are summed in another order.
BOUND = 5e-3


@pytest.fixture(scope="module")
def folder() -> ModelFolder:
    return open_model_folder("smollm2")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("smollm2", activations="f32", max_kv_tokens=4096, max_batch_size=64, max_sequence_length=512)


@pytest.fixture(scope="module")
def prompts(folder: ModelFolder) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def end_ids(folder: ModelFolder) -> tuple[int, ...]:
    """Beside the model's own, tokens that come often, so that beams end: line breaks and full stops."""
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return (*folder.end_ids, *(tokenizer.encode(text).ids[0] for text in ("\n", ".", ",")))


def request_of(number: int, prompt: list[int], search: dict[str, Any]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"b{number}",
        token_ids=pb.TokenIds(values=prompt),
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingConfig(**search),
    )


def test_sequences_and_scores_are_those_of_transformers(
    runner: ModelRunner, transformers_model: Any, prompts: list[list[int]], end_ids: tuple[int, ...]
) -> None:
    """All prompts and searches run in one batch here, and one by one there."""
    cases = [(prompt, search) for prompt in prompts for search in SEARCHES]
    found = Whole(runner, end_ids).run([request_of(i, *case) for i, case in enumerate(cases)])
    num_ended = 0
    for (prompt, search), request in zip(cases, found, strict=True):
        with torch.inference_mode():
            expected = transformers_model.generate(
                torch.tensor([prompt]),
                num_beams=search["beam_width"],
                length_penalty=search["length_penalty"],
                early_stopping=EARLY_STOPPING[search["early_stopping"]],
                num_return_sequences=search.get("num_return_sequences", 1),
                max_new_tokens=MAX_TOKENS,
                eos_token_id=list(end_ids),
                pad_token_id=PAD,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        scores = expected.sequences_scores.tolist()
        for sequence, tokens, score in zip(request.sequences, expected.sequences.tolist(), scores, strict=True):
            assert sequence.end is not None
            assert sequence.end.cumulative_log_prob is not None
            own = sequence.output.tolist()
            length = len(own)
            assert sequence.end.cumulative_log_prob / length ** search["length_penalty"] == pytest.approx(
                score, abs=BOUND
            )
            assert own == tokens[len(prompt) : len(prompt) + length]
            assert set(tokens[len(prompt) + length :]) <= {PAD}
            num_ended += sequence.end.stop_token_id is not None
    assert num_ended > 4


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
    together = [outputs(request) for request in Whole(runner, end_ids).run([*requests, *others])]
    alone = [outputs(Whole(runner, end_ids).run([request])[0]) for request in (*requests, *others)]
    assert alone == together
    small = Whole(runner, end_ids, num_blocks=10)
    assert [outputs(request) for request in small.run([*requests, *others])] == together
    assert small.core.totals.num_preemptions > 0
    moved = Whole(runner, end_ids)
    made = [moved.submit(request) for request in (*requests, *others)]
    for _ in range(6):
        moved.step()
    later = Whole(runner, end_ids)
    for request in made:
        if request.live_sequences:
            later.recover(request)
    while later.step():
        pass
    ended = [later.core.lifecycle.requests.get(request.request_id, request) for request in made]
    assert [outputs(request) for request in ended] == together
    moved.lose_worker()
    while moved.step():
        pass
    assert [outputs(request) for request in made] == together


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_what_is_said_of_the_prompt_comes_once_whichever_part_is_lost(
    runner: ModelRunner, end_ids: tuple[int, ...], tmp_path: Path, num_steps: int
) -> None:
    """The prompt takes three steps; something is lost in each of them, and in each behind."""
    request = request_of(0, [7 + i % 30 for i in range(40)], SEARCHES[0])
    request.output.prompt_log_probs = 2
    (alone,) = Whole(runner, end_ids).run([request])
    expected = contents(alone)
    assert len(expected[0].prompt_log_probs) == 39
    whole = Whole(runner, end_ids, max_num_tokens=16, journal=tmp_path / "journal.sqlite")
    made = whole.submit(request)
    for _ in range(num_steps):
        assert whole.step()
    whole.lose_worker()
    whole.run([])
    assert contents(made) == expected
    # The same once more, and another scheduler.
    request.request_id = "again"
    whole.submit(request)
    for _ in range(num_steps):
        assert whole.step()
    whole.lose_scheduler()
    whole.run([])
    assert contents(whole.core.lifecycle.requests["again"]) == expected
