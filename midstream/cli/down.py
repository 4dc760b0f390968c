"""`midstream down`: stop a service started by `midstream up`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

from rich.console import Console

from midstream.cli.run_dir import RunDir, RunState
from midstream.cli.supervisor import stop_orphans
from midstream.cli.up import add_run_dir
from midstream.errors import ExecutionError

_POLL_INTERVAL_S = 0.05
_TIMEOUT_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--now", action="store_true", help="Stop immediately, without waiting for streams.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0 if nothing is running."""
    run_dir, console = RunDir(arguments.run_dir), Console(highlight=False)
    state = run_dir.read_state()
    if state is None or not run_dir.is_supervised():
        count = stop_orphans(state)
        console.print(
            f"Killed {count} processes without a supervisor."
            if count
            else f"No Midstream service is running in {run_dir.path}.",
            markup=False,
            soft_wrap=True,
        )
        return 0
    with console.status("Stopping"):
        _stop(run_dir, state, now=arguments.now)
    console.print("Stopped.")
    return 0


def _stop(run_dir: RunDir, state: RunState, *, now: bool) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.supervisor_pid, signal.SIGTERM)
        if now:
            time.sleep(_POLL_INTERVAL_S)  # two signals sent at the same time may arrive as one
            os.kill(state.supervisor_pid, signal.SIGTERM)
    while run_dir.is_supervised():
        if time.monotonic() > deadline:
            raise ExecutionError(f"the supervisor (process {state.supervisor_pid}) did not stop in {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
