"""Compare two workers with combined roles and two workers with separate roles: `python -m benchmarks.roles`.

Both services run at the same time and receive the same requests alternately, in rounds: the workload `chat` with 64
concurrent requests or, with --request-rate, random arrivals. Prints each round, and the medians over the rounds of the
ratios of throughput and of the times between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.kills.service import KilledService, running_service
from midstream.cli.bench.measure import run_workload
from midstream.cli.bench.report import Summary, summarize
from midstream.cli.bench.workloads import Workload, chat_request


def run(service: KilledService, seed: int, arguments: argparse.Namespace) -> Summary:
    """Run one round of the workload on a service."""
    generator = random.Random(seed)
    requests = tuple(chat_request(generator) for _ in range(arguments.requests))
    workload = Workload("chat", requests, arguments.at_once)
    return summarize(
        asyncio.run(run_workload(service.routers, workload, request_rate=arguments.request_rate or None, seed=seed))
    )


def line_of(name: str, summary: Summary) -> str:
    """Return one run as text."""
    return (
        f"{name}: {summary.tokens_per_s:.0f} tok/s; between tokens {summary.inter_token_ms[0]:.0f} ms (p50), "
        f"{summary.inter_token_ms[1]:.0f} ms (p99); first token {summary.ttft_ms[0]:.0f} ms (p50), "
        f"{summary.ttft_ms[1]:.0f} ms (p99); "
        f"{summary.num_failed} failed"
    )


def main() -> int:
    """Run the rounds; fail if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=96, help="Number of requests per round and service. [96]")
    parser.add_argument("--at-once", type=int, default=64, help="Maximum number of requests in flight. [64]")
    parser.add_argument(
        "--request-rate",
        type=float,
        default=0.0,
        help="Arrivals per second; 0 sends requests as fast as the concurrency allows. [0]",
    )
    parser.add_argument("--raw", type=Path, help="JSON file to write the runs to.")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the services are also stopped on SIGTERM
    runs: list[tuple[Summary, Summary]] = []
    with (
        running_service(arguments.model, 1, 1, 2) as together,
        running_service(arguments.model, 1, 1, 2, "--prefill-workers", "1") as apart,
    ):
        for number in range(arguments.rounds):
            order = [together, apart] if number % 2 == 0 else [apart, together]
            done = {service: run(service, number, arguments) for service in order}
            runs.append((done[together], done[apart]))
            print(line_of("together", done[together]), line_of("   apart", done[apart]), sep="\n", flush=True)
    if arguments.raw:
        arguments.raw.write_text(json.dumps([[asdict(item) for item in pair] for pair in runs], indent=1))
    rate = statistics.median(apart.tokens_per_s / both.tokens_per_s for both, apart in runs)
    pause = statistics.median(apart.inter_token_ms[1] / both.inter_token_ms[1] for both, apart in runs)
    print(f"separate / combined roles (median ratio): throughput {rate:.2f}, p99 inter-token latency {pause:.2f}")
    return 1 if any(summary.num_failed for pair in runs for summary in pair) else 0


if __name__ == "__main__":
    sys.exit(main())
