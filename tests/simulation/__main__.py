"""Run seeds manually.

python -m tests.simulation --seed 17                    run one seed, always with the same result
python -m tests.simulation --seed 17 --trace            print every message as well
python -m tests.simulation --seeds 0..50000             run many seeds in two processes
python -m tests.simulation --seeds 0..1000 --all-kv     give all runs prefill and decode workers and tiers
python -m tests.simulation --seeds 0..1000 --shared     run scheduler, detokenizer and router in one process
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from rich.console import Console
from rich.progress import Progress

from tests.simulation.run import Outcome, begin_many_seeds, run_seed

_NUM_PROCESSES = 2
_CHUNK = 25
_MOST_PROBLEMS = 8


def main() -> int:
    """Run the seeds; return 0 if every seed passes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Run the components in virtual time."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="Run this seed.")
    which.add_argument("--seeds", type=_range, metavar="A..B", help="Run the seeds from A to B, excluding B.")
    parser.add_argument("--trace", action="store_true", help="Print every event of the seed.")
    parser.add_argument("--no-faults", action="store_true", help="Run only the requests of the seed, without faults.")
    parser.add_argument("--all-kv", action="store_true", help="Give all workers roles and tiers.")
    parser.add_argument("--shared", action="store_true", help="Run scheduler, detokenizer and router in one process.")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="Start no more seeds after this time.")
    arguments = parser.parse_args()
    if arguments.seeds is not None:
        return _run_many(arguments.seeds, arguments.limit_s, all_kv=arguments.all_kv, is_shared=arguments.shared)
    outcome = run_seed(
        arguments.seed,
        faults=not arguments.no_faults,
        trace=arguments.trace,
        all_kv=arguments.all_kv,
        is_shared=arguments.shared,
    )
    for line in outcome.trace:
        print(line)
    print(f"seed {outcome.seed}: {outcome.name}, {outcome.num_messages} messages in {outcome.virtual_s:.3f} s")
    print(f"faults: {dict(outcome.happened)}")
    if outcome.problems:
        print(describe(outcome))
    return 1 if outcome.problems else 0


def _range(text: str) -> range:
    first, _, end = text.partition("..")
    return range(int(first), int(end))


def _run_many(seeds: range, limit_s: float, *, all_kv: bool, is_shared: bool) -> int:
    happened, failed, begun = Counter[str](), list[Outcome](), time.monotonic()
    num_done = num_messages = 0
    virtual_s = 0.0
    console = Console()
    with (
        multiprocessing.get_context("spawn").Pool(_NUM_PROCESSES, begin_many_seeds) as pool,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("seeds", total=len(seeds))
        run = partial(run_seed, all_kv=all_kv, is_shared=is_shared)
        for outcome in pool.imap_unordered(run, _until(seeds, begun + limit_s), _CHUNK):
            num_done += 1
            num_messages += outcome.num_messages
            virtual_s += outcome.virtual_s
            happened.update(outcome.happened)
            progress.advance(task)
            if outcome.problems:
                failed.append(outcome)
                console.print(describe(outcome), highlight=False, markup=False)
    console.print(f"{num_done} seeds, {len(failed)} failed, {time.monotonic() - begun:.0f} s", highlight=False)
    console.print(f"{num_messages} messages, {virtual_s:.0f} s of virtual time", highlight=False)
    console.print(", ".join(f"{name}: {count}" for name, count in sorted(happened.items())), highlight=False)
    return 1 if failed else 0


def _until(seeds: range, end: float) -> Iterator[int]:
    return itertools.takewhile(lambda _: time.monotonic() < end, seeds)


def describe(outcome: Outcome) -> str:
    """Return what failed, and the command that reproduces it."""
    flags = " --all-kv" * outcome.all_kv + " --shared" * outcome.is_shared
    lines = [f"seed {outcome.seed} ({outcome.name}) failed; python -m tests.simulation --seed {outcome.seed}{flags}"]
    return "\n  ".join(lines + outcome.problems[:_MOST_PROBLEMS])


if __name__ == "__main__":
    sys.exit(main())
