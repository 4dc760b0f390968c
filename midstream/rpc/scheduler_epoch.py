"""Asks a scheduler whether it is the active one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import grpc.aio

from midstream.rpc.frame_link import LinkSettings
from protos import loads_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub

_TIMEOUT_S = 1.0


async def scheduler_epoch(settings: LinkSettings, address: str, server_name: str) -> int:
    """Return the epoch of the scheduler at an address; 0 if it is a standby or does not respond."""
    async with settings.open_channel(address, server_name) as channel:
        stub = cast("SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
        try:
            loads = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return 0
    return max((load.scheduler_epoch for load in loads.cells), default=0)
