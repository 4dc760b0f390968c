"""A service whose processes are killed: `midstream up` in its own folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from midstream.cli.run_dir import ProcessPhase, ProcessState, RunDir, RunState, is_alive

START_TIMEOUT_S = 120.0


class KilledService:
    """A running service.

    Attributes:
        routers: Addresses of its routers.
        num_kills: Processes killed so far, by kind.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.routers = [router.addresses["grpc"] for router in self.state().of_kind("router")]
        self.num_kills: dict[str, int] = {}

    def state(self) -> RunState:
        """Return the state of the running processes, as the supervisor reports it."""
        state = self._run_dir.read_state()
        assert state is not None
        return state

    def is_whole(self) -> bool:
        """Return whether every process is ready."""
        return all(process.phase is ProcessPhase.READY and is_alive(process) for process in self.state().processes)

    def kill(self, kind: str) -> ProcessState:
        """Send SIGKILL to the next process of a kind, preferably a running one."""
        count = self.num_kills.get(kind, 0)
        self.num_kills[kind] = count + 1
        processes = self.state().of_kind(kind)
        turns = [processes[(count + number) % len(processes)] for number in range(len(processes))]
        process = next((item for item in turns if is_alive(item) and item.phase is ProcessPhase.READY), turns[0])
        if is_alive(process):
            os.kill(process.pid, signal.SIGKILL)
        return process

    def pids(self) -> dict[str, int]:
        """Return the pids of the running processes, by name."""
        return {process.name: process.pid for process in self.state().processes if is_alive(process)}


@contextlib.contextmanager
def running_service(
    model: str,
    routers: int,
    detokenizers: int,
    workers: int,
    *flags: str,
    folder: Path | None = None,
    **environment: str,
) -> Iterator[KilledService]:
    """Start a service, with a process for each part, and with additional flags and environment variables; stop it at
    the end.

    Raises:
        RuntimeError: The service did not start.
    """
    with tempfile.TemporaryDirectory(prefix="midstream-kills-") as temporary:
        run_dir = RunDir(folder or Path(temporary))
        command = [sys.executable, "-m", "midstream.cli", "up", "--run-dir", str(run_dir.path), "--model", model]
        command += [
            "--port",
            "0",
            "--http-port",
            "0",
            "--shared-process",
            "off",
            "--routers",
            str(routers),
            "--detokenizers",
            str(detokenizers),
            "--workers",
            str(workers),
            *flags,
        ]
        with subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as supervisor:
            try:
                _await_ready(run_dir, supervisor)
                yield KilledService(run_dir)
            finally:
                supervisor.send_signal(signal.SIGTERM)
                try:
                    supervisor.wait(60)
                except subprocess.TimeoutExpired:
                    supervisor.send_signal(signal.SIGTERM)
                    supervisor.wait()


def _await_ready(run_dir: RunDir, supervisor: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at and supervisor.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            state = run_dir.read_state()
            if state is not None and state.phase is ProcessPhase.READY:
                return
        time.sleep(0.1)
    raise RuntimeError("the service did not start")
