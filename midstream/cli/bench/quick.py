"""`midstream bench --quick`: compare the service with this machine's limits.

A single stream reads all weights for each token, so memory bandwidth limits it. Concurrent streams share each read of
the weights, so the speed of matrix multiplication limits them too.
"""

from __future__ import annotations

import argparse
import asyncio
import random

from rich.console import Console
from rich.table import Table

from midstream.cli.bench.measure import run_workload
from midstream.cli.bench.report import Summary, print_failures, summarize
from midstream.cli.bench.workloads import uniform
from midstream.cli.connect import open_client, router_addresses
from midstream.cli.credentials import credentials_of
from midstream.cli.machine import Machine, ask_machine
from midstream.cli.run_dir import RunDir
from midstream.model.folder import ModelFolder, open_model_folder

_NUM_STREAMS = 16
_NUM_PROMPT_TOKENS, _NUM_TOKENS = 64, 48


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if a request failed. The comparison requires that the service runs on this machine."""
    console = Console(highlight=False)
    asyncio.run(_check(arguments))  # measuring the machine takes a while
    with console.status("Measuring this machine"):
        machine = ask_machine(with_limits=True)
    with console.status("Measuring the service"):
        one, many = asyncio.run(_measure(arguments))
    state = None if arguments.address else RunDir(arguments.run_dir).read_state()
    model = open_model_folder(state.model) if state is not None else None
    console.print(table_of(machine, model, one, many))
    print_failures((one, many), console)
    return 1 if one.num_failed or many.num_failed else 0


async def _check(arguments: argparse.Namespace) -> None:
    """Raise UnavailableError if no service responds."""
    async with open_client(arguments) as client:
        await client.model_info()


async def _measure(arguments: argparse.Namespace) -> tuple[Summary, Summary]:
    addresses, credentials = router_addresses(arguments), credentials_of(arguments)
    dice = random.Random(arguments.seed)
    workloads = [
        uniform(dice, width, _NUM_PROMPT_TOKENS, _NUM_TOKENS, width)
        for width in (1, 1, _NUM_STREAMS)  # one request to warm up
    ]
    results = [await run_workload(addresses, workload, credentials=credentials) for workload in workloads]
    return summarize(results[1]), summarize(results[2])


def table_of(machine: Machine, model: ModelFolder | None, one: Summary, many: Summary) -> Table:
    """Return a table of limits and measurements. Limits that depend on the model are left out if it is None."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(no_wrap=True)
    for column in ("measured", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column()
    kind = machine.gpus[0] if machine.gpus else f"{machine.threads} cores, {machine.kernels or 'no'} kernels"
    table.add_row("machine", "", "", kind)
    table.add_row("memory, read", "", f"{machine.read_bytes_per_s / 1e9:.1f} GB/s", "")
    table.add_row("matrix multiplication", "", f"{machine.flops_per_s / 1e9:,.0f} GFLOP/s", "float32")
    token_s = one.inter_token_ms[0] / 1e3
    rate = 1 / token_s if token_s else 0.0
    limit, share = "", ""
    if model is not None:
        num_bytes = sum(file.stat().st_size for file in model.weight_files)
        most = machine.read_bytes_per_s / num_bytes
        limit = f"{most:.0f} tokens/s"
        share = f"{rate / most:.0%} of reading {num_bytes / 1e6:,.0f} MB of weights per token"
    table.add_row("one stream", f"{rate:.1f} tokens/s", limit, share)
    gain = many.tokens_per_s / rate if rate else 0.0
    table.add_row(f"{_NUM_STREAMS} streams", f"{many.tokens_per_s:.1f} tokens/s", "", f"{gain:.1f} times one stream")
    table.add_row("first token", f"{one.ttft_ms[0]:.0f} ms", "", f"one stream, {_NUM_PROMPT_TOKENS} prompt tokens")
    return table
