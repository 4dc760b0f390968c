"""Runs a service whose host names are resolved by a file, as a cluster's DNS would by its pods.

python -m tests.fakes.resolver HOSTS router --schedulers dns:///scheduler:50052 ...

A line of HOSTS is `NAME ADDRESS`; a name with several lines has several addresses. It is read at each question.
"""

from __future__ import annotations

import runpy
import socket
import sys
from pathlib import Path
from typing import Any


def resolve_by(hosts: Path) -> None:
    """Answers `socket.getaddrinfo` by the file, and by the machine where the file does not name the host."""
    ask_machine = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        lines = [line.split() for line in hosts.read_text(encoding="utf-8").splitlines()]
        addresses = [address for name, address in lines if name == host] or [host]
        return [found for address in addresses for found in ask_machine(address, port, *arguments, **options)]

    socket.getaddrinfo = getaddrinfo


def publish(hosts: Path, **names: list[str]) -> None:
    """Gives names their addresses, all at once."""
    new = hosts.with_suffix(".new")
    new.write_text("".join(f"{name} {address}\n" for name in names for address in names[name]), encoding="utf-8")
    new.replace(hosts)


if __name__ == "__main__":
    resolve_by(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
