"""A private PostgreSQL server in a temporary folder, on a free port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from tests.ports import free_ports

START_TIMEOUT_S = 30
_USER = "postgres"


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run the server; yield its connection string."""
    folder = Path(tempfile.mkdtemp(prefix="midstream-postgres-"))
    data, (port,) = folder / "data", free_ports(1)
    # PostgreSQL refuses to run as root.
    as_user: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, _USER, _USER)
        as_user = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
    initdb = [*as_user, _program("initdb"), "-D", str(data), "-U", _USER, "--auth=trust", "--no-sync"]
    subprocess.run(initdb, check=True, capture_output=True, timeout=60, cwd=folder)
    settings = ["-c", "fsync=off", "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={folder}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*as_user, _program("postgres"), "-D", str(data), "-p", str(port), *settings],
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    conninfo = f"host=127.0.0.1 port={port} user={_USER} dbname=postgres"
    try:
        _wait(conninfo, server)
        yield conninfo
    finally:
        server.send_signal(signal.SIGINT)  # without waiting for clients to disconnect
        server.wait()
        shutil.rmtree(folder)


def is_installed() -> bool:
    """Return whether PostgreSQL is installed."""
    return shutil.which(_program("initdb")) is not None


def _program(name: str) -> str:
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    return shutil.which(name, path=os.pathsep.join([*map(str, places), os.environ["PATH"]])) or name


def _wait(conninfo: str, server: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(conninfo).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)
