"""A hundred requests of the embedded model with features drawn at random: each gives the bits that it gives alone."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gpu_worker.model_runner import ModelRunner
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from scheduler.core.request import Request
from tests.adapter_folders import write_lora, write_prompt
from tests.example_package import install
from tests.gpu_worker.mixture import PROMPTS, draw, resolve
from tests.gpu_worker.test_post_processors import EXAMPLE
from tests.gpu_worker.tiny_models import make_runner
from tests.gpu_worker.whole import Contents, Whole, contents

# Running each alone takes most of a minute where the machine is slow or busy.
pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS = 100
END_IDS = (0, 2)
NUM_ROWS = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters and a prompt adapter."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_lora(root / "r4", 4, 1), write_lora(root / "r12", 12, 2), write_prompt(root / "soft", 4, 3)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(EXAMPLE, tmp_path_factory.mktemp("package")))
        importlib.invalidate_caches()
        runner = make_runner("smollm2", max_kv_tokens=16_384, max_batch_size=NUM_ROWS, max_num_tokens=2048)
        yield runner
        runner.close()


@pytest.fixture(scope="module")
def requests(runner: ModelRunner, folders: list[Path]) -> list[pb.GenerateRequest]:
    tokenizer = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    adapters = {path.name: resolve(runner, path) for path in folders}
    return [draw(number, prompts, adapters) for number in range(NUM_REQUESTS)]


def start(runner: ModelRunner, **limits: Any) -> Whole:
    return Whole(runner, END_IDS, max_batch_size=NUM_ROWS, **limits)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner, requests: list[pb.GenerateRequest]) -> list[list[Contents]]:
    return [contents(start(runner).run([request])[0]) for request in requests]


def by_number(made: list[Request]) -> list[list[Contents]]:
    return [contents(request) for request in sorted(made, key=lambda request: int(request.request_id[1:]))]


@pytest.mark.parametrize("order", [1, 2])
def test_each_is_what_it_is_alone_in_whatever_order_they_arrive(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]], order: int
) -> None:
    """First all at once, then with a new one at each step."""
    rng, whole = random.Random(order), start(runner)
    waiting = rng.sample(requests, len(requests))
    made = [whole.submit(waiting.pop()) for _ in range(100 if order == 1 else 40)]
    most = 0
    while whole.step() or waiting:
        most = max(most, len(whole.core.groups[0].active))
        if waiting:
            made.append(whole.submit(waiting.pop()))
    assert by_number(made) == alone
    assert most > (75 if order == 1 else 30)


def test_pauses_and_the_loss_of_the_worker_change_nothing(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]]
) -> None:
    """A pool so small that requests take it from each other; and the worker dies three times."""
    whole = start(runner, num_blocks=60)
    made = [whole.submit(request) for request in requests]
    for steps in (3, 8, 12):
        for _ in range(steps):
            assert whole.step()
        whole.lose_worker()
    whole.run([])
    assert by_number(made) == alone
    assert whole.core.totals.num_preemptions > 5
    assert sum(request.num_recoveries for request in made) > 20


def test_the_loss_of_the_scheduler_changes_nothing(
    runner: ModelRunner, requests: list[pb.GenerateRequest], alone: list[list[Contents]], tmp_path: Path
) -> None:
    """It is started again on its journal, also while prompts are computed in parts."""
    whole = start(runner, journal=tmp_path / "journal.sqlite", max_num_tokens=300)
    for request in requests:
        whole.submit(request)
    for steps in (1, 1, 1, 2, 2, 2, 3, 3):
        for _ in range(steps):
            assert whole.step()
        whole.lose_scheduler()
    whole.run([])
    made = [whole.core.lifecycle.requests[request.request_id] for request in requests]
    assert by_number(made) == alone
    assert sum(request.num_recoveries for request in made) > 50


def test_the_mixture_has_all_features(requests: list[pb.GenerateRequest], alone: list[list[Contents]]) -> None:
    used = {field.name for request in requests for part in _parts(request) for field, _ in part.ListFields()}
    assert not {"beam_width", "speculative", "guided_decoding", "lora", "prompt_tuning", "bad_word_token_ids"} - used
    assert {len(sequences) for sequences in alone} == {1, 2, 3, 4}
    assert len({str(item) for item in alone}) > 90


def _parts(request: pb.GenerateRequest) -> list[Any]:
    return [request, request.sampling, request.stopping, request.output]
