"""nginx, HAProxy and Caddy as child processes, with the configurations in deploy/proxies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from midstream.cli.topology import is_free_port
from tests.faults.processes import until
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = ROOT / "deploy" / "proxies"
# Where the configurations expect the routers.
HOSTS = ("10.0.0.3", "10.0.0.4")
GRPC_PORT, HTTP_PORT = 50051, 8000
IS_REQUIRED = bool(os.environ.get("ALL_PROXY_TESTS"))


@dataclass(frozen=True)
class Program:
    """A proxy.

    Attributes:
        name: Name of its command.
        file: Its configuration.
    """

    name: str
    file: str

    def path(self) -> str:
        """Return the program; skip the test if it is not installed, or fail with ALL_PROXY_TESTS."""
        path = shutil.which(self.name, path=f"{ROOT}/.venv-proxies/bin:{os.environ['PATH']}:/usr/sbin")
        problem = "is not installed" if path is None else self._problem(path)
        if path is None or problem:
            refuse = pytest.fail if IS_REQUIRED else pytest.skip
            refuse(f"{self.name} {problem}; make test-proxies installs it")
        return path

    def _problem(self, path: str) -> str:
        if self is not CADDY:
            return ""
        said = subprocess.run([path, "version"], capture_output=True, text=True, timeout=30, check=True).stdout
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", said)
        assert found is not None, said
        # Earlier releases end a stream as if it were complete if its router dies.
        return "" if tuple(map(int, found.groups())) >= (2, 8, 4) else f"{found[0]} is older than 2.8.4"

    def configuration(self) -> str:
        """Return the configuration as it is deployed."""
        return (CONFIGURATIONS / self.file).read_text(encoding="utf-8")

    def check_command(self, file: Path) -> list[str]:
        """Return the command that checks a configuration."""
        match self.name:
            case "nginx":
                return [self.path(), "-t", "-p", str(file.parent), "-c", str(file), "-g", _nginx_globals(file.parent)]
            case "haproxy":
                return [self.path(), "-c", "-f", str(file)]
            case _:
                return [self.path(), "validate", "--adapter", "caddyfile", "--config", str(file)]

    def run_command(self, file: Path) -> list[str]:
        """Return the command that runs the proxy in the foreground."""
        match self.name:
            case "nginx":
                settings = _nginx_globals(file.parent) + " daemon off;"
                return [self.path(), "-p", str(file.parent), "-c", str(file), "-g", settings]
            case "haproxy":
                return [self.path(), "-db", "-f", str(file)]
            case _:
                return [self.path(), "run", "--adapter", "caddyfile", "--config", str(file)]


NGINX = Program("nginx", "nginx.conf")
HAPROXY = Program("haproxy", "haproxy.cfg")
CADDY = Program("caddy", "Caddyfile")
PROGRAMS = (NGINX, HAPROXY, CADDY)


@dataclass(frozen=True)
class Proxy:
    """A running proxy.

    Attributes:
        address: Its gRPC address.
        url: Its HTTP URL.
    """

    address: str
    url: str


def placed(
    program: Program, text: str, ports: tuple[int, int], routers: Sequence[str], urls: Sequence[str], folder: Path
) -> str:
    """Return a configuration with other addresses of the proxy and of the routers."""
    for host, router, url in zip(HOSTS, routers, urls, strict=True):
        text = text.replace(f"{host}:{GRPC_PORT}", router).replace(f"{host}:{HTTP_PORT}", url.removeprefix("http://"))
        # The line of a gRPC server in HAProxy names the port of the health check, too.
        text = re.sub(rf"({re.escape(router)} .*port ){HTTP_PORT}\b", rf"\g<1>{url.rpartition(':')[2]}", text)
    assert not any(host in text for host in HOSTS)
    text = re.sub(rf"\b{GRPC_PORT}\b", str(ports[0]), text)
    text = re.sub(rf"\b{HTTP_PORT}\b", str(ports[1]), text)
    if program is NGINX:  # its compiled-in folders belong to root
        paths = (f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        text = text.replace("http {", f"http {{ access_log off; {' '.join(paths)}", 1)
    return text


def _nginx_globals(folder: Path) -> str:
    return f"pid {folder}/nginx.pid; error_log {folder}/nginx.log;"


@contextlib.asynccontextmanager
async def running(
    program: Program, folder: Path, routers: Sequence[str], urls: Sequence[str], text: str
) -> AsyncIterator[Proxy]:
    """Run a proxy in front of two routers, with a configuration for the addresses of `deploy/proxies`."""
    ports = free_ports(2)
    process = _start(program, folder, placed(program, text, (ports[0], ports[1]), routers, urls, folder))
    try:
        await until(lambda: process.poll() is not None or not any(map(is_free_port, ports)))
        assert process.poll() is None, _output(program, folder)
        yield Proxy(f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    finally:
        await asyncio.to_thread(_stop, process)


def _start(program: Program, folder: Path, text: str) -> subprocess.Popen[bytes]:
    file = folder / program.file
    file.write_text(text, encoding="utf-8")
    environment = os.environ | {"HOME": str(folder)}  # where Caddy keeps its state
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(program.run_command(file), stdout=output, stderr=output, env=environment)


def _output(program: Program, folder: Path) -> str:
    return f"{program.name} has ended: {(folder / 'output').read_text()}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
