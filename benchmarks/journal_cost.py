"""What the journal costs: `python -m benchmarks.journal_cost [--step-ms 20] [--rounds 5]`.

Streams many requests through the whole service around a fake worker, with and without a journal in turns, and prints
throughput with it over throughput without it, the median over the rounds and their range; and the processor's time that
it adds to a token, which other work on the machine changes less.
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
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="Requests at once. [64]")
    parser.add_argument("--tokens", type=int, default=256, help="Output tokens of each. [256]")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Time of a fake step; 0 is the worst case. [20]")
    parser.add_argument("--rounds", type=int, default=5, help="Pairs of runs. [5]")
    parser.add_argument("--folder", type=Path, default=None, help="Where the journal's disk is. [temporary]")
    arguments = parser.parse_args()
    arguments.routers = arguments.detokenizers = 1
    arguments.profile = ""
    console = Console()
    ratios, added = [], []
    for number in range(arguments.rounds):
        # Whoever runs second may have it warmer or colder: take turns.
        order = (False, True) if number % 2 == 0 else (True, False)
        runs = {with_journal: run(arguments, with_journal, console) for with_journal in order}
        rates = {with_journal: rate for with_journal, (rate, _) in runs.items()}
        ratios.append(rates[True] / rates[False])
        added.append(runs[True][1] - runs[False][1])
        console.print(
            f"round {number + 1}: {rates[False]:,.0f} tok/s without, {rates[True]:,.0f} with: {ratios[-1]:.3f}; "
            f"the scheduler's processor {runs[False][1]:.1f} and {runs[True][1]:.1f} µs a token"
        )
    console.print(
        f"[bold]{statistics.median(ratios):.3f}[/bold] of the throughput ({min(ratios):.3f}–{max(ratios):.3f}); "
        f"[bold]{statistics.median(added):.1f}[/bold] µs more of processor a token"
    )
    return 0


def run(arguments: argparse.Namespace, with_journal: bool, console: Console) -> tuple[float, float]:
    """Output tokens per second of one run, and microseconds of processor that the scheduler spent on one."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        flags = f"--journal sqlite --journal-path {folder}/journal.sqlite" if with_journal else "--journal off"
        arguments.scheduler_flags = flags
        with start_parts(arguments) as (parts, addresses):
            result, spent = asyncio.run(measure(arguments, parts, addresses, console))
    errors = [request.error for request in result.requests if request.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    num_tokens = sum(request.num_tokens for request in result.requests)
    return num_tokens / result.duration_s, spent["scheduler"] / num_tokens * 1e6


if __name__ == "__main__":
    sys.exit(main())
