"""A journal in PostgreSQL: the lease, the fence, and a standby that takes over in the middle of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from midstream.errors import ConfigError
from midstream.rpc.channel import open_channel
from protos import loads_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.journal import DeposedError, postgres
from scheduler.journal.postgres import LEASE_S, SCHEMA_VERSION, PostgresStore
from scheduler.journal.store import Transaction, seal
from tests.integration.parts import START_TIMEOUT_S, Parts, running
from tests.integration.postgres import has_pooler, pooler, postgres_server
from tests.integration.service import collect, eventually, tokens
from tests.ports import free_ports
from tests.scheduler.test_service import Feed

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_TOKENS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as conninfo:
        yield conninfo


@pytest.fixture
def database(server: str) -> str:
    """Return the connection string of an empty journal."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS midstream_writer, midstream_requests, midstream_commits")
    return server


def test_rows_come_back_and_compaction_replaces_commits(database: str) -> None:
    store = PostgresStore(database, "a")
    assert store.take_over(least_epoch=7) == 7
    store.write(Transaction(accepted=[(1, b"one"), (2, b"two")], commit=seal(b"first")))
    store.write(Transaction(commit=seal(b"second")))
    stored = store.read()
    assert stored.requests == [(1, b"one", b""), (2, b"two", b"")]
    assert [record for _, record in stored.commits] == [seal(b"first"), seal(b"second")]
    store.write(Transaction(forgotten=[1], compacted=[(2, b"all")]))
    stored = store.read()
    assert (stored.requests, stored.commits) == ([(2, b"two", b"all")], [])
    store.close()


def test_a_deposed_writer_writes_nothing(database: str) -> None:
    old, new = PostgresStore(database, "same name"), PostgresStore(database, "same name")
    epoch = old.take_over(least_epoch=1)
    assert new.take_over(least_epoch=1) == epoch + 1
    with pytest.raises(DeposedError):
        old.write(Transaction(accepted=[(1, b"one")], commit=seal(b"late")))
    with pytest.raises(DeposedError):
        old.check()
    stored = new.read()
    assert (stored.requests, stored.commits) == ([], [])
    old.close()
    new.check()
    new.close()


def test_a_released_lease_passes_to_the_waiting_scheduler_at_once(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    first = PostgresStore(database, "first")
    first.take_over(least_epoch=1)
    second = PostgresStore(database, "second", is_standby=True)
    second.take_over(least_epoch=1)
    assert time.monotonic() - started > LEASE_S / 2
    second.close()
    waits: list[float] = []
    monkeypatch.setattr(postgres, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waits.append))
    third = PostgresStore(database, "third")
    third.take_over(least_epoch=1)
    assert waits == []
    third.close()
    first.close()


def test_a_lease_lasts_by_the_databases_clock_and_ends_even_if_that_was_set_back(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database's clock determines when a lease expires. If it is set back by an hour, an existing lease expires an
    hour later, so a standby also takes over if it has seen no renewal for two lease durations by its own monotonic
    clock.
    """
    first, second, elapsed_s = PostgresStore(database, "first"), PostgresStore(database, "second"), 0.0
    first.take_over(least_epoch=1)

    def wait(seconds: float) -> None:
        nonlocal elapsed_s
        elapsed_s += seconds
        if elapsed_s < 5 * LEASE_S:
            first.check()
            connection.execute("UPDATE midstream_writer SET lease_until = lease_until + interval '1 hour'")

    monkeypatch.setattr(postgres, "time", SimpleNamespace(monotonic=lambda: elapsed_s, sleep=wait))
    with psycopg.connect(database, autocommit=True) as connection:
        second.take_over(least_epoch=1)
    assert 6.5 * LEASE_S < elapsed_s < 7.5 * LEASE_S
    with pytest.raises(DeposedError):
        first.check()
    first.close()
    second.close()


def test_a_standby_does_not_take_over_after_a_transaction_that_outlasts_the_lease(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LEASE_S", 1.0)
    first, second = PostgresStore(database, "first"), PostgresStore(database, "second", is_standby=True)
    first.take_over(least_epoch=1)
    with ThreadPoolExecutor(2) as threads, psycopg.connect(database) as blocker:
        blocker.execute("LOCK TABLE midstream_commits IN ACCESS EXCLUSIVE MODE")
        writing = threads.submit(first.write, Transaction(commit=seal(b"slow")))
        waiting = threads.submit(second.take_over, 1)
        time.sleep(1.3)
        blocker.rollback()
        writing.result()
        for _ in range(4):
            time.sleep(0.1)
            first.check()
        assert not waiting.done()
        first.close()
        waiting.result()
    second.close()


def test_a_newer_schema_is_refused(database: str) -> None:
    store = PostgresStore(database, "a")
    store.take_over(1)
    store.close()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE midstream_writer SET schema_version = %s", (SCHEMA_VERSION + 1,))
    with pytest.raises(ConfigError, match="newer version"):
        store.take_over(1)
    store.close()


async def test_a_standby_takes_over_from_a_suspended_scheduler(database: str, tmp_path: Path) -> None:
    flags = ("--journal", "postgres", "--journal-url", database)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Parts(tmp_path / "old", *flags), Parts(tmp_path / "new", *flags, "--standby")
    request = tokens([1000], max_tokens=NUM_TOKENS, request_id="a")
    with running(old, "scheduler", "worker"):
        async with open_channel(f"127.0.0.1:{old.scheduler_port}") as channel:
            stub = cast("SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
            await stub.GetLoads(loads_pb2.GetLoadsRequest(), wait_for_ready=True, timeout=240)
            with running(new, "scheduler", "worker"):
                await asyncio.to_thread(new.wait_for_log, "scheduler", "waiting for the journal's lease")
                old.hold.touch()  # the stream does not end before the scheduler is suspended
                await stub.Submit(scheduler_pb2.SubmitRequest(request=request), wait_for_ready=True)
                feed = await Feed.open(stub)
                feed.reader.attach(1, "a")
                while len(feed.tokens.get(1, [])) < NUM_TOKENS // 4:
                    await feed.read()
                old.processes["scheduler"].send_signal(signal.SIGSTOP)
                received = await _read_all(new.scheduler_port)
                old.processes["scheduler"].send_signal(signal.SIGCONT)
                assert await asyncio.to_thread(old.processes["scheduler"].wait, 60) == 1
    assert received == list(range(1001, 1001 + NUM_TOKENS))
    assert feed.tokens[1] == received[: len(feed.tokens[1])]
    # The state of the old scheduler determines which error occurs first: that another scheduler has the lease, or that
    # the server has closed the connection.
    assert re.search("superseded|closed the connection", old.log("scheduler"))


async def _read_all(port: int) -> list[int]:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = cast("SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
        await stub.GetLoads(loads_pb2.GetLoadsRequest(), wait_for_ready=True, timeout=240)
        feed = await Feed.open(stub)
        feed.reader.attach(1, "a")
        await feed.read_until(1)
        received: list[int] = feed.tokens[1]
    return received


@pytest.mark.parametrize(
    "through",
    ["direct", pytest.param("pooler", marks=pytest.mark.skipif(not has_pooler(), reason="PgBouncer is not installed"))],
)
async def test_routers_and_detokenizers_follow_the_active_scheduler(
    database: str, tmp_path: Path, through: str
) -> None:
    """The stream continues at the standby, which also gets all later requests. The standby reports that it is ready
    before it takes over, so that a rolling update goes on to restart the active scheduler.
    """
    with contextlib.ExitStack() as stack:
        if through == "pooler":
            parameters = conninfo_to_dict(database)
            pooled = stack.enter_context(pooler(int(str(parameters["port"])), "transaction"))
            database = f"{pooled} user={parameters['user']}"
        await _follow(database, tmp_path)


async def _follow(database: str, tmp_path: Path) -> None:
    flags = ("--journal", "postgres", "--journal-url", database, "--standby")
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (http_port,) = free_ports(1)
    first = Parts(tmp_path / "first", *flags)
    second = Parts(tmp_path / "second", *flags, "--http-port", str(http_port))
    schedulers = ("--schedulers", f"one-of:127.0.0.1:{first.scheduler_port}|127.0.0.1:{second.scheduler_port}")
    with running(first, "scheduler", "worker"):
        await asyncio.to_thread(first.wait_for_log, "scheduler", "serving")
        with running(second, "scheduler", "worker"):
            await asyncio.to_thread(second.wait_for_log, "scheduler", "waiting for the journal's lease")
            (port,) = free_ports(1)
            second.launch("detokenizer", "detokenizer", "--port", str(port), *schedulers)
            ports = ("--port", str(second.router_port), "--http-port", "0", "--detokenizers", f"127.0.0.1:{port}")
            second.launch("router", "router", *ports, *schedulers)
            async with second.stub() as stub:
                first.hold.touch()  # the stream does not end before the scheduler is killed
                reading = asyncio.create_task(collect(stub, tokens([1000], max_tokens=NUM_TOKENS, request_id="a")))
                assert await eventually(lambda: num_running(stub), bool, START_TIMEOUT_S) == 1
                probes = ("/live", "/ready", "/health")
                assert [await status_of(http_port, path) for path in probes] == [200, 200, 503]
                first.kill("scheduler")
                answer = await reading
                requests = [tokens([1000], max_tokens=2, request_id=f"b{i}") for i in range(8)]
                answers = await asyncio.gather(*(collect(stub, request) for request in requests))
    assert answer.token_ids == list(range(1001, 1001 + NUM_TOKENS))
    assert [other.token_ids for other in answers] == [[1001, 1002]] * 8


async def status_of(port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    return int(status)


async def num_running(stub: Stub) -> int:
    loads = await stub.GetLoads(loads_pb2.GetLoadsRequest(), timeout=240)
    return sum(load.num_running_requests for load in loads.cells)
