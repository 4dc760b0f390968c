"""`python -m benchmarks.peers`: installs the peers, runs all in turn, and writes what came of it into the docs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import report

from .comparisons import COMPARISONS, ratio_of
from .install import install, make_paths
from .peer import ALL_WORKLOADS, Peer
from .registry import PEERS
from .results import merged, read_results, write_results
from .rounds import Measurement, run_rounds

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the command; 1 when one of ours failed or a ratio is below what it should be."""
    arguments = _arguments()
    numbers = range(arguments.first_round, arguments.first_round + arguments.rounds)
    console = Console(highlight=False, soft_wrap=True)
    peers = [PEERS[name] for name in arguments.peer or PEERS]
    paths = make_paths(arguments.home, arguments.model)
    failed = install(peers, paths)
    if arguments.install_only:
        return 1 if failed else 0

    def on_start(number: int, peer: Peer) -> None:
        console.print(f"round {number + 1}/{numbers[-1] + 1}  {peer.label}")

    def on_done(measurement: Measurement) -> None:
        figures = measurement.figures
        console.print(f"    {figures.workload:<8} {figures.tokens_per_s:>8,.0f} tok/s  in {figures.duration_s:.1f} s")

    ready = [peer for peer in peers if peer.name not in failed]
    measurements, stopped = run_rounds(ready, arguments.workload or ALL_WORKLOADS, numbers, paths, on_done, on_start)
    failed |= stopped
    for name, reason in failed.items():
        console.print(f"{PEERS[name].label} did not run: {reason}")
    results = paths.home / "results.json"
    if arguments.add:
        measurements = merged(read_results(results), measurements)
    write_results(measurements, results)
    ratios = [ratio for comparison in COMPARISONS if (ratio := ratio_of(comparison, measurements))]
    labels = {peer.name: peer.label for peer in PEERS.values()}
    console.print(report.as_text(report.figures_table(labels, measurements)))
    console.print(report.as_text(report.ratios_table(labels, ratios)))
    if arguments.docs:
        report.write(arguments.docs, labels, measurements, ratios, failed)
        console.print(f"Written to {arguments.docs / 'benchmarks.md'}")
    is_ours_missing = any(name.startswith("midstream") for name in failed)
    return 1 if is_ours_missing or any(it.median < it.comparison.at_least for it in ratios) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--peer", action="append", choices=PEERS, help="May repeat. [all]")
    parser.add_argument("--workload", action="append", choices=ALL_WORKLOADS, help="May repeat. [all]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--first-round", type=int, default=0, help="Each round has tokens of its own. [0]")
    parser.add_argument("--add", action="store_true", help="Keep what results.json holds that is not measured again.")
    parser.add_argument("--model", default="smollm2", help="A GGUF file or its model folder. [the embedded model]")
    parser.add_argument(
        "--home", type=Path, default=ROOT / ".venv-peers", help="Where peers are installed. [.venv-peers]"
    )
    parser.add_argument("--docs", type=Path, help="Write figures, ratios and plot into this folder's benchmarks.md.")
    parser.add_argument("--install-only", action="store_true", help="Measure nothing.")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
