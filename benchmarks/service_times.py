"""Measure running services alternately: `python -m benchmarks.service_times RUN_DIR RUN_DIR`.

Each service must have been started with `midstream up --detach --run-dir`. A round sends one workload to each in turn.
Prints tokens per second (best and median), ratios to the first service within a round, and CPU time per token by
component.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from pathlib import Path

from midstream.cli.bench import measure, workloads
from midstream.cli.run_dir import RunDir

Times = dict[str, float]


def thread_seconds(processes: dict[str, int]) -> Times:
    """Return the CPU time used so far by component, and for the worker by thread."""
    times: Times = {}
    for name, pid in processes.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            thread = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
            key = f"{name} {thread}" if "worker" in name else name
            times[key] = times.get(key, 0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


def run(folder: Path, name: str, seed: int) -> tuple[float, list[float], Times]:
    """Return tokens per second, the gaps between the tokens of a stream, and CPU time per token, in ms."""
    state = RunDir(folder).read_state()
    assert state is not None
    names: dict[int, list[str]] = {}
    for process in state.processes:
        if process.pid:
            names.setdefault(process.pid, []).append(process.name)
    processes = {" + ".join(sharing): pid for pid, sharing in names.items()}
    workload = workloads.WORKLOADS[name](random.Random(seed))
    before = thread_seconds(processes)
    result = asyncio.run(measure.run_workload([state.of_kind("router")[0].addresses["grpc"]], workload))
    after = thread_seconds(processes)
    requests = result.requests
    count = sum(it.num_prompt_tokens if workload.counts_input else it.num_tokens for it in requests)
    first = min(it.arrivals[0][0] for it in requests)
    last = max(it.arrivals[-1][0] for it in requests)
    rate = (count - 1) / (last - first) if name == "single" else count / result.duration_s
    gaps = [1000 * (b[0] - a[0]) for it in requests for a, b in zip(it.arrivals, it.arrivals[1:], strict=False)]
    used = {key: 1000 * (after[key] - before.get(key, 0)) / count for key in after}
    return rate, gaps or [0.0], {key: ms for key, ms in used.items() if ms > 0.005}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="single")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    runs: list[list[tuple[float, list[float], Times]]] = [[] for _ in arguments.run_dirs]
    for number in range(arguments.rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for place in order:
            runs[place].append(run(arguments.run_dirs[place], arguments.workload, number))
    for folder, own in zip(arguments.run_dirs, runs, strict=True):
        rates = [rate for rate, _, _ in own]
        ratio = statistics.median(rate / first[0] for rate, first in zip(rates, runs[0], strict=True))
        gap = statistics.median(statistics.median(gaps) for _, gaps, _ in own)
        print(
            f"{folder.name}: {arguments.workload} best {max(rates):.1f} median {statistics.median(rates):.1f} tok/s, "
            f"ratio {ratio:.3f}, gap {gap:.2f} ms; CPU ms per token:"
        )
        keys = sorted({key for _, _, used in own for key in used})
        print(
            "   " + ", ".join(f"{key} {statistics.median(used.get(key, 0) for _, _, used in own):.2f}" for key in keys)
        )


if __name__ == "__main__":
    main()
