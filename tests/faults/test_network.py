"""Three hosts with a cut link: in network namespaces if this machine allows them, otherwise with relays."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.faults.hosts import Relays, namespace_command
from tests.integration.named_processes import ROOT
from tests.integration.postgres import postgres_server


@pytest.fixture(scope="module")
def unshare() -> list[str]:
    return namespace_command()


def run(unshare: list[str], folder: Path, scenario: str, *flags: str) -> None:
    program = [sys.executable, "-m", "tests.faults.network_scenarios", scenario, "--folder", str(folder), *flags]
    command = [*unshare, *program, "--namespaces"] if unshare else program
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_worker_behind_a_cut_link_is_replaced_and_its_late_output_dropped(unshare: list[str], tmp_path: Path) -> None:
    run(unshare, tmp_path, "cut-worker")


async def test_a_relay_holds_what_comes_while_its_link_is_cut() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        relays = Relays()
        host, _, port = (await relays.dial("a", "b", server.sockets[0].getsockname()[1])).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        relays.cut("b", "a")
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.2)
        relays.heal("a", "b")
        assert await asyncio.wait_for(reader.readexactly(3), 240) == b"two"
        writer.write_eof()
        assert await reader.read() == b""
        await relays.close()
        writer.close()
        await writer.wait_closed()
        await ended.wait()


def test_a_standby_takes_over_from_a_scheduler_that_is_cut_off_from_the_database(
    unshare: list[str], tmp_path: Path
) -> None:
    with postgres_server() as conninfo:
        with psycopg.connect(conninfo) as connection:
            (folder,) = connection.execute("SHOW unix_socket_directories").fetchone() or ("",)
            (port,) = connection.execute("SHOW port").fetchone() or ("",)
        run(unshare, tmp_path, "cut-database", "--socket", f"{folder}/.s.PGSQL.{port}")
