"""`python -m benchmarks.peers`: install the peers, run them in turn, and write the results to the docs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import report

from .comparisons import COMPARISONS, ratio_of
from .install import install, make_paths
from .peer import ALL_WORKLOADS, Peer
from .registry import PEERS, QUICK_PEERS
from .results import merged, read_results, write_results
from .rounds import Measurement, run_rounds

ROOT = Path(__file__).resolve().parents[2]
FULL_MINUTES, QUICK_MINUTES = 60.0, 9.0


def main() -> int:
    """Run the command; return 1 if one of our peers failed or a ratio is too low."""
    arguments = _arguments()
    numbers = range(arguments.first_round, arguments.first_round + arguments.rounds)
    console = Console(highlight=False, soft_wrap=True)
    default = QUICK_PEERS if arguments.quick else PEERS
    peers = [PEERS[name] for name in arguments.peer or default]
    paths = make_paths(arguments.home, arguments.model)
    failed = install(peers, paths)
    if arguments.install_only:
        return 1 if failed else 0

    def on_load(peer: Peer) -> None:
        console.print(f"load {peer.label}")

    def on_done(measurement: Measurement) -> None:
        figures = measurement.figures
        speed, label = f"{figures.tokens_per_s:>8,.0f} tok/s", PEERS[measurement.peer].label
        console.print(
            f"round {measurement.round}  {figures.workload:<8} {speed} in {figures.duration_s:>5.1f} s  {label}"
        )

    ready = [peer for peer in peers if peer.name not in failed]
    names = arguments.workload or ALL_WORKLOADS
    limit_s = 60 * (arguments.minutes or (QUICK_MINUTES if arguments.quick else FULL_MINUTES))
    measurements, stopped = run_rounds(
        ready, names, numbers, paths, on_done, on_load, is_quick=arguments.quick, limit_s=limit_s
    )
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
    return 1 if is_ours_missing or any(it.best < it.comparison.at_least for it in ratios) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("--peer", action="append", choices=PEERS, help="Peer to run; may be repeated. [all]")
    parser.add_argument(
        "--workload", action="append", choices=ALL_WORKLOADS, help="Workload to run; may be repeated. [all]"
    )
    parser.add_argument(
        "--quick", action="store_true", help="Use shorter workloads and fewer peers; takes ten minutes."
    )
    parser.add_argument("--rounds", type=int, default=7, help="Maximum number of rounds. [7]")
    parser.add_argument(
        "--minutes",
        type=float,
        help="Time limit in minutes; no round begins that would exceed it. [60, or 9 with --quick]",
    )
    parser.add_argument(
        "--first-round", type=int, default=0, help="Number of the first round; each round has different tokens. [0]"
    )
    parser.add_argument(
        "--add", action="store_true", help="Merge new results into results.json; keep entries that are not re-measured."
    )
    parser.add_argument(
        "--model", default="smollm2", help="Path of a GGUF file or of its model folder. [the embedded model]"
    )
    parser.add_argument(
        "--home", type=Path, default=ROOT / ".venv-peers", help="Folder in which peers are installed. [.venv-peers]"
    )
    parser.add_argument(
        "--docs", type=Path, help="Write the figures, ratios and plot into benchmarks.md in this folder."
    )
    parser.add_argument("--install-only", action="store_true", help="Measure nothing.")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
