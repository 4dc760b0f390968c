"""Processes of this machine by name, each with a log; they can be killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from midstream.python_process import python_command, python_environment

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return an environment in which components and the tests' fakes can be imported, in a checkout or an
    installation.
    """
    return python_environment(os.environ | {"PYTHONPATH": str(ROOT)})


class NamedProcesses:
    """Current and past processes.

    Attributes:
        folder: Folder that contains NAME.log, the log of all incarnations of a process.
        processes: The latest incarnation of each process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start or restart `python -m WORDS`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(python_command(*words), env=environment(), stdout=log, stderr=log)
        return self.processes[name]

    def is_running(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process."""
        self.processes[name].send_signal(number)

    def end(self, name: str) -> None:
        """Send SIGKILL to a process, and wait until it is gone."""
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        """Return the whole log of a process."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def close(self) -> None:
        """Kill all processes."""
        for name in self.processes:
            self.end(name)
