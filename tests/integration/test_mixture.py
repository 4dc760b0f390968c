"""Requests with random features through the whole service, while a worker is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midstream.client import AsyncClient, Result
from midstream.errors import NotFoundError
from midstream.model.folder import open_model_folder
from midstream.model.tokenizer import Tokenizer
from protos import generation_pb2 as pb
from tests.adapter_folders import write_lora, write_prompt
from tests.gpu_worker.mixture import PROMPTS, draw
from tests.integration.holding import NAME, NUM_TOKENS, Hold
from tests.integration.service import Service, eventually, eventually_idle, tokens

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.routers()) as client:
        yield client


def drawn(number: int, adapters: dict[str, Path], tokenizer: Tokenizer) -> pb.GenerateRequest:
    """Return a request with random features, and a stop word."""
    resolved = {name: pb.ResolvedAdapter(num_virtual_tokens=int(name == "soft")) for name in adapters}
    request = draw(number, [tokenizer.encode(text) for text in PROMPTS], resolved)
    for config in (request.lora, request.prompt_tuning):
        if config.name:
            config.ClearField("resolved")
            config.path = str(adapters[config.name])
    if number % 3 == 0:
        request.stopping.stop_words.extend(["\n", "and", "3"])
        request.stopping.bad_words.append("fox")
    request.request_id = ""
    return request


def contents(result: Result) -> list[dict[str, object]]:
    """Return everything that a client receives for each sequence, by name."""
    return [
        {
            "token_ids": item.token_ids,
            "text": item.text,
            "finish_reason": item.finish_reason,
            "cumulative_log_prob": item.cumulative_log_prob,
            "tensors": item.tensors,
            "log_probs": item.extras and item.extras.log_probs,
            "prompt_log_probs": item.extras and item.extras.prompt_log_probs,
        }
        for item in result.sequences
    ]


def assert_equal(index: int, found: list[dict[str, object]], expected: list[dict[str, object]]) -> None:
    """Compare all fields, and report only those that differ, since whole results would fill pages."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        different = [name for name in other if one[name] != other[name]]
        assert not different, (index, number, different, one["token_ids"], other["token_ids"])


async def test_any_mixture_gives_the_bits_of_each_request_alone_despite_kills(
    client: AsyncClient, stub: Stub, hold: Hold, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(open_model_folder("smollm2").path)
    adapters = {"m-lora": write_lora(tmp_path / "lora", 6, 4), "soft": write_prompt(tmp_path / "soft", 4, 5)}
    requests = [drawn(number, adapters, tokenizer) for number in range(30)]
    held = tokens([500], max_tokens=2 * NUM_TOKENS, logits_post_processor_name=NAME)

    async def run(index: int) -> list[dict[str, object]]:
        request = pb.GenerateRequest()
        request.CopyFrom(requests[index])
        return contents(await client.stream(request).result())

    try:
        order = list(range(30))
        first = await asyncio.gather(*map(run, order))
        random.Random(5).shuffle(order)
        before = {group.group_id for group in (await client.server_info()).worker_groups}
        # One more request keeps a worker in the middle of all its sequences until it is killed.
        with hold:
            holding = asyncio.create_task(client.stream(held).result())
            again = [asyncio.create_task(run(index)) for index in order]
            victim = await hold.held()
            done, _ = await asyncio.wait(again, return_when=asyncio.FIRST_COMPLETED)
            os.kill(victim, signal.SIGKILL)
            assert len(done) < 30
        assert len((await holding).token_ids) == 2 * NUM_TOKENS
        second = dict(zip(order, await asyncio.gather(*again), strict=True))
        for index in range(30):
            assert_equal(index, second[index], first[index])
        for index in range(0, 30, 5):
            assert_equal(index, await run(index), first[index])
    finally:
        for name in adapters:
            with contextlib.suppress(NotFoundError):
                await client.unload_lora(name)

    async def groups() -> set[str]:
        return {group.group_id for group in (await client.server_info()).worker_groups}

    assert len(await eventually(groups, lambda found: len(found) == len(before), 120)) == len(before)
    await eventually_idle(stub)
