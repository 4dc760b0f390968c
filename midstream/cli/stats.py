"""`midstream stats`: show statistics of the scheduler's iterations, with TensorRT-LLM's names."""

from __future__ import annotations

import argparse
import asyncio
import json

from rich.console import Console
from rich.table import Table

from midstream.cli.connect import add_connection, open_client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="Show iterations as they complete, until Ctrl-C.")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="With --follow, minimum number of seconds between iterations shown. [1]",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, one object per line.")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(_show(arguments))
    return 0


async def _show(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    interval_ms = max(0, round(arguments.interval * 1000))
    async with open_client(arguments) as client:
        async for values in client.iteration_stats(follow=arguments.follow, min_interval_ms=interval_ms):
            stats = _with_numbers(values)
            if arguments.json:
                print(json.dumps(stats), flush=True)
            else:
                console.print(_table(stats))


def _with_numbers(values: dict[str, object]) -> dict[str, object]:
    """Convert 64-bit integers, which protobuf's JSON writes as strings; timestamp and group remain strings."""
    for name, value in values.items():
        if isinstance(value, dict):
            _with_numbers(value)
        elif isinstance(value, str) and name not in ("timestamp", "groupId"):
            values[name] = int(value)
    return values


def _table(stats: dict[str, object]) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in stats.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                table.add_row(f"{name}.{inner}", _text(number))
        else:
            table.add_row(name, _text(value))
    return table


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
