"""`midstream status`: show the running processes with address, uptime and health."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast

import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.cli.credentials import Credentials, add_credentials, credentials_of
from midstream.cli.health import probe_health
from midstream.cli.run_dir import (
    ProcessPhase,
    ProcessState,
    RunDir,
    RunState,
    is_alive,
    not_running,
    orphans,
    run_dir_flag,
)
from midstream.cli.up import add_run_dir
from midstream.kind_names import kind_name
from midstream.rpc.channel import open_channel
from protos import loads_pb2, scheduler_pb2_grpc

_TIMEOUT_S = 2.0
UNSUPERVISED = (
    "The supervisor has ended; these processes still serve, but are no longer restarted. `midstream up{flag}` "
    "replaces them and keeps the journal; `midstream down{flag}` stops them."
)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Current state of one process.

    Attributes:
        health: `serving`, or the problem.
        epoch: Epoch of a scheduler or worker.
        worker_kind: Name of a worker's kind (protos/kind.proto).
    """

    process: ProcessState
    health: str
    epoch: int | None
    worker_kind: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_credentials(parser)
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if no service is running."""
    run_dir = RunDir(arguments.run_dir)
    state = run_dir.read_state()
    is_supervised = run_dir.is_supervised()
    if state is None or not (is_supervised or orphans(state)):
        print(json.dumps({"running": False, "processes": []}) if arguments.json else not_running(run_dir.path))
        return 1
    statuses = asyncio.run(_ask_all(state, credentials_of(arguments)))
    if arguments.json:
        print(json.dumps(_to_json(run_dir, state, statuses, is_supervised), indent=2))
    else:
        console = Console(highlight=False)
        console.print(_table(statuses))
        if not is_supervised:
            console.print(UNSUPERVISED.format(flag=run_dir_flag(run_dir.path)), style="red", markup=False)
        console.print(
            f"{state.model}, {state.phase}; logs in {run_dir.logs}", style="dim", markup=False, soft_wrap=True
        )
    return 0


async def _ask_all(state: RunState, credentials: Credentials) -> list[ProcessStatus]:
    healths = asyncio.gather(*(_ask_health(item) for item in state.processes))
    schedulers = state.of_kind("scheduler")
    answers = await asyncio.gather(*(_ask_scheduler(scheduler, credentials) for scheduler in schedulers))
    epochs = {scheduler.name: epoch for scheduler, (epoch, _) in zip(schedulers, answers, strict=True)}
    groups = {name: group for _, found in answers for name, group in found.items()}
    return [
        _status(process, health, epochs, groups) for process, health in zip(state.processes, await healths, strict=True)
    ]


def _status(
    process: ProcessState,
    health: str,
    epochs: dict[str, int | None],
    groups: dict[str, loads_pb2.WorkerGroupInfo],
) -> ProcessStatus:
    group = groups.get(process.name)
    if group is None:
        return ProcessStatus(process, health, epochs.get(process.name))
    if group.held_off and health == "serving":
        health = f"held off: {group.held_off}"
    return ProcessStatus(process, health, group.epoch, kind_name(group.kind))


async def _ask_health(process: ProcessState) -> str:
    if not is_alive(process):
        return str(process.phase if process.phase is not ProcessPhase.READY else ProcessPhase.STOPPED)
    problem = await probe_health(process.addresses["http"])
    if problem and process.phase is ProcessPhase.STARTING:
        return process.detail or "starting"
    return problem or "serving"


async def _ask_scheduler(
    scheduler: ProcessState, credentials: Credentials
) -> tuple[int | None, dict[str, loads_pb2.WorkerGroupInfo]]:
    """Return a scheduler's epoch and its worker groups by process name; nothing if the scheduler does not answer."""
    async with open_channel(scheduler.addresses["grpc"], **credentials) as channel:
        stub = cast("scheduler_pb2_grpc.SchedulerAsyncStub", scheduler_pb2_grpc.SchedulerStub(channel))
        try:
            info = await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None, {}
    return info.scheduler_epoch, {group.group_id: group for group in info.worker_groups}


def _table(statuses: list[ProcessStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "pid", "health", "up", "restarts", "addresses and epoch"):
        # Long reasons wrap, but addresses do not, since users copy them.
        is_reason = column == "health"
        table.add_column(column, no_wrap=not is_reason, overflow="fold", min_width=7 if is_reason else None)
    for status in statuses:
        process = status.process
        style = "green" if status.health == "serving" else "red"
        table.add_row(
            process.name,
            str(process.pid or "-"),
            Text(status.health, style=style),
            f"{time.time() - process.started_unix_s:.0f} s" if process.pid else "-",
            str(process.num_restarts),
            Text(
                "\n".join(
                    [f"{protocol} {address}" for protocol, address in process.addresses.items()]
                    + ([f"epoch {status.epoch}"] if status.epoch else [])
                    + ([f"kind {status.worker_kind}"] if status.worker_kind else [])
                )
            ),
        )
    return table


def _to_json(run_dir: RunDir, state: RunState, statuses: list[ProcessStatus], is_supervised: bool) -> dict[str, object]:
    return {
        "running": True,
        "supervised": is_supervised,
        "phase": state.phase,
        "model": state.model,
        "run_dir": str(run_dir.path),
        "supervisor_pid": state.supervisor_pid,
        "processes": [
            {
                "name": status.process.name,
                "kind": status.process.kind,
                "pid": status.process.pid,
                "addresses": status.process.addresses,
                "epoch": status.epoch,
                "worker_kind": status.worker_kind,
                "health": status.health,
                "num_restarts": status.process.num_restarts,
                "started_unix_s": status.process.started_unix_s,
                "log": status.process.log,
            }
            for status in statuses
        ],
    }
