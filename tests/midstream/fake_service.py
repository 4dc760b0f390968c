"""A stand-in for any supervised service: it serves /health, or fails as configured.

python -m tests.midstream.fake_service --name NAME --http-port PORT [--mode MODE] [--trace FILE]

Modes: healthy, crash, stubborn, waiting, draining (exits at the second SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path

from midstream.telemetry import HttpServer, Metrics


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
    terminated = threading.Event()
    if arguments.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif arguments.mode == "draining":

        def end_next_time(*_: object) -> None:
            signal.signal(signal.SIGTERM, lambda *_: terminated.set())

        signal.signal(signal.SIGTERM, end_next_time)
    else:
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    began = time.monotonic()

    def problems() -> list[str]:
        """Return the health problems. In mode `waiting`, the service is healthy for a second and then waits."""
        return ["no worker"] if arguments.mode == "waiting" and time.monotonic() > began + 1 else []

    server = HttpServer("127.0.0.1", arguments.http_port, Metrics(), problems)
    server.start()
    terminated.wait()
    server.stop()
    with arguments.trace.open("a") as trace:
        trace.write(f"{arguments.name}\n")


if __name__ == "__main__":
    main()
