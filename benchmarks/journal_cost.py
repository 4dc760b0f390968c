"""Measure the cost of the journal: `python -m benchmarks.journal_cost [--step-ms 20] [--rounds 5]`.

Streams many requests through the service with a fake worker, without a journal and with the log in turn.
Prints the ratio of the throughput with a journal to the throughput without (median and range over the rounds), and the
CPU time that the journal adds per token, which depends less on other work on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.control_plane import measure, start_parts


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="Concurrent requests. [64]")
    parser.add_argument("--tokens", type=int, default=256, help="Output tokens per request. [256]")
    parser.add_argument(
        "--step-ms", type=float, default=20.0, help="Duration of a fake step in ms; 0 is the worst case. [20]"
    )
    parser.add_argument("--rounds", type=int, default=5, help="Runs of each kind. [5]")
    parser.add_argument("--folder", type=Path, default=None, help="Folder for the journal. [temporary]")
    arguments = parser.parse_args()
    arguments.routers = arguments.detokenizers = 1
    arguments.profile = ""
    console = Console()
    kinds = ["off", "log"]
    rounds = []
    for number in range(arguments.rounds):
        # Alternate the order, because processor temperature and clock rate drift.
        turn = number % len(kinds)
        runs = {kind: run(arguments, kind, console) for kind in kinds[turn:] + kinds[:turn]}
        rounds.append(runs)
        console.print(
            f"round {number + 1}: "
            + "; ".join(f"{kind} {rate:,.0f} tok/s, {spent:.1f} µs" for kind, (rate, spent) in sorted(runs.items()))
        )
    for kind in kinds[1:]:
        ratios = [runs[kind][0] / runs["off"][0] for runs in rounds]
        added = [runs[kind][1] - runs["off"][1] for runs in rounds]
        console.print(
            f"{kind}: [bold]{statistics.median(ratios):.3f}[/bold] of the throughput "
            f"({min(ratios):.3f}–{max(ratios):.3f}); [bold]{statistics.median(added):.1f}[/bold] µs more CPU time of "
            "the scheduler per token"
        )
    return 0


def run(arguments: argparse.Namespace, kind: str, console: Console) -> tuple[float, float]:
    """Return output tokens per second of one run, and the scheduler's CPU time per token in microseconds."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.scheduler_flags = f"--journal {kind} --journal-path {folder}/journal"
        with start_parts(arguments) as (parts, addresses):
            result, spent = asyncio.run(measure(arguments, parts, addresses, console))
    errors = [request.error for request in result.requests if request.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    num_tokens = sum(request.num_tokens for request in result.requests)
    return num_tokens / result.duration_s, spent["scheduler"] / num_tokens * 1e6


if __name__ == "__main__":
    sys.exit(main())
