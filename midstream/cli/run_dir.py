"""The run directory: the state of a service on this machine, for other commands and a later start.

RUN_DIR/state.json   written by the supervisor at each change, replaced atomically
RUN_DIR/lock         held by the supervisor while it runs, so that stale state is recognized
RUN_DIR/logs/        one file per process
RUN_DIR/journal/     requests and tokens, unless MIDSTREAM_JOURNAL is set; RUN_DIR/journal.documents next to it
RUN_DIR/journal-NAME/   the same for each model, if there are several
RUN_DIR/models.toml  the models of the routers, if there are several
RUN_DIR/api-keys     keys that routers accept from clients, with `midstream up --api-key`
RUN_DIR/token        the key that this user's commands send to routers
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
from dataclasses import dataclass
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from midstream.errors import ConfigError
from midstream.model.folder import midstream_home


class ProcessPhase(StrEnum):
    """Phase of a process or of the whole run."""

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One supervised process.

    Attributes:
        name: Name that is unique in the run, such as `worker-0`.
        kind: The Python package that runs: router, scheduler, gpu_worker or detokenizer.
        addresses: HOST:PORT by protocol (`grpc`, `http`, `zmq`).
        pid: Process id; 0 while the process is not running.
        started_ticks: The kernel's start time of `pid`, which distinguishes it from a later process with the same pid.
        detail: Current activity or error, for display.
    """

    name: str
    kind: str
    addresses: dict[str, str]
    log: str
    phase: ProcessPhase = ProcessPhase.STARTING
    pid: int = 0
    started_ticks: int = 0
    started_unix_s: float = 0.0
    num_restarts: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunState:
    """The processes of one supervisor. `phase` is starting, ready, stopping, stopped or failed."""

    model: str
    phase: ProcessPhase
    supervisor_pid: int
    started_unix_s: float
    processes: tuple[ProcessState, ...]
    error: str = ""

    def of_kind(self, kind: str) -> list[ProcessState]:
        """Return the processes of one kind, in order."""
        return [process for process in self.processes if process.kind == kind]


class RunDir:
    """A run directory, with or without a running service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.journal_path = os.environ.get("MIDSTREAM_JOURNAL_PATH") or str(path / "journal")
        self.api_keys = path.absolute() / "api-keys"
        self.token = path / "token"
        self.models = path / "models.toml"
        self._state_file = path / "state.json"
        self._lock_file = path / "lock"
        self._lock: TextIOWrapper | None = None

    def acquire(self) -> None:
        """Lock the directory for this supervisor until `release` is called or the process ends. Raises ConfigError if
        another supervisor holds the lock.
        """
        for folder in (self.path, self.logs):  # logs, state and journal are private to the user
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.geteuid():
                folder.chmod(0o700)
        lock = self._lock_file.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"a service is already running in {self.path}; stop it with `midstream "
                f"down{run_dir_flag(self.path)}`, or choose another directory",
                field="--run-dir",
            ) from None
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_supervised(self) -> bool:
        """Return whether a supervisor is running here."""
        if not self._lock_file.exists():
            return False
        with self._lock_file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def write_state(self, state: RunState) -> None:
        """Write the state atomically."""
        temporary = self._state_file.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
        temporary.replace(self._state_file)

    def read_state(self) -> RunState | None:
        """Return the state as last written, even if that run has ended; None if there is none."""
        try:
            text = self._state_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return _parse_state(json.loads(text))
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{self._state_file} is damaged or from another version; delete it") from None


def orphans(state: RunState | None) -> list[ProcessState]:
    """Return the processes that still run after their supervisor has ended, and therefore are not restarted."""
    return [process for process in state.processes if is_alive(process)] if state is not None else []


def _parse_state(fields: dict[str, Any]) -> RunState:
    processes = tuple(
        ProcessState(**(item | {"phase": ProcessPhase(item["phase"])})) for item in fields.pop("processes")
    )
    phase = ProcessPhase(fields.pop("phase"))
    return RunState(**fields, phase=phase, processes=processes)


def default_run_dir() -> Path:
    """Return $MIDSTREAM_HOME/run, by default ~/.cache/midstream/run."""
    return midstream_home() / "run"


def run_dir_flag(path: Path) -> str:
    """Return the --run-dir flag that selects `path`; empty if it is the default."""
    return "" if path == default_run_dir() else f" --run-dir {shlex.quote(str(path))}"


def not_running(path: Path) -> str:
    """Return the message for a run directory without a running service."""
    flag = run_dir_flag(path)
    return f"No Midstream service is running in {path}. Start one with: midstream up --detach{flag}"


def started_ticks(pid: int) -> int:
    """Return the start time of process `pid` in clock ticks since boot; 0 if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def is_alive(process: ProcessState) -> bool:
    """Return whether the process recorded in the state is still running (and its pid has not been reused)."""
    return process.pid > 0 and started_ticks(process.pid) == process.started_ticks != 0
