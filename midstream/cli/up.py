"""`midstream up`: run a service on this machine, with a process for each of its components."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from midstream.cli.api_keys import use_api_keys
from midstream.cli.display import RunDisplay
from midstream.cli.run_dir import ProcessPhase, RunDir, RunState, default_run_dir, run_dir_flag
from midstream.cli.supervisor import HURRIED_STOP_S, Supervisor
from midstream.cli.topology import MAX_SHARING_CORES, SHARED_PROCESS, Topology, check_ports, file_name, plan_processes
from midstream.config import API_KEY_VARIABLE, KNOWN_SETTINGS, RouterConfig, check_environment, parse_config
from midstream.errors import ConfigError, ExecutionError
from midstream.model.folder import EMBEDDED_MODEL, open_model_folder
from midstream.model.hub import download, is_hub_name
from midstream.python_process import python_command, python_environment
from midstream.security.host_header import is_loopback

_POLL_INTERVAL_S = 0.1
# Flag of a command that starts a service -> the field of Topology that it sets.
_TOPOLOGY = {
    "host": "host",
    "port": "port",
    "http_port": "http_port",
    "routers": "num_routers",
    "detokenizers": "num_detokenizers",
    "workers": "num_workers",
    "prefill_workers": "num_prefill_workers",
    "tensor_parallel": "tensor_parallel",
    "pipeline_parallel": "pipeline_parallel",
    "served_model_name": "served_model_name",
    "share_ports": "shares_ports",
    "shared_process": "shared_process",
}
MODEL_HELP = "Folder, .gguf file, or name on the Hugging Face Hub (ORG/NAME)."


def add_run_dir(parser: argparse._ActionsContainer) -> None:
    default = default_run_dir()
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=default,
        help=f"Directory for state and logs; one service per directory. [{default}]",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help=f"{MODEL_HELP} Repeatable: several models share the routers; NAME=MODEL sets one's name in the API. "
        "[smollm2, embedded]",
    )
    add_service_flags(parser)


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that start a service, except for the model."""
    parser.add_argument("--revision", default="", help="Branch, tag or commit of a model on the Hugging Face Hub.")
    parser.add_argument(
        "--host", metavar="ADDRESS", help="Address on which routers listen. [MIDSTREAM_HOST, 127.0.0.1]"
    )
    parser.add_argument("--port", type=int, metavar="N", help="gRPC port; 0: any free one. [MIDSTREAM_PORT, 50051]")
    parser.add_argument(
        "--http-port", type=int, metavar="N", help="HTTP port; 0: any free one. [MIDSTREAM_HTTP_PORT, 8000]"
    )
    parser.add_argument(
        "--served-model-name", default="", metavar="NAME", help="Model name in the API. [the model's own name]"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="Require clients to send this key as a bearer token; repeatable. [MIDSTREAM_API_KEY]",
    )
    parser.add_argument("--routers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument(
        "--share-ports",
        action="store_true",
        help="All routers listen on --port and --http-port, and each also on its own ports.",
    )
    parser.add_argument(
        "--shared-process",
        choices=SHARED_PROCESS,
        default="auto",
        help="Whether the scheduler, the first detokenizer and the first router share a process, which takes less "
        f"processor time and memory; auto: with one of each and at most {MAX_SHARING_CORES} cores. [auto]",
    )
    parser.add_argument("--detokenizers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument(
        "--memory-split",
        default="",
        metavar="N,N,...",
        help="With several models: how they share the memory for KV blocks and the cores, such as 2,1. [equally]",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="Number of workers, which share the cores. [1]"
    )
    parser.add_argument(
        "--prefill-workers",
        type=int,
        default=0,
        metavar="N",
        help="Number of workers that compute prompts, while the others generate; 0: each does both. [0]",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="Tensor parallel ranks. [1]")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="Pipeline stages. [1]")
    parser.add_argument(
        "--detach", action="store_true", help="Return once the service is ready; `midstream down` stops it."
    )
    add_run_dir(parser)
    parser.epilog = (
        "Any service setting can be set by a variable: MIDSTREAM_MAX_BATCH_SIZE=64 midstream up. `midstream "
        "scheduler --help` lists those of the scheduler, and likewise for the other services. Only routers listen "
        "on --host; all other processes use the loopback address."
    )


def run(arguments: argparse.Namespace) -> int:
    check_environment(os.environ)
    named = named_models(arguments.model or [EMBEDDED_MODEL])
    shares = memory_shares(arguments.memory_split, len(named))
    for flag, value in (("--served-model-name", arguments.served_model_name), ("--revision", arguments.revision)):
        if value and len(named) > 1:
            raise ConfigError("is for one model; with several, use NAME=MODEL and ORG/NAME@REVISION", field=flag)
    if len(named) > 1 and os.environ.get("MIDSTREAM_JOURNAL", "log") == "postgres":
        raise ConfigError("schedulers of several models cannot share a database; use log", field="MIDSTREAM_JOURNAL")
    topology = _topology(arguments, named[0][1])
    run_dir, console = RunDir(arguments.run_dir), Console(highlight=False)
    run_dir.acquire()  # fails immediately if a service is running here
    run_dir.release()
    check_ports(topology)
    shown = ", ".join(name or model for name, model in named)
    if len(named) == 1:
        [(name, model)] = named
        path = prepare_model(f"{model}@{arguments.revision}" if arguments.revision else model, console)
        topology = dataclasses.replace(topology, model=path, served_model_name=topology.served_model_name or name)
    else:
        paths = [prepare_model(model, console) for _, model in named]
        names = [name or open_model_folder(path).name for (name, _), path in zip(named, paths, strict=True)]
        if len({file_name(name) for name in names}) < len(names):
            raise ConfigError("two models have the same name; use NAME=MODEL", field="--model")
        models = {name: (path, share) for name, path, share in zip(names, paths, shares, strict=True)}
        topology, shown = dataclasses.replace(topology, models=models), ", ".join(names)
    # The services have their keys in a file, and do not accept the variable.
    key = os.environ.pop(API_KEY_VARIABLE, "")
    os.environ.update(use_api_keys(run_dir, arguments.api_key or [key] * bool(key), os.environ))
    if not is_loopback(topology.host) and os.environ.get("MIDSTREAM_AUTH", "none") == "none":
        console.print(
            f"Routers listen on {topology.host} without authentication; use --api-key to require a key.", style="yellow"
        )
    if arguments.detach:
        return _run_detached(shown, topology, arguments.memory_split, run_dir, console)
    return asyncio.run(_run(shown, topology, run_dir, console))


def named_models(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name, empty if there is none, and the model of each word MODEL or NAME=MODEL."""
    found = []
    for word in words:
        name, mark, model = word.partition("=")
        is_named = mark and name and "/" not in name and not Path(word).exists()
        found.append((name, model) if is_named else ("", word))
    return found


def memory_shares(text: str, num_models: int) -> list[float]:
    """Return the share of each model, of which the sum is 1, from `--memory-split`. Raises ConfigError if the text is
    not a positive number for each model.
    """
    words = text.split(",") if text else ["1"] * num_models
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != num_models or not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{text!r} must be {num_models} positive numbers, one for each model", field="--memory-split")
    return [number / sum(numbers) for number in numbers]


def _topology(arguments: argparse.Namespace, model: str) -> Topology:
    settings = parse_config(RouterConfig, (), os.environ, program="router", known=KNOWN_SETTINGS)
    values = {name: getattr(arguments, flag) for flag, name in _TOPOLOGY.items()}
    values |= {name: getattr(settings, name) for name in ("host", "port", "http_port") if values[name] is None}
    return Topology(model, **values)


def prepare_model(model: str, console: Console) -> str:
    """Open the model before the services do, so that the progress of a download or of the first preparation is visible.

    Returns:
        The model as services open it; if it comes from the Hub, this is its folder.

    Raises:
        ConfigError: The model does not exist or is damaged.
    """
    if is_hub_name(model):
        model = str(download(model))
    with console.status(f"Opening the model {escape(model)}"):
        open_model_folder(model)
    return model


def how_to_talk(state: RunState, run_dir: Path) -> str:
    """Return a text with the service's addresses and commands to try next."""
    routers = state.of_kind("router")
    grpc, http = (
        list(dict.fromkeys(router.addresses.get(f"shared {name}", router.addresses[name]) for router in routers))
        for name in ("grpc", "http")
    )
    flag, calls = escape(run_dir_flag(run_dir)), escape(", ".join(grpc))
    pages = [escape(f"http://{address}") for address in http]
    return (
        f"[bold]Midstream serves {escape(state.model)}[/bold]: gRPC {calls}, HTTP {', '.join(pages)}\n"
        f'  midstream generate{flag} "What is the capital of France?"\n'
        f"  midstream chat{flag}   (or {pages[0]}/)\n"
        f"  midstream top{flag}   (or {pages[0]}/dashboard)"
    )


async def _run(name: str, topology: Topology, run_dir: RunDir, console: Console) -> int:
    stop, ready = asyncio.Event(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(RunDisplay(console))
        specs = plan_processes(topology, journal_path=run_dir.journal_path, models_file=run_dir.models)
        supervisor = Supervisor(run_dir, name, specs, display.show)

        def on_signal(number: signal.Signals) -> None:
            if stop.is_set():
                supervisor.kill()
            elif number is signal.SIGINT:
                supervisor.hurry()
            stop.set()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup, it stays ignored
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        running = asyncio.create_task(supervisor.run(stop, ready))
        first_ready = asyncio.create_task(ready.wait())
        await asyncio.wait((running, first_ready), return_when=asyncio.FIRST_COMPLETED)
        first_ready.cancel()
        if ready.is_set():
            stack.pop_all().close()
            console.print(how_to_talk(supervisor.state, run_dir.path), soft_wrap=True)
            console.print(
                f"Ctrl-C stops it and gives open streams {HURRIED_STOP_S:.0f} s; requests continue at the next start.",
                style="dim",
                soft_wrap=True,
            )
        await running
    console.print("Stopped.", style="dim")
    return 0


def _run_detached(name: str, topology: Topology, memory_split: str, run_dir: RunDir, console: Console) -> int:
    command = python_command("midstream.cli", "up", "--run-dir", str(run_dir.path))
    models = [f"{own}={model}" for own, (model, _) in topology.models.items()] or [topology.model]
    command += [word for model in models for word in ("--model", model)]
    command += ["--memory-split", memory_split]
    for flag, field in _TOPOLOGY.items():
        option, value = f"--{flag.replace('_', '-')}", getattr(topology, field)
        command += ([option] if value else []) if isinstance(value, bool) else [option, str(value)]
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
        supervisor.wait()  # otherwise the next start would find the directory in use
        raise
    if state is None:
        last = run_dir.read_state()
        if last is not None and last.supervisor_pid == supervisor.pid and last.error:
            raise ExecutionError(last.error)
        raise ExecutionError(why_not_started(log, supervisor.returncode))
    console.print(how_to_talk(dataclasses.replace(state, model=name), run_dir.path), soft_wrap=True)
    flag = escape(run_dir_flag(run_dir.path))
    console.print(f"`midstream status{flag}` shows it, `midstream down{flag}` stops it.", style="dim", soft_wrap=True)
    return 0


def why_not_started(log: Path, status: int | None) -> str:
    """Return why the supervisor ended, according to its log, which may be incomplete if the disk is full."""
    text = log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
    if text:
        return f"the service did not start; {log} ends with\n{text}"
    free = shutil.disk_usage(log.parent).free
    return (
        f"the service did not start (exit status {status}) and could not write to {log}; "
        f"{free >> 20} MiB are free there; choose another directory with --run-dir"
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
