"""Logits post-processors from an installed package, and the effects of failing post-processors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step import NewSequence, SamplingParams
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampling import post_processors
from gpu_worker.sampling.post_processors import (
    BatchedLogitsPostProcessor,
    LogitsPostProcessor,
    PostProcessor,
    load_post_processors,
)
from gpu_worker.sampling.sampler import Sampled, Sampler
from midstream.errors import ConfigError, ExecutionError, InvalidArgumentError
from tests.example_package import install
from tests.gpu_worker.tiny_models import Driver, ints

VOCAB_SIZE = 50
EXAMPLE = Path(__file__).parent / "example_post_processor"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(EXAMPLE, tmp_path_factory.mktemp("package"))


@pytest.fixture
def processors(site: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, PostProcessor]:
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    return load_post_processors()


def sample(processors: dict[str, PostProcessor], *rows: tuple[str, str], **sampling: Any) -> Sampled:
    """Sample one token after 1, 2, 3 for each (processor, client id); without a processor, the model would choose 7."""
    state = Rows(len(rows), 64, 16, 8, VOCAB_SIZE)
    for row, (name, client_id) in enumerate(rows):
        params = SamplingParams(**{"temperature": 0.0} | sampling)
        new = NewSequence(
            row=row,
            token_ids=ints([1, 2, 3]),
            num_prompt_tokens=3,
            sampling=params,
            post_processor=name,
            client_id=client_id,
            request_id=f"request-{row}",
        )
        state.add(new)
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    logits[:, 7] = 5.0
    return Sampler(state, processors).sample(logits, ints(range(len(rows))))


def test_they_are_found_in_installed_packages(processors: dict[str, PostProcessor]) -> None:
    assert {"count_up", "count_up_together", "raises", "wrong_shape"} <= processors.keys()


def test_each_request_has_its_own(processors: dict[str, PostProcessor]) -> None:
    rows = [("count_up", "bob"), ("", ""), ("count_up_together", "carol"), ("count_up_together", "al")]
    sampled = sample(processors, *rows)
    assert sampled.token_ids.tolist() == [6, 7, 8, 5]
    assert sampled.errors == ()


def test_they_receive_the_request_id(processors: dict[str, PostProcessor]) -> None:
    class Notes(LogitsPostProcessor):
        def process(self, logits: Tensor, tokens: NDArray[np.int32], client_id: str, request_id: str) -> Tensor:
            seen.append((client_id, request_id, tokens.tolist()))
            return logits

    class NotesTogether(BatchedLogitsPostProcessor):
        def process(
            self,
            logits: Tensor,
            tokens: Sequence[NDArray[np.int32]],
            client_ids: Sequence[str],
            request_ids: Sequence[str],
        ) -> Tensor:
            together.append((client_ids, request_ids))
            return logits

    seen: list[object] = []
    together: list[object] = []
    rows = [("notes", "al"), ("together", "bo"), ("notes", ""), ("together", "cy")]
    sample({"notes": Notes(), "together": NotesTogether()}, *rows)
    assert seen == [("al", "request-0", [1, 2, 3]), ("", "request-2", [1, 2, 3])]
    assert together == [(["bo", "cy"], ["request-1", "request-3"])]


def test_additional_names_can_be_configured(processors: dict[str, PostProcessor]) -> None:
    found = load_post_processors("mine=polite_logits:CountUp,batched=polite_logits:CountUpTogether")
    assert {"count_up", "mine", "batched"} <= found.keys()
    assert sample(found, ("mine", "bob"), ("batched", "al")).token_ids.tolist() == [6, 5]
    for bad in ("mine", "=a:B", "mine=nowhere", "mine=polite_logits:Nothing", "mine=json:JSONDecoder"):
        with pytest.raises(ConfigError):
            load_post_processors(bad)


def test_steering_is_applied_after_the_post_processor(processors: dict[str, PostProcessor]) -> None:
    assert sample(processors, ("count_up", "bob"), bad_words=((6,),)).token_ids.tolist() == [7]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("raises", ""), "RuntimeError: no idea"),
        (("wrong_shape", ""), r"float32 \[49\]"),
        (("count_up_together", "mallory"), "not for mallory"),
    ],
)
def test_one_that_fails_fails_only_its_own_request(
    processors: dict[str, PostProcessor], bad: tuple[str, str], message: str
) -> None:
    sampled = sample(processors, ("count_up_together", "carol"), bad, ("count_up", "al"), ("", ""))
    ((place, error),) = sampled.errors
    assert place == 1
    assert isinstance(error, ExecutionError)
    assert error.field == "logits_post_processor_name"
    with pytest.raises(ExecutionError, match=message):
        raise error
    assert [token for i, token in enumerate(sampled.token_ids.tolist()) if i != 1] == [8, 5, 7]


def test_an_entry_point_that_is_not_a_post_processor_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class EntryPoint:
        name = "mine"

        def load(self) -> type[int]:
            return int

    monkeypatch.setattr(post_processors, "entry_points", lambda group: [EntryPoint()])
    with pytest.raises(ConfigError, match="'mine'"):
        load_post_processors()


def test_an_unknown_one_fails_its_own_request(tiny_runner: ModelRunner) -> None:
    driver = Driver(tiny_runner)
    good, tokens = driver.sequence(0, [5, 6]), ints([5, 6])
    driver.tokens[1], driver.num_prompt[1] = [5, 6], 2
    bad = NewSequence(row=1, token_ids=tokens, num_prompt_tokens=2, block_ids=ints([9]), post_processor="none")
    output = driver.step([good, bad], [(0, 0, 2), (1, 0, 2)])
    ((row, error),) = output.errors
    assert (row, type(error)) == (1, InvalidArgumentError)
