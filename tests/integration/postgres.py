"""A private PostgreSQL server in a temporary folder, on a free port, and PgBouncer in front of it.

The server is that in TEST_POSTGRES_BIN, if this is set, otherwise the newest that is installed.
"""

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

START_TIMEOUT_S = 120
_USER = "postgres"
# A role for tests, which tests create.
ROLE = "midstream"


class PostgresServer:
    """A running server.

    Attributes:
        conninfo: Its connection string.
        port: Its port at 127.0.0.1.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        """Create the database's files and start the server.

        Args:
            folder: An empty folder, which is given to the user that runs the server.
            settings: NAME=VALUE.
        """
        self._folder, (self.port,) = folder, free_ports(1)
        self.conninfo = f"host=127.0.0.1 port={self.port} user={_USER} dbname=postgres"
        self._settings = ["fsync=off", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", *settings]
        if os.geteuid() == 0:
            shutil.chown(folder, _USER, _USER)
        initdb = [_program("initdb"), "-D", str(folder / "data"), "-U", _USER, "--auth=trust", "--no-sync"]
        subprocess.run([*_as_user(), *initdb], check=True, capture_output=True, timeout=240, cwd=folder)
        self.start()

    def start(self) -> None:
        settings = [word for setting in self._settings for word in ("-c", setting)]
        server = [_program("postgres"), "-D", str(self._folder / "data"), "-p", str(self.port), *settings]
        self._process = start_as_user(server, self._folder)
        _wait(self.conninfo, self._process)

    def crash(self) -> None:
        """End the server as in a crash: what it has not written is lost."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def stop(self) -> None:
        """End the server without waiting for clients to disconnect."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


@contextlib.contextmanager
def running_server(*settings: str) -> Iterator[PostgresServer]:
    """Run a server with the settings (NAME=VALUE)."""
    with tempfile.TemporaryDirectory(prefix="midstream-postgres-") as folder:
        server = PostgresServer(Path(folder), *settings)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Run the server; yield its connection string."""
    with running_server() as server:
        yield server.conninfo


@contextlib.contextmanager
def pooler(server_port: int, pool_mode: str, *settings: str) -> Iterator[str]:
    """Run PgBouncer in front of the server; yield its connection string, without a user.

    Each transaction, in session mode each session, finds the state of a new session, as if it ran on another
    connection.
    """
    with tempfile.TemporaryDirectory(prefix="midstream-pooler-") as name:
        folder, (port,) = Path(name), free_ports(1)
        lines = [
            "[databases]",
            f"* = host=127.0.0.1 port={server_port}",
            "[pgbouncer]",
            f"listen_addr=127.0.0.1\nlisten_port={port}\nunix_socket_dir=\npool_mode={pool_mode}",
            "auth_type=trust\nauth_file=users\nserver_reset_query=DISCARD ALL\nserver_reset_query_always=1",
            *settings,
        ]
        (folder / "ini").write_text("\n".join(lines), encoding="utf-8")
        (folder / "users").write_text(f'"{_USER}" ""\n"{ROLE}" ""\n', encoding="utf-8")
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, _USER, _USER)
        process = start_as_user([_program("pgbouncer"), "ini"], folder)
        conninfo = f"host=127.0.0.1 port={port} dbname=postgres"
        try:
            _wait(f"{conninfo} user={_USER}", process)
            yield conninfo
        finally:
            process.kill()
            process.wait()


def start_as_user(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a program as the user that may run it, in a folder that gets its log."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([*_as_user(), *command], stdout=log, stderr=log, cwd=folder)


def _as_user() -> list[str]:
    """Return the start of a command; PostgreSQL and PgBouncer refuse to run as root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]


def has_pooler() -> bool:
    """Return whether PgBouncer is installed."""
    return shutil.which(_program("pgbouncer")) is not None


def is_installed() -> bool:
    """Return whether PostgreSQL is installed."""
    return shutil.which(_program("initdb")) is not None


def version() -> str:
    """Return the server's version."""
    shown = subprocess.run([_program("postgres"), "--version"], check=True, capture_output=True, text=True).stdout
    return shown.split()[2]


def _program(name: str) -> str:
    own = os.environ.get("TEST_POSTGRES_BIN", "")
    places = [own, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), os.environ["PATH"], "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(map(str, places))) or name


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
