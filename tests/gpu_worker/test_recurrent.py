"""Models with recurrent state, driven by the scheduler's core: sharing, preemptions, forks and moves do not change the
tokens.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.kv.cache import block_bytes
from gpu_worker.model_runner import ModelRunner
from kernels import recurrence
from midstream.errors import UnsupportedError
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents, outputs
from tests.gpu_worker.greedy import wrong_tokens
from tests.gpu_worker.test_families import MODELS
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

FAMILIES = ("qwen3_next", "mamba2", "nemotron_h")
NUM_REQUESTS, MAX_TOKENS = 12, 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that creates transformers' model and its folder, once per family."""

    @cache
    def make(name: str) -> tuple[Any, Path]:
        family, settings = MODELS[name]
        folder = tmp_path_factory.mktemp(name)
        return make_tiny_model(folder, family, **settings), folder

    return make


def requests() -> list[pb.GenerateRequest]:
    """Return prompts of 20 to 60 tokens, half of them with a common prefix; some request several sequences or beams."""
    draw = random.Random(1)
    prefix = [draw.randrange(3, 331) for _ in range(40)]
    made = []
    for i in range(NUM_REQUESTS):
        tokens = [draw.randrange(3, 331) for _ in range(draw.randint(20, 60))]
        if i % 2:
            num_shared = min(len(tokens) - 1, draw.choice((17, 33, 40)))
            tokens[:num_shared] = prefix[:num_shared]
        sampling = pb.SamplingConfig(temperature=0)
        if i % 4 == 2:
            sampling = pb.SamplingConfig(temperature=1, seed=i, num_return_sequences=3)
        elif i == 4:
            sampling = pb.SamplingConfig(beam_width=3, num_return_sequences=2)
        made.append(
            pb.GenerateRequest(
                request_id=f"r{i}",
                token_ids=pb.TokenIds(values=tokens),
                max_tokens=MAX_TOKENS,
                sampling=sampling,
                output=pb.OutputConfig(log_probs=0) if i != 4 else None,
            )
        )
    return made


def run_alone(runner: ModelRunner) -> list[Any]:
    """Return the output of each request when it runs alone, without reuse."""
    return [contents(CoreWithRunners(runner, (), enable_block_reuse=False).run([item])[0]) for item in requests()]


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_depend_neither_on_the_cache_nor_on_pauses_chunks_or_the_loss_of_a_worker(folders: Any, name: str) -> None:
    model, folder = folders(name)
    runner = make_runner(folder, max_kv_tokens=2048, max_batch_size=32)
    alone = run_alone(runner)
    greedy = [(list(item.token_ids.values), found) for item, found in zip(requests(), alone, strict=True)]
    greedy = [pair for i, pair in enumerate(greedy) if i % 4 != 2 and i != 4]
    assert [wrong_tokens(model, prompt, found[0].tokens) for prompt, found in greedy] == [[]] * len(greedy)

    pressed = CoreWithRunners(runner, (), num_blocks=20, max_context_chunk=7)
    assert [contents(item) for item in pressed.run(requests())] == alone
    assert pressed.core.totals.num_preemptions > 0
    assert pressed.core.groups[0].blocks.counts.reused > 0

    system = CoreWithRunners(runner, ())
    made = [system.submit(item) for item in requests()]
    for steps in (3, 9):
        for _ in range(steps):
            system.step()
        runner.kv.states.fill_(torch.nan)
        system.lose_worker()
    system.run([])
    assert [contents(item) for item in made] == alone


def test_a_prefix_hit_ends_at_a_stored_state(folders: Any) -> None:
    """States exist at the ends of full blocks, both of prompts and of outputs."""
    system = CoreWithRunners(make_runner(folders("qwen3_next")[1]), ())
    tokens = list(range(3, 53))

    def run(name: str, prompt: list[int]) -> Any:
        (found,) = system.run(
            [
                pb.GenerateRequest(
                    request_id=name,
                    token_ids=pb.TokenIds(values=prompt),
                    max_tokens=20,
                    sampling=pb.SamplingConfig(temperature=0),
                )
            ]
        )
        return found

    first = run("first", tokens)
    answer = outputs(first)[0]
    again = run("again", tokens + answer[:17])
    assert (first.counters.num_cached_tokens, again.counters.num_cached_tokens) == (0, 64)
    assert outputs(again)[0][:3] == answer[17:]


def test_without_attention_blocks_are_given_back(folders: Any) -> None:
    """A sequence of Mamba 2 holds only the blocks of its last tokens, so two sequences can run at the same time, but
    only one of them could restart after a preemption.
    """
    system = CoreWithRunners(make_runner(folders("mamba2")[1], max_batch_size=2), (), num_blocks=14)
    made = [
        pb.GenerateRequest(
            request_id=f"r{i}",
            token_ids=pb.TokenIds(values=list(range(3 + i, 33))),
            max_tokens=180,
            sampling=pb.SamplingConfig(temperature=0),
        )
        for i in range(2)
    ]
    answers = [outputs(found)[0] for found in system.run(made)]
    assert [len(answer) for answer in answers] == [180, 180]
    assert system.core.totals.num_preemptions == 0
    pairs = [(list(item.token_ids.values), answer) for item, answer in zip(made, answers, strict=True)]
    assert [wrong_tokens(folders("mamba2")[0], *pair) for pair in pairs] == [[], []]


def test_a_draft_model_is_refused(folders: Any) -> None:
    folder = folders("mamba2")[1]
    with pytest.raises(UnsupportedError) as raised:
        make_runner(folder, draft_model=str(folder))
    assert raised.value.field == "draft_model"


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_block_outside_of_the_pool_has_its_state(folders: Any, name: str) -> None:
    runner = make_runner(folders(name)[1])
    runner.kv.states.copy_(torch.rand_like(runner.kv.states))
    memory = runner.kv.memory
    memory.hashes[3] = 7
    contents = memory.read(3, 7)
    assert contents is not None
    d = runner.model.description
    assert len(contents) == block_bytes(d, runner.kv.tokens_per_block, runner.model.kv_dtype)
    memory.write(5, contents)
    assert torch.equal(runner.kv.states[:, 5], runner.kv.states[:, 3])
    assert torch.equal(runner.kv.keys[:, 5], runner.kv.keys[:, 3])


@pytest.mark.parametrize("size", [1, 2, 7, 12, 64])
def test_fold_equals_a_sum(size: int) -> None:
    x = torch.arange(3.0 * size * 5).view(3, size, 5)
    assert torch.equal(recurrence.fold(x, 1), x.sum(1))
    assert torch.equal(recurrence.fold(x, -1), x.sum(-1))


def test_drafts_of_a_request_that_was_accepted_before_a_worker_registered_are_not_verified(folders: Any) -> None:
    model, folder = folders("mamba2")
    prompt = [5, 6, 7, 8] * 4
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(values=prompt),
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingConfig(temperature=0),
        speculative=pb.SpeculativeConfig(
            method=pb.SpeculativeConfig.METHOD_PROMPT_LOOKUP, num_draft_tokens=4, max_ngram_size=1
        ),
    )
    found = CoreWithRunners(make_runner(folder, kv="f32"), ()).run([request])[0]
    assert found.counters.num_draft_tokens == 0
    assert wrong_tokens(model, prompt, outputs(found)[0]) == []
