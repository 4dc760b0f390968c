"""Adapters and embeddings through the whole service, as real processes with the embedded model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import numpy as np
import pytest

from midstream.client import AsyncClient
from midstream.errors import InvalidArgumentError, NotFoundError
from protos import generation_pb2 as pb
from tests.adapter_folders import HIDDEN, write_lora
from tests.integration.holding import NAME, Hold
from tests.integration.service import Service, collect, eventually, eventually_idle, midstream, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

PROMPT = list(range(2000, 2040))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_lora(root / name, rank, seed) for seed, (name, rank) in enumerate((("tone", 4), ("task", 12)))}


@pytest.fixture
async def client(service: Service, folders: dict[str, Path]) -> AsyncIterator[AsyncClient]:
    """Return a client of a service that has loaded both adapters."""
    async with AsyncClient(service.routers()) as client:
        for name, folder in folders.items():
            await client.load_lora(name, str(folder))
        yield client


def adapted(name: str, max_tokens: int = 12) -> pb.GenerateRequest:
    request = tokens(PROMPT, max_tokens=max_tokens)
    if name:
        request.lora.name = name
    return request


async def test_requests_run_together_with_an_adapter_each(client: AsyncClient, stub: Stub) -> None:
    names = ["", "tone", "task"] * 6
    answers = await asyncio.gather(*(collect(stub, adapted(name)) for name in names))
    outputs = {name: {tuple(a.token_ids) for a, n in zip(answers, names, strict=True) if n == name} for name in names}
    assert [len(found) for found in outputs.values()] == [1, 1, 1]
    assert len(set.union(*outputs.values())) == 3
    for name in outputs:
        assert {tuple((await collect(stub, adapted(name))).token_ids)} == outputs[name]
    assert [(info.name, info.rank) for info in await client.loras()] == [("task", 12), ("tone", 4)]
    await eventually_idle(stub)


async def test_an_adapter_can_come_with_its_request_and_be_unloaded(client: AsyncClient, stub: Stub) -> None:
    (info,) = [info for info in await client.loras() if info.name == "tone"]
    by_path = adapted("tone_by_path")
    by_path.lora.path = info.path
    expected = (await collect(stub, adapted("tone"))).token_ids
    assert (await collect(stub, by_path)).token_ids == expected
    await client.unload_lora("tone_by_path")
    assert "tone_by_path" not in {info.name for info in await client.loras()}
    with pytest.raises(NotFoundError, match="tone_by_path"):
        await client.unload_lora("tone_by_path")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect(stub, adapted("tone_by_path"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert ("midstream-field", "lora.name") in list(raised.value.trailing_metadata() or ())


async def test_a_folder_that_does_not_fit_is_refused(client: AsyncClient, folders: dict[str, Path]) -> None:
    broken = write_lora(folders["tone"].parent / "broken", rank=4, seed=9)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    with pytest.raises(InvalidArgumentError, match=r"q_proj.lora_A.weight is \[4, 576\], expected \[5, 576\]"):
        await client.load_lora("broken", str(broken))
    assert "broken" not in {info.name for info in await client.loras()}


async def test_embeddings_are_a_prompt_that_caches_share_only_among_equals(stub: Stub) -> None:
    values = np.random.default_rng(3).normal(size=(40, HIDDEN), scale=0.1).astype(np.float16)

    def request(sign: int) -> pb.GenerateRequest:
        made = tokens([], max_tokens=8)
        data = (sign * values).tobytes()
        made.prompt_embeddings.CopyFrom(pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT16, shape=values.shape, data=data))
        return made

    first = await collect(stub, request(1))
    # A repeated request may run on the worker that does not have the blocks. If it reuses them, it needs less
    # computation; its output is the same.
    again = await asyncio.gather(*(collect(stub, request(1)) for _ in range(4)))
    other = await collect(stub, request(-1))
    assert [answer.token_ids for answer in again] == [first.token_ids] * 4
    assert first.final.usage.prompt_tokens == 40
    assert {answer.final.usage.cached_tokens for answer in again} <= {0, 32}
    assert 32 in {answer.final.usage.cached_tokens for answer in again}
    assert other.final.usage.cached_tokens == 0
    assert other.token_ids != first.token_ids


async def test_a_stream_with_an_adapter_outlives_worker_and_scheduler(
    service: Service, client: AsyncClient, stub: Stub, hold: Hold
) -> None:
    expected = (await collect(stub, adapted("task", 48))).token_ids
    request = adapted("task", 48)
    request.logits_post_processor_name = NAME
    for kind in ("gpu_worker", "scheduler"):
        (scheduler,) = service.processes("scheduler")
        # The worker is paused in the middle of the sequence until the worker or the scheduler is killed.
        with hold:
            answer = asyncio.create_task(collect(stub, request))
            worker = await hold.held()
            os.kill(worker if kind == "gpu_worker" else scheduler["pid"], signal.SIGKILL)
        assert (await answer).token_ids == expected, kind

    async def loaded() -> list[str]:
        try:
            return [info.name for info in await client.loras()]
        except (grpc.aio.AioRpcError, NotFoundError):
            return []

    assert await eventually(loaded, bool, 120) == ["task", "tone"]

    async def num_workers() -> int:
        return len(await service.serving("gpu_worker"))

    await eventually(num_workers, lambda count: count == 2, 120)
    await eventually_idle(stub)


def test_the_command_lists_them(service: Service, client: AsyncClient) -> None:
    shown = midstream("lora", "list", "--run-dir", str(service.run_dir))
    assert shown.returncode == 0, shown.stderr
    assert "LoRA of rank 12" in shown.stdout
    again = midstream("lora", "unload", "nothing", "--run-dir", str(service.run_dir))
    assert again.returncode == 1
    assert "nothing" in again.stderr
