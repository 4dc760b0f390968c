"""Worker groups whose ranks are forked from a process that has imported torch, so that they start within a second.

python -m tests.faults.forked_ranks reads one JSON line per rank, forks a process that runs it, and prints its process
id.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_worker.scripted_scheduler import rank_environment
from tests.ports import free_port

HOST = "127.0.0.1"


class ForkedGroup:
    """A group of ranks that is killed and started again."""

    def __init__(self, folder: Path, scheduler: str, num_ranks: int, *flags: str) -> None:
        """Start the group."""
        self._arguments = ["--scheduler", scheduler, "--model", str(folder), "--device", "cpu", *flags]
        self._num_ranks = num_ranks
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MIDSTREAM_")}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forked_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._pids: list[int] = []
        self.start()

    def start(self) -> None:
        """Start all ranks."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        port = free_port()
        self._pids = []
        for rank in range(self._num_ranks):
            variables = rank_environment(rank, self._num_ranks, HOST, port)
            self._server.stdin.write(json.dumps({"arguments": self._arguments, "variables": variables}) + "\n")
            self._server.stdin.flush()
            self._pids.append(int(self._server.stdout.readline()))

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks; the others end themselves. Nothing waits for ended ranks, so their process ids stay reserved."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        """Kill all ranks."""
        self.kill(range(self._num_ranks))
        self._server.kill()
        self._server.communicate()


def main() -> None:
    """Fork a process for each line, until the input ends."""
    # Both modules import torch; the second one is imported here so that the forked processes need not import it.
    from gpu_worker import __main__ as worker
    from gpu_worker.parallel import launch  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        code = 1
        try:
            os.environ.update(job["variables"])
            sys.argv[1:] = job["arguments"]
            code = worker.main()
        except Exception:
            logging.exception("a rank failed")
        finally:
            os._exit(code)


if __name__ == "__main__":
    main()
