"""A worker with two ranks behind the whole service, with the embedded model; one rank is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import Driver, make_runner
from tests.integration.service import Service, collect, eventually, stub_of, tokens

NUM_TOKENS = 12
RANKS = ("worker-0", "worker-0-rank-1")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    path = open_model_folder("smollm2").path / "tokenizer.json"
    return list(Tokenizer.from_file(str(path)).encode("The three longest rivers of the world are").ids)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = {"MIDSTREAM_MAX_KV_TOKENS": "2048", "MIDSTREAM_MAX_SEQUENCE_LENGTH": "512"}
    service = Service.start(tmp_path_factory.mktemp("parallel"), "--tensor-parallel", "2", **settings)
    yield service
    service.stop()
    for rank, reason in zip(RANKS, ("drained", "rank 0 stopped the group"), strict=True):
        assert f"stopped: {reason}" in (service.run_dir / "logs" / f"{rank}.log").read_text()


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> list[int]:
    """Return the output of a single rank."""
    runner = make_runner("smollm2", kernels="torch", max_kv_tokens=512, max_sequence_length=512)
    return Driver(runner).run_alone(prompt, NUM_TOKENS)


async def test_two_ranks_give_one_ranks_text(parallel: Service, prompt: list[int], expected: list[int]) -> None:
    assert tuple(rank["name"] for rank in await parallel.serving("gpu_worker")) == RANKS
    async with stub_of(parallel.routers()[0]) as stub:
        answer = await collect(stub, tokens(prompt, max_tokens=NUM_TOKENS))
    assert answer.token_ids == expected
    tokenizer = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
    assert answer.text == tokenizer.decode(expected)


async def test_a_killed_rank_ends_the_group_and_no_stream(
    parallel: Service, prompt: list[int], expected: list[int]
) -> None:
    second = (await parallel.serving("gpu_worker"))[1]["pid"]
    received: list[int] = []
    async with stub_of(parallel.routers()[0]) as stub:
        async for response in stub.Generate(tokens(prompt, max_tokens=NUM_TOKENS), timeout=150):
            if len(received) < 3 <= len(received) + len(response.token_ids):
                os.kill(second, signal.SIGKILL)
            assert response.token_offset == len(received)
            received += response.token_ids
    assert received == expected
    ranks = await eventually(
        lambda: parallel.serving("gpu_worker"),
        lambda ranks: len(ranks) == len(RANKS) and all(rank["num_restarts"] for rank in ranks),
        100,
    )
    assert tuple(rank["name"] for rank in ranks if rank["num_restarts"]) == RANKS
    log = await asyncio.to_thread(Path(ranks[0]["log"]).read_text)
    # The loss may be detected in the middle of a step, or when the connection closes.
    assert re.search("the group failed: (rank 1 disconnected|a step failed while all ranks worked on it)", log)
