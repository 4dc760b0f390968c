"""Processes of this machine by name, each with a log, to be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from midstream.python_process import python_command, python_environment

ROOT = Path(__file__).parents[2]
# For the parts, in a checkout or an installation, and for the tests' fakes.
ENVIRONMENT = python_environment(os.environ | {"PYTHONPATH": str(ROOT)})


class NamedProcesses:
    """What runs, or ran.

    Attributes:
        folder: Where NAME.log is, for all lives of a process.
        processes: The last life of each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts `python -m WORDS`, for the first time or again."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(python_command(*words), env=ENVIRONMENT, stdout=log, stderr=log)
        return self.processes[name]

    def is_running(self, name: str) -> bool:
        """Whether the process lives."""
        return name in self.processes and self.processes[name].poll() is None

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal."""
        self.processes[name].send_signal(number)

    def end(self, name: str) -> None:
        """SIGKILL; returns when it is gone."""
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        """All that it has logged."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def close(self) -> None:
        """Kills everything."""
        for name in self.processes:
            self.end(name)
