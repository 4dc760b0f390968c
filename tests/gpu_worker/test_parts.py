"""The sequences of a request that runs in parts are those that it has when all of them run together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.model_runner import ModelRunner
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, contents

NUM_SEQUENCES = 7


def request_of(name: str, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(values=[7 + i % 30 for i in range(21)]),
        max_tokens=6,
        sampling=pb.SamplingConfig(**{"num_return_sequences": NUM_SEQUENCES, "seed": 5, "temperature": 1.0} | sampling),
        output=pb.OutputConfig(log_probs=2, prompt_log_probs=1),
    )


@pytest.mark.parametrize("capacity", ["guaranteed_no_evict", "max_utilization", "static_batch"])
def test_parts_give_what_one_batch_gives(tiny_runner: ModelRunner, capacity: str) -> None:
    (together,) = CoreWithRunners(tiny_runner, (2,)).run([request_of("n")])
    (in_parts,) = CoreWithRunners(tiny_runner, (2,), capacity=capacity, max_batch_size=2).run([request_of("n")])
    found = contents(in_parts)
    assert found == contents(together)
    assert len({tuple(item.tokens) for item in found}) > 1
    assert [bool(item.prompt_log_probs) for item in found] == [True] + [False] * (NUM_SEQUENCES - 1)


@pytest.mark.parametrize("part", ["worker", "scheduler"])
@pytest.mark.parametrize("num_steps", [1, 5, 12, 20])
def test_parts_are_the_same_despite_losses(tiny_runner: ModelRunner, tmp_path: Path, part: str, num_steps: int) -> None:
    (together,) = CoreWithRunners(tiny_runner, (2,)).run([request_of("n")])
    system = CoreWithRunners(tiny_runner, (2,), max_batch_size=2, journal=tmp_path / "journal")
    system.submit(request_of("n"))
    for _ in range(num_steps):
        assert system.step()
    getattr(system, f"lose_{part}")()
    system.run([])
    assert contents(system.core.lifecycle.requests["n"]) == contents(together)
