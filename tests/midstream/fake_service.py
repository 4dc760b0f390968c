"""A stand-in for any supervised service: it serves /health, or fails as configured.

python -m tests.midstream.fake_service --name NAME --http-port PORT [--mode MODE] [--trace FILE]

Modes: healthy, crash, stubborn, waiting (for other components, from SIGUSR1 on), draining (exits at the second
signal), closing (closes its port at SIGUSR1).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from midstream.telemetry import HttpServer, Metrics


def at_end(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name")
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--mode", default="healthy")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    if arguments.mode == "crash":
        print(json.dumps({"level": "error", "message": "model: no such folder"}), file=sys.stderr)
        raise SystemExit(3)
    signals: list[int] = []  # not an event, whose lock may be held by the code that the signal handler interrupts
    if arguments.mode == "stubborn":
        at_end(signal.SIG_IGN)
    elif arguments.mode == "draining":

        def end_next_time(*_: object) -> None:
            at_end(lambda number, _: signals.append(number))
            arguments.trace.with_name(f"{arguments.name}.drains").touch()

        at_end(end_next_time)
    else:
        at_end(lambda number, _: signals.append(number))
    problems: list[str] = []
    if arguments.mode == "waiting":
        signal.signal(signal.SIGUSR1, lambda *_: problems.append("no worker"))
    server = HttpServer("127.0.0.1", arguments.http_port, Metrics(), lambda: problems)
    if arguments.mode == "closing":
        signal.signal(signal.SIGUSR1, lambda *_: server.stop())
    server.start()
    while not signals:
        time.sleep(0.05)
    server.stop()
    with arguments.trace.open("a") as trace:
        trace.write(f"{arguments.name}\n")


if __name__ == "__main__":
    main()
