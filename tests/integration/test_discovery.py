"""Real routers and detokenizers pick up changes to the addresses of a host name without a restart."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc.aio
import pytest

from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import loads_pb2, scheduler_pb2_grpc, service_pb2_grpc
from tests.fakes.resolver import publish
from tests.integration.named_processes import NamedProcesses
from tests.integration.parts import START_TIMEOUT_S
from tests.integration.service import collect, eventually, tokens
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

# Each address represents a host. As in pods, a component has the same port on all hosts.
FIRST, SECOND = "127.0.0.1", "127.0.0.2"
LIMIT_S = 240.0


class Cluster(NamedProcesses):
    """A router, and two hosts, each with a scheduler, a worker and a detokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = folder / "hosts"
        self.hold = folder / "hold"  # file; while it exists, the workers pause after some more steps
        self._scheduler, self._worker, self._detokenizer, self.router, self.router_http = free_ports(5)
        self._model = open_model_folder("smollm2")

    def start_scheduler(self, host: str) -> None:
        journal = self.folder / f"{host}-journal"
        ports = ("--port", str(self._scheduler), "--worker-port", str(self._worker))
        self.launch(f"scheduler-{host}", "scheduler", "--host", host, *ports, "--journal-path", str(journal))
        limits = ("--model-fingerprint", self._model.fingerprint, "--vocab-size", str(self._model.vocab_size))
        address = f"tcp://{host}:{self._worker}"
        flags = ("--scheduler", address, "--step-ms", "10", "--hold", str(self.hold), *limits)
        self.launch(f"worker-{host}", "tests.fakes.worker", *flags)

    def scheduler_address(self, host: str) -> str:
        return f"{host}:{self._scheduler}"

    def start_resolved(self, name: str, *command: str) -> None:
        schedulers = f"dns:///scheduler:{self._scheduler}"
        self.launch(name, "tests.fakes.resolver", str(self.hosts), *command, "--schedulers", schedulers)

    def start_detokenizer(self, host: str) -> None:
        self.start_resolved(f"detokenizer-{host}", "detokenizer", "--host", host, "--port", str(self._detokenizer))

    def start_router(self) -> None:
        ports = ("--port", str(self.router), "--http-port", str(self.router_http))
        self.start_resolved("router", "router", *ports, "--detokenizers", f"dns:///detokenizer:{self._detokenizer}")

    def num_live_detokenizers(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.router_http}/metrics", timeout=240) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = (line.split()[1] for line in lines if line.startswith("midstream:num_live_detokenizers "))
        return int(float(value))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    publish(cluster.hosts, scheduler=[FIRST], detokenizer=[FIRST])
    try:
        for host in (FIRST, SECOND):
            cluster.start_scheduler(host)
            cluster.start_detokenizer(host)
        cluster.start_router()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[Stub]:
    """Return a stub of the router once both detokenizers are connected to the first scheduler and both schedulers have
    workers.
    """
    async with open_channel(f"127.0.0.1:{cluster.router}") as channel:
        stub = cast("Stub", service_pb2_grpc.MidstreamStub(channel))
        info = await eventually(lambda: server_info(stub), lambda info: len(info.detokenizers) == 2, START_TIMEOUT_S)
        assert len(info.detokenizers) == 2
        yield stub


async def server_info(stub: Stub) -> loads_pb2.ServerInfo:
    try:
        return await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=5)
    except grpc.aio.AioRpcError:
        return loads_pb2.ServerInfo()


async def cells(stub: Stub) -> set[str]:
    """Return the hosts of the schedulers that have workers, as the router sees them."""
    try:
        answer = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=5)
    except grpc.aio.AioRpcError:
        return set()
    return {load.cell.rpartition(":")[0] for load in answer.cells if load.num_blocks}


async def lag_until(holds: Callable[[], Awaitable[bool]]) -> float:
    """Return the seconds until the condition holds; fail at the time limit."""
    started = time.monotonic()
    assert await eventually(holds, bool, LIMIT_S)
    return time.monotonic() - started


async def test_a_router_discovers_added_and_removed_detokenizers(cluster: Cluster, stub: Stub) -> None:
    async def has_live(number: int) -> bool:
        return await asyncio.to_thread(cluster.num_live_detokenizers) == number

    await lag_until(lambda: has_live(1))
    publish(cluster.hosts, scheduler=[FIRST], detokenizer=[FIRST, SECOND])
    came_s = await lag_until(lambda: has_live(2))
    # Streams on the removed host continue on the other host.
    request = tokens([5, 6, 7], max_tokens=300)
    cluster.hold.touch()  # no stream ends before its host is removed
    reading = [asyncio.create_task(collect(stub, request)) for _ in range(4)]
    assert await eventually(lambda: num_running(stub), lambda number: number == 4, START_TIMEOUT_S) == 4
    publish(cluster.hosts, scheduler=[FIRST], detokenizer=[SECOND])
    left_s = await lag_until(lambda: has_live(1))
    cluster.hold.unlink()
    answers = await asyncio.gather(*reading)
    assert [len(answer.token_ids) for answer in answers] == [300] * 4
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    print(f"a detokenizer was added after {came_s:.1f} s and removed after {left_s:.1f} s")


async def test_routers_and_detokenizers_discover_added_and_removed_schedulers(cluster: Cluster, stub: Stub) -> None:
    async def has(hosts: set[str]) -> bool:
        return await cells(stub) == hosts

    # The worker of the second scheduler must be registered before time is measured, since a router queries a scheduler
    # as soon as it finds it.
    await eventually(lambda: worker_of(cluster, SECOND), bool, START_TIMEOUT_S)
    publish(cluster.hosts, scheduler=[FIRST, SECOND], detokenizer=[SECOND])
    came_s = await lag_until(lambda: has({FIRST, SECOND}))
    publish(cluster.hosts, scheduler=[SECOND], detokenizer=[SECOND])
    left_s = await lag_until(lambda: has({SECOND}))
    expected = await collect(stub, tokens([8, 9], max_tokens=20))
    # A request that was sent to a dead scheduler goes to its successor at another address.
    cluster.end(f"scheduler-{SECOND}")
    waiting = asyncio.create_task(collect(stub, tokens([8, 9], max_tokens=20)))
    await asyncio.sleep(0.2)  # the request is being retried, or will be; either way it must arrive
    publish(cluster.hosts, scheduler=[FIRST], detokenizer=[SECOND])
    assert (await waiting).token_ids == expected.token_ids
    print(f"a scheduler was added after {came_s:.1f} s and removed after {left_s:.1f} s")


async def num_running(stub: Stub) -> int:
    answer = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=240)
    return sum(load.num_running_requests for load in answer.cells)


async def worker_of(cluster: Cluster, host: str) -> bool:
    async with open_channel(cluster.scheduler_address(host)) as channel:
        scheduler = cast("SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
        try:
            answer = await scheduler.GetLoads(loads_pb2.GetLoadsRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return answer.cells[0].num_blocks > 0
