"""Run a service whose host names are resolved from a file, which emulates the DNS of a cluster.

python -m tests.fakes.resolver HOSTS router --schedulers dns:///scheduler:50052 ...

A line of HOSTS is `NAME ADDRESS`; a name on several lines has several addresses. The file is read for each query.
"""

from __future__ import annotations

import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from midstream.python_process import python_command


def resolve_by(hosts: Path) -> None:
    """Make `socket.getaddrinfo` resolve the names in the file, and resolve all other names as usual."""
    ask_machine = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        lines = [line.split() for line in hosts.read_text(encoding="utf-8").splitlines()]
        addresses = [address for name, address in lines if name == host] or [host]
        return [found for address in addresses for found in ask_machine(address, port, *arguments, **options)]

    socket.getaddrinfo = getaddrinfo


def publish(hosts: Path, **names: list[str]) -> None:
    """Replace the addresses of several names atomically."""
    new = hosts.with_suffix(".new")
    new.write_text("".join(f"{name} {address}\n" for name in names for address in names[name]), encoding="utf-8")
    new.replace(hosts)


if __name__ == "__main__":
    resolve_by(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    # In an installation, the service is in the package midstream.
    *_, module = python_command(sys.argv[0])
    runpy.run_module(module, run_name="__main__", alter_sys=True)
