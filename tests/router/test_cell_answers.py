"""Calls that are answered by all cells together."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from midstream.rpc.channel import open_channel
from midstream.rpc.frame_link import LinkSettings
from protos import loads_pb2, service_pb2_grpc
from router.pipeline.cells import Cell
from tests.router.conftest import Cluster


async def test_loads_and_information_are_those_of_the_cells_that_respond(cluster: Cluster) -> None:
    """A gateway must not consider the router down because one of its cells is."""
    router = await cluster.add_router(await cluster.add_detokenizer())
    cells = cluster.runners[0].cells.cells
    async with open_channel(router.address) as channel:
        stub: Any = service_pb2_grpc.MidstreamStub(channel)

        async def answers() -> tuple[int, int]:
            loads = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=240)
            info = await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=240)
            return len(loads.cells), info.scheduler_epoch

        assert await answers() == (1, 7)
        (live,) = cells.items()
        cells["127.0.0.1:1"] = dead = Cell("127.0.0.1:1", "127.0.0.1:1", LinkSettings(1 << 20))
        assert await answers() == (1, 7)
        for others in ({dead.name: dead}, {}):
            cells.clear()
            cells.update(others)
            for call, request in (
                (stub.GetLoads, loads_pb2.GetLoadsRequest()),
                (stub.GetServerInfo, loads_pb2.GetServerInfoRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(request, timeout=240)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        cells.update([live])
        await dead.close()
