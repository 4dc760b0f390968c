"""A worker with two pipeline stages in the whole service, with the embedded model; one rank is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from midstream.model.folder import open_model_folder
from tests.gpu_worker.tiny_models import Driver, make_runner
from tests.integration.service import Service, collect, eventually, stub_of, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 12
RANKS = ("worker-0", "worker-0-rank-1")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    path = open_model_folder("smollm2").path / "tokenizer.json"
    return list(Tokenizer.from_file(str(path)).encode("The three longest rivers of the world are").ids)


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    settings = {"MIDSTREAM_MAX_KV_TOKENS": "2048", "MIDSTREAM_MAX_SEQUENCE_LENGTH": "512"}
    service = Service.start(tmp_path_factory.mktemp("parallel"), "--pipeline-parallel", "2", **settings)
    yield service
    service.stop()
    for rank, reason in zip(RANKS, ("drained", "rank 0 stopped the group"), strict=True):
        assert f"stopped: {reason}" in (service.run_dir / "logs" / f"{rank}.log").read_text()


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> list[list[int]]:
    """Return the outputs of a single rank for parts of the prompt and, as the last item, for the whole prompt."""
    driver = Driver(make_runner("smollm2", max_kv_tokens=512, max_sequence_length=512))
    return [driver.run_alone(prompt[: len(prompt) - left], NUM_TOKENS) for left in (3, 2, 1, 0)]


async def test_two_ranks_give_one_ranks_text(parallel: Service, prompt: list[int], expected: list[list[int]]) -> None:
    assert tuple(rank["name"] for rank in await parallel.all_serving("gpu_worker")) == RANKS
    async with stub_of(parallel.routers()[0]) as stub:
        answer = await collect(stub, tokens(prompt, max_tokens=NUM_TOKENS))
    assert answer.token_ids == expected[-1]
    tokenizer = Tokenizer.from_file(str(open_model_folder("smollm2").path / "tokenizer.json"))
    assert answer.text == tokenizer.decode(expected[-1])


async def test_a_killed_rank_ends_the_group_but_no_stream(
    parallel: Service, prompt: list[int], expected: list[list[int]]
) -> None:
    """The second stage is killed while it computes steps of several streams."""
    second = (await parallel.all_serving("gpu_worker"))[1]["pid"]
    is_killed = False

    async def receive(stub: Stub, prompt: list[int]) -> list[int]:
        nonlocal is_killed
        received: list[int] = []
        async for response in stub.Generate(tokens(prompt, max_tokens=NUM_TOKENS), timeout=400):
            assert response.token_offset == len(received)
            received += response.token_ids
            if len(received) >= 3 and not is_killed:
                is_killed = True
                os.kill(second, signal.SIGKILL)
        return received

    async with stub_of(parallel.routers()[0]) as stub:
        found = await asyncio.gather(*(receive(stub, prompt[: len(prompt) - left]) for left in (3, 2, 1, 0)))
    assert found == expected
    ranks = await eventually(
        lambda: parallel.serving("gpu_worker"),
        lambda ranks: len(ranks) == len(RANKS) and all(rank["num_restarts"] for rank in ranks),
        100,
    )
    assert tuple(rank["name"] for rank in ranks if rank["num_restarts"]) == RANKS
    log = await asyncio.to_thread(Path(ranks[0]["log"]).read_text)
    # The loss may be detected in the middle of a step, or when the connection closes.
    assert re.search("the group failed: (rank 1 disconnected|a step failed while all ranks worked on it)", log)
