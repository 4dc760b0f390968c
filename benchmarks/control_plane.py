"""Measure the throughput of everything except the model: `python -m benchmarks.control_plane [--streams 256] [--profile
router]`.

Starts a router, a detokenizer, a scheduler and a fake worker as separate processes, streams many requests concurrently
from this process, and prints tokens per second and CPU time per token of each process. `--profile` samples one process
with py-spy and writes a flame graph.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from midstream.cli.bench.measure import RunResult, run_workload
from midstream.cli.bench.workloads import BenchRequest, Workload
from midstream.client import AsyncClient
from midstream.errors import MidstreamError
from midstream.model.folder import open_model_folder
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 60.0


def main() -> int:
    """Run the benchmark; fail if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="Concurrent requests. [256]")
    parser.add_argument("--tokens", type=int, default=512, help="Output tokens per request. [512]")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--detokenizers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0, help="Duration of a fake step in ms. [0]")
    parser.add_argument("--scheduler-flags", default="", help="Additional flags of the scheduler. [--journal off]")
    parser.add_argument(
        "--profile", default="", help="Process to sample with py-spy: router, detokenizer, scheduler, client."
    )
    arguments = parser.parse_args()
    console = Console()
    with start_parts(arguments) as (parts, address):
        result, spent = asyncio.run(measure(arguments, parts, address, console))
    errors = [request.error for request in result.requests if request.error]
    report(result, spent, console)
    if errors:
        console.print(f"[red]{len(errors)} requests failed: {errors[0]}")
    return 1 if errors else 0


@contextlib.contextmanager
def start_parts(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, psutil.Process], list[str]]]:
    """Run the processes; yield them by name, and the addresses of the routers."""
    ports = free_ports(2 + arguments.routers + arguments.detokenizers)
    scheduler, worker, *rest = ports
    routers, detokenizers = rest[: arguments.routers], rest[arguments.routers :]
    folder = open_model_folder("smollm2")
    commands = {
        "scheduler": f"-m scheduler --port {scheduler} --worker-port {worker} --max-batch-size {arguments.streams} "
        f"{arguments.scheduler_flags or '--journal off'}",
        "fake worker": f"-m tests.fakes.worker --scheduler tcp://127.0.0.1:{worker} --step-ms {arguments.step_ms} "
        f"--model-fingerprint {folder.fingerprint} --vocab-size {folder.vocab_size} --num-blocks 65536 "
        f"--max-batch-size {arguments.streams}",
    }
    for number, port in enumerate(detokenizers):
        commands[f"detokenizer {number}"] = f"-m detokenizer --port {port} --schedulers 127.0.0.1:{scheduler}"
    targets = ",".join(f"127.0.0.1:{port}" for port in detokenizers)
    for number, port in enumerate(routers):
        commands[f"router {number}"] = (
            f"-m router --port {port} --http-port 0 --schedulers 127.0.0.1:{scheduler} --detokenizers {targets}"
        )
    processes: dict[str, psutil.Process] = {}
    popens = []
    try:
        for name, command in commands.items():
            quiet = [] if name == "fake worker" else ["--log-level", "warning"]
            popen = subprocess.Popen([sys.executable, *command.split(), *quiet], cwd=ROOT)
            popens.append(popen)
            processes[name] = psutil.Process(popen.pid)
        yield processes, [f"127.0.0.1:{port}" for port in routers]
    finally:
        for popen in popens:
            popen.kill()
            popen.wait()


async def measure(
    arguments: argparse.Namespace, parts: dict[str, psutil.Process], addresses: list[str], console: Console
) -> tuple[RunResult, dict[str, float]]:
    """Return the run, and the CPU seconds that each process used during it."""
    async with AsyncClient(addresses) as client:
        await wait_until_whole(client)
    generator = random.Random(0)
    requests = tuple(
        BenchRequest(tuple(generator.randrange(300, 49_000) for _ in range(32)), arguments.tokens)
        for _ in range(arguments.streams)
    )
    warm_up = Workload("warm-up", tuple(BenchRequest(request.token_ids, 8) for request in requests), arguments.streams)
    await run_workload(addresses, warm_up)
    everything = {**parts, "client": psutil.Process(os.getpid())}
    sampling = start_profile(arguments.profile, everything)
    before = {name: cpu_seconds(process) for name, process in everything.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("tokens", total=arguments.streams * arguments.tokens)
        received = 0

        def count(num_tokens: int) -> None:
            nonlocal received
            received += num_tokens

        async def show() -> None:
            while True:
                progress.update(task, completed=received)
                await asyncio.sleep(0.25)

        showing = asyncio.create_task(show())
        result = await run_workload(addresses, Workload("control plane", requests, arguments.streams), on_tokens=count)
        showing.cancel()
        progress.update(task, completed=received)
    spent = {name: cpu_seconds(process) - before[name] for name, process in everything.items()}
    if sampling is not None:
        sampling.wait()
    return result, spent


async def wait_until_whole(client: AsyncClient) -> None:
    """Return once every component is ready."""
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while not await _is_whole(client):
        if time.monotonic() > give_up_at:
            raise TimeoutError("the service did not start")
        await asyncio.sleep(0.1)


async def _is_whole(client: AsyncClient) -> bool:
    try:
        info = await client.server_info()
    except MidstreamError:
        return False
    return bool(info.worker_groups and info.detokenizers)


def start_profile(name: str, parts: dict[str, psutil.Process]) -> subprocess.Popen[bytes] | None:
    """Profile the first process with that name for the given number of seconds."""
    if not name:
        return None
    process = next(process for part, process in parts.items() if part.startswith(name))
    output = f"/tmp/control-plane-{name}.txt"
    command = ["py-spy", "record", "-d", "5", "-r", "500", "-f", "raw", "-o", output, "-p", str(process.pid)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def report(result: RunResult, spent: dict[str, float], console: Console) -> None:
    """Print the throughput, and the CPU time that each process spent."""
    num_tokens = sum(request.num_tokens for request in result.requests)
    num_chunks = sum(len(request.arrivals) for request in result.requests)
    table = Table("part", "CPU s", "of a core", "µs per token")
    for name, seconds in spent.items():
        share = f"{seconds / result.duration_s:.0%}"
        table.add_row(name, f"{seconds:.2f}", share, f"{seconds / max(num_tokens, 1) * 1e6:.1f}")
    total = sum(spent.values())
    table.add_row("all", f"{total:.2f}", f"{total / result.duration_s:.0%}", f"{total / max(num_tokens, 1) * 1e6:.1f}")
    console.print(table)
    console.print(
        f"{len(result.requests)} streams, {num_tokens} tokens in {result.duration_s:.2f} s: "
        f"[bold]{num_tokens / result.duration_s:,.0f} tok/s[/bold], {num_tokens / max(num_chunks, 1):.2f} tokens per "
        "chunk"
    )


def cpu_seconds(process: psutil.Process) -> float:
    """Return the user and system time used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
