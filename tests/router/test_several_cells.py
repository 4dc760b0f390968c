"""Requests with ids that clients chose, with several cells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from midstream.client import FinishReason
from midstream.errors import AlreadyExistsError, NotFoundError, UnavailableError
from protos import generation_pb2 as pb
from protos.loads_pb2 import LoraInfo
from router.pipeline.cells import Cell, Cells
from tests.detokenizer.scripted_scheduler import ScriptedScheduler, scripted_scheduler
from tests.router.client_streams import OpenClient
from tests.router.conftest import Cluster


@pytest.fixture
async def cells(cluster: Cluster) -> AsyncIterator[list[ScriptedScheduler]]:
    """Return two cells, both of which are used by the routers and detokenizers of the cluster."""
    other = scripted_scheduler()
    cluster.scheduler_address += f",{await other.start()}"
    yield [cluster.scheduler, other]
    await other.stop()


async def test_an_id_that_is_used_again_reaches_the_cell_that_has_it(
    cluster: Cluster, cells: list[ScriptedScheduler], open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any router, even one that would choose another cell."""
    addresses = cluster.scheduler_address.split(",")

    def choose(self: Cells, token_ids: Sequence[int], cache_salt: str) -> Cell:
        return self.cells[addresses[token_ids[0] % 2]]

    monkeypatch.setattr(Cells, "choose", choose)
    detokenizer = await cluster.add_detokenizer()
    first, second = [await cluster.add_router(detokenizer) for _ in range(2)]
    for number, scheduler in enumerate(cells):
        running = asyncio.create_task(open_client(first).generate(token_ids=[number], request_id=f"r{number}").result())
        await scheduler.until(lambda number=number, scheduler=scheduler: f"r{number}" in scheduler.requests)
        again = asyncio.create_task(
            open_client(second).generate(token_ids=[1 - number], request_id=f"r{number}").result()
        )
        await scheduler.until(lambda scheduler=scheduler: len(scheduler.submits) == 2)
        scheduler.emit(f"r{number}", [20, 21])
        scheduler.end(f"r{number}")
        assert [(await task).token_ids for task in (running, again)] == [[20, 21]] * 2
        scheduler.submit_errors = [AlreadyExistsError("other contents")]
        with pytest.raises(AlreadyExistsError):
            await open_client(second).generate(token_ids=[1 - number], request_id=f"r{number}").result()
        scheduler.submits.clear()


@pytest.mark.parametrize("number", [0, 1])
async def test_a_copy_that_was_aborted_in_another_cell_is_not_read(
    number: int, cluster: Cluster, cells: list[ScriptedScheduler], open_client: OpenClient
) -> None:
    """Such a copy exists if the cell with the first copy was unreachable when the client repeated its call, and later
    returned.
    """
    for index, scheduler in enumerate(cells):
        scheduler.add("r", token_ids=pb.TokenIds(values=[10]))
        scheduler.emit("r", [20, 21] if index == number else [20])
        scheduler.end("r", pb.FINISH_REASON_LENGTH if index == number else pb.FINISH_REASON_ABORT)
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    for stream in (client.resume("r"), client.generate(token_ids=[10], request_id="r")):
        result = await stream.result()
        assert (result.token_ids, result.finish_reason) == ([20, 21], FinishReason.LENGTH)
    assert [len(scheduler.submits) for scheduler in cells] == [1 - number, number]


async def test_an_abort_fails_if_only_an_unreachable_cell_may_have_the_request(
    cluster: Cluster, cells: list[ScriptedScheduler], open_client: OpenClient
) -> None:
    cells[0].add("here")
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    assert not await client.abort("nowhere")
    await cells[1].stop()
    assert await client.abort("here")
    with pytest.raises(UnavailableError):
        await client.abort("elsewhere")


async def test_information_comes_from_the_cells_that_respond(
    cluster: Cluster, cells: list[ScriptedScheduler], open_client: OpenClient
) -> None:
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    assert len(await client.loads()) == 2
    await cells[1].stop()
    assert [load.cell for load in await client.loads()] == [cluster.scheduler_address.split(",")[0]]
    assert (await client.server_info()).scheduler_epoch == 7
    await cells[0].stop()
    with pytest.raises(UnavailableError):
        await client.loads()


async def test_an_adapter_is_unloaded_where_an_earlier_call_failed(
    cluster: Cluster, cells: list[ScriptedScheduler], open_client: OpenClient
) -> None:
    client = open_client(await cluster.add_router(await cluster.add_detokenizer()))
    cells[0].loras.append(LoraInfo(name="a"))
    await client.unload_lora("a")
    assert [scheduler.loras for scheduler in cells] == [[], []]
    with pytest.raises(NotFoundError):
        await client.unload_lora("a")
    await cells[1].stop()
    with pytest.raises(UnavailableError):
        await client.unload_lora("a")
