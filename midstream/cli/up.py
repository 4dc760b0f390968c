"""`midstream up`: every part of the service as processes of this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import subprocess
import time
from pathlib import Path

from rich.console import Console

from midstream.cli.display import RunDisplay
from midstream.cli.run_dir import ProcessPhase, RunDir, RunState, default_run_dir
from midstream.cli.supervisor import Supervisor
from midstream.cli.topology import Topology, plan_processes
from midstream.errors import ExecutionError
from midstream.model.folder import EMBEDDED_MODEL, open_model_folder
from midstream.python_process import python_command, python_environment

_POLL_INTERVAL_S = 0.1


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names the run."""
    default = default_run_dir()
    parser.add_argument(
        "--run-dir", type=Path, default=default, help=f"State and logs; one service runs in each. [{default}]"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--routers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument("--detokenizers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="Each with its share of the cores. [1]")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="Ranks that divide a layer. [1]")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="Stages of layers. [1]")
    parser.add_argument(
        "--model", default=EMBEDDED_MODEL, metavar="PATH", help="Model folder or .gguf file. [smollm2, embedded]"
    )
    parser.add_argument("--detach", action="store_true", help="Return when it is ready; `midstream down` stops it.")
    add_run_dir(parser)
    parser.epilog = (
        "Any setting of the services can be given as a variable: MIDSTREAM_MAX_BATCH_SIZE=64 midstream up. "
        "`python -m scheduler --help` lists those of the scheduler, and so on."
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    topology = Topology(
        arguments.model,
        arguments.routers,
        arguments.detokenizers,
        arguments.workers,
        arguments.tensor_parallel,
        arguments.pipeline_parallel,
    )
    console = Console(highlight=False)
    if arguments.detach:
        return _run_detached(arguments, console)
    prepare_model(topology.model, console)
    return asyncio.run(_run(topology, RunDir(arguments.run_dir), console))


def prepare_model(model: str, console: Console) -> None:
    """Opens the model before the services do, so that the wait for the first preparation has a name.

    Raises:
        ConfigError: It is not there, or is damaged.
    """
    with console.status(f"Opening the model {model}"):
        open_model_folder(model)


def how_to_talk(state: RunState) -> str:
    """Where a running service is, and what to type next."""
    routers = state.of_kind("router")
    grpc = ", ".join(router.addresses["grpc"] for router in routers)
    http = ", ".join(f"http://{router.addresses['http']}" for router in routers)
    return (
        f"[bold]Midstream serves {state.model}[/bold]: gRPC {grpc}, HTTP {http}\n"
        '  midstream generate "What is the capital of France?"\n'
        "  midstream chat\n"
        f"  midstream top   (or http://{routers[0].addresses['http']}/dashboard)"
    )


async def _run(topology: Topology, run_dir: RunDir, console: Console) -> int:
    stop, ready = asyncio.Event(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(RunDisplay(console))
        supervisor = Supervisor(
            run_dir, topology.model, plan_processes(topology, journal_path=run_dir.journal_path), display.show
        )

        def on_signal() -> None:
            if stop.is_set():
                supervisor.kill()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        running = asyncio.create_task(supervisor.run(stop, ready))
        first_ready = asyncio.create_task(ready.wait())
        await asyncio.wait((running, first_ready), return_when=asyncio.FIRST_COMPLETED)
        first_ready.cancel()
        if ready.is_set():
            stack.pop_all().close()
            console.print(how_to_talk(supervisor.state))
            console.print("Ctrl-C stops it.", style="dim")
        await running
    console.print("Stopped.", style="dim")
    return 0


def _run_detached(arguments: argparse.Namespace, console: Console) -> int:
    run_dir = RunDir(arguments.run_dir)
    run_dir.acquire()  # refuses at once when something runs here
    run_dir.release()
    command = python_command("midstream.cli", "up", "--run-dir", str(run_dir.path), "--model", arguments.model)
    for part in ("routers", "detokenizers", "workers", "tensor-parallel", "pipeline-parallel"):
        command += [f"--{part}", str(getattr(arguments, part.replace("-", "_")))]
    prepare_model(arguments.model, console)
    log = run_dir.logs / "supervisor.log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=python_environment(),
        )
    try:
        state = _wait_until_ready(run_dir, supervisor, console)
    except KeyboardInterrupt:
        supervisor.terminate()
        raise
    if state is None:
        raise ExecutionError(why_not_started(log, supervisor.returncode))
    console.print(how_to_talk(state))
    console.print("`midstream status` shows it, `midstream down` stops it.", style="dim")
    return 0


def why_not_started(log: Path, status: int | None) -> str:
    """Return what a supervisor that ended left as the reason; a full disk takes no log."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
    if text:
        return f"it did not start; {log} ends with\n{text}"
    free = shutil.disk_usage(log.parent).free
    return (
        f"it did not start (exit status {status}) and could write no reason to {log}; "
        f"{free >> 20} MiB are free there; --run-dir names another folder"
    )


def _wait_until_ready(run_dir: RunDir, supervisor: subprocess.Popen[bytes], console: Console) -> RunState | None:
    with RunDisplay(console) as display:
        while supervisor.poll() is None:
            state = run_dir.read_state()
            if state is not None and state.supervisor_pid == supervisor.pid:
                display.show(state)
                if state.phase is ProcessPhase.READY:
                    return state
            time.sleep(_POLL_INTERVAL_S)
    return None
