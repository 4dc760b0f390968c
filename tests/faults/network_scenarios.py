"""Scenarios with three hosts and a cut link between two of them: python -m tests.faults.network_scenarios NAME ...

This is a separate program, since it may have to run in a network namespace; test_network.py starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import psycopg

from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import loads_pb2, scheduler_pb2, scheduler_pb2_grpc, service_pb2_grpc
from tests.faults.hosts import Hosts, Namespaces, Relays
from tests.integration.named_processes import ROOT
from tests.integration.service import tokens
from tests.ports import free_ports
from tests.scheduler.test_service import Feed

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_STREAMS, NUM_TOKENS = 8, 300
STEP_MS = 20
LIMIT_S = 60
QUICK = ("--worker-timeout-ms", "1000", "--heartbeat-interval-ms", "100")


class Machine:
    """Processes on named hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: str, name: str, module: str, *flags: object) -> subprocess.Popen[bytes]:
        words = self.hosts.command(host, sys.executable, "-m", module, *map(str, flags))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    async def start_worker(self, host: str, scheduler_host: str, port: int) -> None:
        model = open_model_folder("smollm2")
        address = await self.hosts.dial(host, scheduler_host, port)
        flags = ("--model-fingerprint", model.fingerprint, "--vocab-size", model.vocab_size, "--step-ms", STEP_MS)
        self.start(
            host, f"worker-{host}", "tests.fakes.worker", "--scheduler", f"tcp://{address}", *flags, "--group-id", host
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def cut_worker(machine: Machine) -> None:
    """Cut the link between the scheduler and one of two workers while streams run; restore it afterwards."""
    hosts, listen = machine.hosts, ("--host", machine.hosts.listen_address)
    port, worker_port, http_port, detokenizer_port, router_port, router_http = free_ports(6)
    schedulers = ("--schedulers", f"127.0.0.1:{port}")
    ports = ("--port", port, "--worker-port", worker_port, "--http-port", http_port)
    machine.start("core", "scheduler", "scheduler", *listen, *ports, *QUICK, "--journal", "off")
    machine.start("core", "detokenizer", "detokenizer", "--port", detokenizer_port, *schedulers)
    links = (*schedulers, "--detokenizers", f"127.0.0.1:{detokenizer_port}")
    machine.start("core", "router", "router", *listen, "--port", router_port, "--http-port", router_http, *links)
    for host in ("a", "b"):
        await machine.start_worker(host, "core", worker_port)
    metrics = f"http://{await hosts.dial('', 'core', http_port)}/metrics"
    async with open_channel(await hosts.dial("", "core", router_port)) as channel:
        stub = cast("Stub", service_pb2_grpc.MidstreamStub(channel))
        await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), wait_for_ready=True, timeout=LIMIT_S)
        await until(metrics, "num_worker_groups", lambda value: value == 2)
        flowing = asyncio.Event()
        streams = [asyncio.create_task(read(stub, 1000 * i, flowing)) for i in range(1, NUM_STREAMS + 1)]
        await flowing.wait()
        hosts.cut("core", "a")
        for i, stream in enumerate(streams, 1):
            assert await stream == list(range(1000 * i + 1, 1000 * i + 1 + NUM_TOKENS))
        await until(metrics, "num_worker_groups", lambda value: value == 1)
        assert await metric(metrics, "num_recoveries_total") > 0, "no stream ran on the worker that was cut off"
        stale = await metric(metrics, "num_stale_messages_total")
        hosts.heal("core", "a")
        await until(metrics, "num_stale_messages_total", lambda value: value > stale)
        await until(metrics, "num_worker_groups", lambda value: value == 2)
        assert await read(stub, 50, flowing) == list(range(51, 51 + NUM_TOKENS))
        await until(metrics, "kv_cache_usage_perc", lambda value: value == 0)


async def read(stub: Stub, first: int, flowing: asyncio.Event) -> list[int]:
    """Read a stream, check that no token is missing or duplicated, and return the tokens; set `flowing` once over a
    quarter of them have arrived.
    """
    received: list[int] = []
    async for response in stub.Generate(tokens([first], max_tokens=NUM_TOKENS), timeout=LIMIT_S):
        assert response.token_offset == len(received)
        received += response.token_ids
        if len(received) > NUM_TOKENS // 4:
            flowing.set()
    return received


async def cut_database(machine: Machine, socket: str) -> None:
    """Cut the connection between a running scheduler and its journal during a request; a standby takes over."""
    hosts = machine.hosts
    (port,) = free_ports(1)
    machine.start("database", "database", "tests.faults.hosts", hosts.listen_address, port, socket)
    await database_answers(await conninfo(hosts, "", port))
    old, old_address = await start_scheduler(machine, "old", port)
    async with scheduler_at(old_address) as (stub, channel):
        _, new_address = await start_scheduler(machine, "new", port, "--standby")
        async with asyncio.timeout(LIMIT_S):
            while "waiting for the journal's lease" not in machine.log("new"):  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.05)
        request = tokens([1000], max_tokens=NUM_TOKENS, request_id="a")
        await stub.Submit(scheduler_pb2.SubmitRequest(request=request), timeout=LIMIT_S)
        first = await Feed.open(stub, channel=channel)
        first.reader.attach(1, "a")
        while len(first.tokens.get(1, [])) < NUM_TOKENS // 4:
            await first.read()
        hosts.cut("old", "database")
        async with scheduler_at(new_address) as (successor, other):
            second = await Feed.open(successor, channel=other)
            second.reader.attach(1, "a")
            await second.read_until(1)
        assert second.tokens[1] == list(range(1001, 1001 + NUM_TOKENS))
        # The old scheduler has delivered nothing that it could not write. By now it has been deposed or has exited by
        # itself.
        hosts.heal("old", "database")
        assert await asyncio.to_thread(old.wait, LIMIT_S) == 1
        with contextlib.suppress(ConnectionResetError):
            while True:
                await first.read()
    assert first.tokens[1] == second.tokens[1][: len(first.tokens[1])]
    assert len(first.tokens[1]) < NUM_TOKENS
    assert "the journal failed" in machine.log("old")


async def start_scheduler(
    machine: Machine, host: str, database_port: int, *flags: str
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a scheduler, with a worker on the same host; return the scheduler's process and gRPC address."""
    port, worker_port = free_ports(2)
    journal = ("--journal", "postgres", "--journal-url", await conninfo(machine.hosts, host, database_port))
    ports = ("--host", machine.hosts.listen_address, "--port", port, "--worker-port", worker_port)
    process = machine.start(host, host, "scheduler", *ports, *journal, *QUICK, *flags)
    await machine.start_worker(host, host, worker_port)
    return process, await machine.hosts.dial("", host, port)


@contextlib.asynccontextmanager
async def scheduler_at(address: str) -> AsyncIterator[tuple[SchedulerAsyncStub, grpc.aio.Channel]]:
    """Yield a stub and a channel of the scheduler once the scheduler is ready."""
    async with open_channel(address) as channel:
        stub = cast("SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
        await stub.GetLoads(loads_pb2.GetLoadsRequest(), wait_for_ready=True, timeout=LIMIT_S)
        yield stub, channel


async def conninfo(hosts: Hosts, source: str, port: int) -> str:
    """Return the connection string of the database, as seen from a host."""
    address, _, number = (await hosts.dial(source, "database", port)).rpartition(":")
    return f"host={address} port={number} user=postgres dbname=postgres"


async def database_answers(where: str) -> None:
    """Wait until the database accepts connections."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                (await asyncio.to_thread(lambda: psycopg.connect(where, connect_timeout=5))).close()
                return
            await asyncio.sleep(0.05)


async def metric(url: str, name: str) -> float:
    """Return a metric of a process."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    found = re.search(rf"^midstream:{name} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


async def until(url: str, name: str, holds: Callable[[float], bool]) -> None:
    """Wait until the value of a metric satisfies a condition."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(OSError):
                if holds(await metric(url, name)):
                    return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _machine(arguments: argparse.Namespace) -> AsyncIterator[Machine]:
    names = ("core", "a", "b") if arguments.scenario == "cut-worker" else ("old", "new", "database")
    machine = Machine(Namespaces(names) if arguments.namespaces else Relays(), arguments.folder)
    try:
        yield machine
    finally:
        machine.kill()


async def _run(arguments: argparse.Namespace) -> None:
    async with _machine(arguments) as machine:
        if arguments.scenario == "cut-worker":
            await cut_worker(machine)
        else:
            await cut_database(machine, arguments.socket)


def main() -> None:
    """Run a scenario; fail if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=("cut-worker", "cut-database"))
    parser.add_argument("--namespaces", action="store_true", help="Run in network namespaces instead of with relays.")
    parser.add_argument("--folder", type=Path, required=True, help="For logs.")
    parser.add_argument("--socket", help="Unix socket of a PostgreSQL server.")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
