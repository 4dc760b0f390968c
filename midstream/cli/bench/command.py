"""`midstream bench`: benchmark a running service."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from midstream.cli.bench import quick, workloads
from midstream.cli.bench.measure import RunResult, run_workload
from midstream.cli.bench.report import check_files, plot, print_failures, summarize, summary_table, write_json
from midstream.cli.bench.workloads import Workload
from midstream.cli.connect import add_connection, router_addresses
from midstream.cli.credentials import credentials_of
from midstream.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection(parser)
    parser.add_argument(
        "--workload", action="append", choices=sorted(workloads.WORKLOADS), help="Workload to send; repeatable. [all]"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Compare the service with the limits of this machine; takes about a minute.",
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", help="Sweep: uniform requests at each of these concurrencies."
    )
    parser.add_argument("--num-prompt-tokens", type=int, default=128, help="Prompt length of a sweep. [128]")
    parser.add_argument("--max-tokens", type=int, default=128, help="Output length of a sweep. [128]")
    parser.add_argument(
        "--request-rate",
        type=float,
        help="Sweep: Poisson arrivals at this rate (requests/s) instead of a fixed concurrency.",
    )
    parser.add_argument("--repeat", type=int, default=1, help="Runs of each workload. [1]")
    parser.add_argument("--seed", type=int, default=0, help="Seed for prompts and arrival times. [0]")
    parser.add_argument("--json", type=Path, help="Write the results to this file.")
    parser.add_argument("--plot", type=Path, help="Plot tokens over time to this PNG or SVG file.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if a request failed."""
    if arguments.request_rate is not None and not 0 < arguments.request_rate < math.inf:
        raise InvalidArgumentError("must be above 0", field="--request-rate")
    for name, counts in (
        ("concurrency", arguments.concurrency or ()),
        *((name, (getattr(arguments, name),)) for name in ("num_prompt_tokens", "max_tokens", "repeat")),
    ):
        if any(count < 1 for count in counts):
            raise InvalidArgumentError("must be at least 1", field=f"--{name.replace('_', '-')}")
    check_files(arguments.json, arguments.plot)
    if arguments.quick:
        return quick.run(arguments)
    results = asyncio.run(_run_all(arguments))
    summaries = [summarize(result) for result in results]
    console = Console()
    console.print(summary_table(summaries))
    print_failures(summaries, console)
    if arguments.json:
        write_json(summaries, arguments.json)
    if arguments.plot:
        plot(results, arguments.plot)
    return 1 if any(summary.num_failed for summary in summaries) else 0


def _chosen(arguments: argparse.Namespace, seed: int) -> list[Workload]:
    if arguments.concurrency:
        return [
            workloads.uniform(random.Random(seed), 2 * width, arguments.num_prompt_tokens, arguments.max_tokens, width)
            for width in arguments.concurrency
        ]
    names = arguments.workload or list(workloads.WORKLOADS)
    return [workloads.WORKLOADS[name](random.Random(seed)) for name in names]


async def _run_all(arguments: argparse.Namespace) -> list[RunResult]:
    addresses = router_addresses(arguments)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} tokens"),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for repetition in range(arguments.repeat):
            # Use another seed for each run, since repeated prompts would hit the prefix cache.
            for workload in _chosen(arguments, arguments.seed + repetition):
                total = sum(request.max_tokens for request in workload.requests)
                task = progress.add_task(workload.name, total=total)
                results.append(
                    await run_workload(
                        addresses,
                        workload,
                        request_rate=arguments.request_rate,
                        seed=arguments.seed,
                        credentials=credentials_of(arguments),
                        on_tokens=partial(progress.advance, task),
                    )
                )
                progress.remove_task(task)
    return results
