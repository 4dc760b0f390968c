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

CONFIGURATIONS = Path(__file__).parents[2] / "deploy" / "proxies"
# Where the configurations expect the routers.
HOSTS = ("10.0.0.3", "10.0.0.4")
GRPC_PORT, HTTP_PORT = 50051, 8000
IS_REQUIRED = bool(os.environ.get("MIDSTREAM_ALL_PROXY_TESTS"))


@dataclass(frozen=True)
class Program:
    """A proxy.

    Attributes:
        name: Name of its command and of its Debian package, except that nginx is `nginx-light`.
        file: Its configuration.
    """

    name: str
    file: str

    def path(self) -> str:
        """Return the program; skip the test if it is not installed."""
        path = shutil.which(self.name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        if path is None:
            (pytest.fail if IS_REQUIRED else pytest.skip)(f"{self.name} is not installed; make test-proxies installs it")
        return path

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
    file = folder / program.file
    file.write_text(placed(program, text, (ports[0], ports[1]), routers, urls, folder), encoding="utf-8")
    with (folder / f"{program.name}.output").open("wb") as output:
        environment = os.environ | {"HOME": str(folder)}  # where Caddy keeps its state
        process = subprocess.Popen(program.run_command(file), stdout=output, stderr=output, env=environment)
    try:
        for port in ports:
            await until(lambda port=port: process.poll() is not None or not is_free_port(port))
        assert process.poll() is None, Path(output.name).read_text()
        yield Proxy(f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
