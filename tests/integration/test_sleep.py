"""Workers that sleep under load, and wake up, with real processes that are killed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from midstream.client import AsyncClient
from midstream.errors import ConflictError
from protos import weights_pb2
from tests.faults.small_model import make_small_model
from tests.integration.service import eventually
from tests.integration.test_kinds import Cell, Stream, request_of, run

NUM_REQUESTS = 4
WORKERS = ("worker-0", "worker-1")


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    (tmp_path / "model").mkdir()
    make_small_model(tmp_path / "model")
    cell = Cell(tmp_path, tmp_path / "model")
    try:
        yield cell
    finally:
        cell.close()


async def start(cell: Cell, *flags: str) -> None:
    cell.start("scheduler", *flags)
    cell.start("detokenizer")
    cell.start("router")
    for worker in WORKERS:
        cell.start(worker)
    await cell.wait_for_workers(*WORKERS)


def client_of(cell: Cell) -> AsyncClient:
    return AsyncClient([f"127.0.0.1:{cell.ports['router']}"])


async def state(client: AsyncClient) -> weights_pb2.CellWeights:
    (cell,) = await client.weights()
    return cell


async def sleeping(client: AsyncClient, num_groups: int) -> weights_pb2.CellWeights:
    """Wait until this number of workers sleeps, and all are registered."""

    async def ask() -> weights_pb2.CellWeights | None:
        try:
            return await state(client)
        except Exception:  # noqa: BLE001 (the scheduler is starting)
            return None

    found = await eventually(
        ask,
        lambda item: item is not None and (item.num_sleeping_groups, item.num_groups) == (num_groups, len(WORKERS)),
        120,
    )
    assert found is not None
    assert (found.num_sleeping_groups, found.num_groups) == (num_groups, len(WORKERS)), found
    return found


async def test_streams_continue_after_a_sleep_in_which_every_part_is_killed(cell: Cell) -> None:
    await start(cell)
    async with cell.stub() as stub, client_of(cell) as client:
        requests = [request_of(number) for number in range(NUM_REQUESTS)]
        named = [request_of(number) for number in range(NUM_REQUESTS)]
        for request in named:
            request.request_id += " undisturbed"
        expected = [stream.tokens for stream in await run(stub, named)]
        streams = [Stream() for _ in requests]
        reading = [
            asyncio.create_task(stream.read(stub, request))
            for stream, request in zip(streams[:-1], requests[:-1], strict=True)
        ]

        async def least() -> int:
            return min(len(stream.tokens) for stream in streams[:-1])

        await eventually(least, lambda num_tokens: num_tokens > 20, 120)
        await client.sleep(2)
        found = await sleeping(client, 2)
        assert (found.is_sleeping, found.sleep_level) == (True, 2)
        num_tokens = [len(stream.tokens) for stream in streams]
        # A request that comes now waits.
        reading.append(asyncio.create_task(streams[-1].read(stub, requests[-1])))
        with pytest.raises(ConflictError, match="sleep"):
            await client.update_weights(str(cell.model))
        cell.end("worker-0")
        cell.start("worker-0")
        await sleeping(client, 2)
        cell.end("scheduler")
        cell.start("scheduler")
        found = await sleeping(client, 2)
        assert (found.is_sleeping, found.sleep_level) == (True, 2)
        assert all(not task.done() for task in reading)
        assert [len(stream.tokens) for stream in streams] == num_tokens
        await client.wake_up("weights")
        found = await sleeping(client, 0)
        assert (found.is_sleeping, found.sleep_level) == (True, 0)
        assert [len(stream.tokens) for stream in streams] == num_tokens
        await client.wake_up("kv_cache")
        await asyncio.gather(*reading)
        assert [stream.tokens for stream in streams] == expected
        assert not (await state(client)).is_sleeping


async def test_idle_workers_are_unloaded_and_the_next_request_wakes_them(cell: Cell) -> None:
    await start(cell, "--unload-after", "0.5")
    async with cell.stub() as stub, client_of(cell) as client:
        await sleeping(client, 2)
        (first,) = await run(stub, [request_of(0)])
        found = await sleeping(client, 2)
        assert not found.is_sleeping  # no administrator wants it
        cell.end("scheduler")
        cell.start("scheduler", "--unload-after", "0.5")
        await sleeping(client, 2)
        request = request_of(0)
        request.request_id = "again"
        (second,) = await run(stub, [request])
        assert first.tokens == second.tokens
        cell.end("worker-1")
        cell.start("worker-1")
        await sleeping(client, 2)


async def test_a_wrong_level_or_tag_is_named(cell: Cell) -> None:
    await start(cell)
    async with cell.stub() as stub:
        for call, request, field in (
            (stub.Sleep, weights_pb2.SleepRequest(level=3), "level"),
            (stub.Sleep, weights_pb2.SleepRequest(level=0), "level"),
            (stub.WakeUp, weights_pb2.WakeUpRequest(tags=["kv"]), "tags"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call(request)  # type: ignore[arg-type]
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (failure.value.details() or "")
