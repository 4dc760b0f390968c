"""Speculative decoding: drafts change only the number of steps, not the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import GREEDY, NewSequence
from gpu_worker.model_runner import ModelRunner
from gpu_worker.speculation.drafts import look_up
from gpu_worker.speculation.verification import Drafts, with_shadows
from midstream.errors import ConfigError
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.request import Request
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.tiny_models import SHAPE, ints, make_runner, make_tiny_model

TEXT = "One two three four. One two three four. One two three"
LOOK_UP = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=4)
DRAFT_MODEL = pb.SpeculativeConfig(method=pb.SpeculativeConfig.METHOD_DRAFT_MODEL, num_draft_tokens=3)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5, "num_return_sequences": 2},
    {"temperature": 0.3, "seed": 9, "top_k": 4, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "min_tokens": 4},
    {"temperature": 0.5, "seed": 3, "no_repeat_ngram_size": 4, "embedding_bias": {20: 1.5}},
    {"temperature": 0, "allowed_token_ids": range(5, 40)},
]


def requests_of(prompt: list[int], speculative: pb.SpeculativeConfig | None, **more: Any) -> list[pb.GenerateRequest]:
    return [
        pb.GenerateRequest(
            request_id=f"{more.get('max_tokens', 0)}.{number}",
            token_ids=pb.TokenIds(values=prompt),
            sampling=pb.SamplingConfig(**sampling),
            speculative=speculative,
            output=pb.OutputConfig(log_probs=2),
            **more,
        )
        for number, sampling in enumerate(SAMPLINGS)
    ]


def log_probs_of(request: Request) -> list[list[tuple[int, float]]]:
    """Return the token offset and log probability of each token, by sequence."""
    found = []
    for sequence in request.sequences:
        assert sequence.end is not None
        rows = [(it.token_offset, worker_pb2.RowOutputs.FromString(it.data)) for it in sequence.outputs]
        found.append([(at, row.log_probs.token_log_probs[0]) for at, row in rows if at < sequence.end.num_tokens])
    return found


def accepted(requests: list[Request]) -> int:
    return sum(request.counters.num_accepted_tokens for request in requests)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("smollm2", max_kv_tokens=4096, max_batch_size=32, max_sequence_length=512)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
    return tokenizer.encode(TEXT).ids


def test_prompt_lookup_drafts_the_tokens_after_an_earlier_match() -> None:
    tokens = ints([1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 3])
    assert look_up(tokens, 3, 4).tolist() == [5, 9, 2, 3]
    assert look_up(tokens, 3, 1).tolist() == [5]
    assert look_up(ints([7, 1, 2, 8, 1, 2]), 2, 9).tolist() == [8, 1, 2]
    assert look_up(ints([7, 7]), 3, 4).tolist() == [7]
    assert look_up(ints([1, 2, 3]), 3, 4).tolist() == []
    assert look_up(ints([1]), 3, 4).tolist() == []


def test_a_prediction_is_searched_first() -> None:
    tokens = ints([1, 2, 3, 4, 1, 2])
    assert look_up(tokens, 3, 4, (1, 2, 9, 8)).tolist() == [9, 8]
    assert look_up(tokens, 3, 4, (5, 6)).tolist() == [3, 4, 1, 2]
    assert look_up(tokens, 3, 4, (7, 1, 2)).tolist() == [3, 4, 1, 2]
    assert look_up(ints([1]), 3, 4, (1, 2)).tolist() == [2]


def test_a_prediction_saves_steps_and_changes_no_token(runner: ModelRunner) -> None:
    prompt = [2000, 2001, 2002, 2003]
    plain = CoreWithRunners(runner, ()).run(requests_of(prompt, None, max_tokens=16))
    drafts = pb.SpeculativeConfig()
    drafts.CopyFrom(LOOK_UP)
    drafts.prediction_token_ids.extend(outputs(plain[0])[0])
    predicted = CoreWithRunners(runner, ()).run(requests_of(prompt, drafts, max_tokens=16))
    assert [outputs(request) for request in predicted] == [outputs(request) for request in plain]
    assert predicted[0].counters.num_accepted_tokens >= 8
    assert predicted[0].counters.num_steps <= 8


def test_tokens_and_log_probs_are_the_same_with_drafts(runner: ModelRunner, prompt: list[int]) -> None:
    plain = CoreWithRunners(runner, (0, 2)).run(requests_of(prompt, None, max_tokens=24))
    system = CoreWithRunners(runner, (0, 2))
    drafted = system.run(requests_of(prompt, LOOK_UP, max_tokens=24))
    assert [outputs(request) for request in drafted] == [outputs(request) for request in plain]
    for one, other in zip(drafted, plain, strict=True):
        assert log_probs_of(one) == log_probs_of(other)
    assert accepted(plain) == 0
    assert accepted(drafted) > 0
    steps = [stats.step for stats in system.stats]
    assert sum(step.num_accepted_tokens for step in steps) >= accepted(drafted)
    assert sum(step.num_draft_tokens for step in steps) >= sum(request.counters.num_draft_tokens for request in drafted)
    assert drafted[0].counters.num_steps < len(outputs(drafted[0])[0])


def test_an_end_within_a_run_is_the_end(runner: ModelRunner, prompt: list[int]) -> None:
    """Requests end at every length by `max_tokens`, and at each token of the output by a stop token."""
    whole = outputs(CoreWithRunners(runner, ()).run(requests_of(prompt, None, max_tokens=16)[:1])[0])[0]
    for max_tokens in range(1, 10):
        found = CoreWithRunners(runner, ()).run(requests_of(prompt, LOOK_UP, max_tokens=max_tokens)[:1])[0]
        assert outputs(found) == [whole[:max_tokens]]
    for stop in sorted(set(whole)):
        stopping = pb.StoppingConfig(stop_token_ids=[stop])
        found = CoreWithRunners(runner, ()).run(requests_of(prompt, LOOK_UP, max_tokens=16, stopping=stopping)[:1])[0]
        assert outputs(found) == [whole[: whole.index(stop) + 1]]


def test_drafts_survive_pauses_and_a_lost_worker(runner: ModelRunner, prompt: list[int]) -> None:
    plain = [outputs(it) for it in CoreWithRunners(runner, (0, 2)).run(requests_of(prompt, None, max_tokens=24))]
    small = CoreWithRunners(runner, (0, 2), num_blocks=9)
    assert [outputs(it) for it in small.run(requests_of(prompt, LOOK_UP, max_tokens=24))] == plain
    assert small.core.totals.num_preemptions > 0
    moved = CoreWithRunners(runner, (0, 2))
    made = [moved.submit(request) for request in requests_of(prompt, LOOK_UP, max_tokens=24)]
    for _ in range(5):
        moved.step()
    moved.lose_worker()
    while moved.step():
        pass
    assert [outputs(it) for it in made] == plain
    assert accepted(made) > 0


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a model, and a smaller model with the same vocabulary."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    make_tiny_model(target, "Llama")
    make_tiny_model(draft, "Qwen3", num_hidden_layers=1, head_dim=32)
    return target, draft


@pytest.mark.parametrize("is_same", [True, False])
def test_a_draft_model_changes_no_token(tiny_folders: tuple[Path, Path], is_same: bool) -> None:
    """If the model is its own draft model, all drafts are accepted, since they are sampled with the same random
    numbers.
    """
    target, draft = tiny_folders
    runner = make_runner(target, draft_model=str(target if is_same else draft), max_batch_size=32)
    prompt = np.random.default_rng(5).integers(3, SHAPE["vocab_size"], 40).tolist()
    plain = [outputs(it) for it in CoreWithRunners(runner, (2,)).run(requests_of(prompt, None, max_tokens=20))]
    drafted = CoreWithRunners(runner, (2,)).run(requests_of(prompt, DRAFT_MODEL, max_tokens=20))
    assert [outputs(it) for it in drafted] == plain
    num_drafts = sum(request.counters.num_draft_tokens for request in drafted)
    if is_same:
        assert accepted(drafted) == num_drafts > 40
    else:
        assert accepted(drafted) < num_drafts


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "Llama", vocab_size=SHAPE["vocab_size"] + 1)
    with pytest.raises(ConfigError, match="332 tokens"):
        make_runner(tiny_folders[0], draft_model=str(tmp_path))


def test_drafts_are_kept_while_room_is_made_to_verify_them() -> None:
    """All rows of the worker are in use, and each draft needs another row."""
    rows = Rows(1, 16, 4, 8, 100)
    rows.add(NewSequence(row=0, token_ids=ints([5, 6]), num_prompt_tokens=2, block_ids=ints([3]), sampling=GREEDY))
    assert with_shadows(rows, ints([0]), Drafts({0: ints([7, 8])})).tolist() == [0, 1, 2]
    assert [rows.tokens[row, : rows.lengths[row]].tolist() for row in range(3)] == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert rows.tokens[0, :4].tolist() == [5, 6, 7, 8]  # rows that the model runs
