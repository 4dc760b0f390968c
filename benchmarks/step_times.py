"""Time whole worker steps in process, alternating checkouts and thread counts: `python -m benchmarks.step_times`.

Each contender is a process that keeps its model loaded: this checkout, or others (`--against FOLDER`), each with every
count of `--threads`. They run short rounds of each case in turn, so that other work on the machine affects all of them
equally. Prints the best and the median time of a step, its CPU time by thread, and ratios to the first checkout with
the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CASES = {  # sequences, cached tokens, and tokens per sequence in a step
    "1 stream, 128 keys": (1, 128, 1),
    "8 x 200": (8, 200, 1),
    "64 x 200": (64, 200, 1),
    "prefill 256": (1, 0, 256),
    "prefill 1024": (1, 0, 1024),
}

CHILD = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import gpu_worker, torch
from importlib import import_module

def find(name, *modules):
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            pass
    raise SystemExit(f"this checkout has no {name}")

settings, cases, sampling = map(json.loads, sys.argv[1:])
ModelRunner = find("ModelRunner", "gpu_worker.model_runner")
NewSequence = find("NewSequence", "gpu_worker.step", "gpu_worker.batch.step")
SamplingParams = find("SamplingParams", "gpu_worker.step", "gpu_worker.batch.step")
Step = find("Step", "gpu_worker.step", "gpu_worker.batch.step")
from midstream.config import WorkerConfig
open_model_folder = find("open_model_folder", "midstream.model_folder", "midstream.model.folder")

config = WorkerConfig(max_kv_tokens=32768, max_num_tokens=1024, **settings)
runner = ModelRunner(config, open_model_folder(config.model))

def threads():
    times = {}
    for task in Path("/proc/self/task").iterdir():
        name = "caller" if task.name == str(os.getpid()) else (task / "comm").read_text().strip()
        times[name] = times.get(name, 0) + int((task / "schedstat").read_text().split()[0])
    return times

def prefill(count, length, tokens):
    blocks = -(-(length + tokens + 80) // 16)
    rows = np.arange(count, dtype=np.int32)
    random = np.random.default_rng(count)
    return rows, tuple(
        NewSequence(
            row=int(row),
            token_ids=random.integers(300, 40000, length).astype(np.int32),
            num_prompt_tokens=length,
            block_ids=np.arange(blocks, dtype=np.int32) + row * blocks,
            sampling=SamplingParams(**sampling),
        )
        for row in rows
    )

def run(case, seconds):
    count, before, tokens = cases[case]
    runner.clear()
    if tokens == 1:
        rows, sequences = prefill(count, before, 1)
        for row in rows:
            one = rows[row:row + 1]
            runner.run_step(Step(new_sequences=sequences if row == 0 else (), context_rows=one, context_starts=0 * one,
                                 context_lengths=np.full_like(one, before)))
        runner.run_step(Step(generation_rows=rows))
        step = lambda: runner.run_step(Step(repeat_generation=True))
    else:
        rows, sequences = prefill(count, tokens, 0)
        def step():
            runner.clear()
            runner.run_step(Step(new_sequences=sequences, context_rows=rows, context_starts=0 * rows,
                                 context_lengths=np.full_like(rows, tokens)))
    step()
    walls, started, at = [], threads(), time.perf_counter()
    while len(walls) < 70 and (len(walls) < 2 or time.perf_counter() - at < seconds):
        begin = time.perf_counter()
        step()
        walls.append(time.perf_counter() - begin)
    ended = threads()
    used = {name: (ended[name] - started.get(name, 0)) / len(walls) / 1e6 for name in ended}
    return {"ms": [1000 * wall for wall in walls], "cpu": {name: ms for name, ms in used.items() if ms > 0.01}}

print("ready", flush=True)
for line in sys.stdin:
    case, seconds = json.loads(line)
    print(json.dumps(run(case, seconds)), flush=True)
"""


@dataclass
class Contender:
    """A process with a loaded model, and its measurements."""

    name: str
    process: subprocess.Popen[str]

    @property
    def pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def run(self, case: str, seconds: float) -> tuple[list[float], dict[str, float]]:
        """Return the step times in ms, and the CPU time per step by thread."""
        stdin, stdout = self.pipes
        stdin.write(json.dumps([case, seconds]) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        return answer["ms"], answer["cpu"]


def start(folder: Path, settings: dict[str, object], sampling: str) -> Contender:
    """Start a contender from a checkout; raise OSError if it does not start."""
    command = [sys.executable, "-c", CHILD, json.dumps(settings), json.dumps(CASES), sampling]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
    )
    contender = Contender(f"{folder.name} t{settings['num_threads']}", process)
    while (line := contender.pipes[1].readline()) != "ready\n":
        if not line:
            raise OSError(f"{contender.name} did not start")
    return contender


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="other checkouts; ratios are relative to the first checkout"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", default="auto", help="build of the kernels [%(default)s]")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--sampling", default='{"temperature": 0}', help="fields of SamplingParams as JSON [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per case and round")
    arguments = parser.parse_args()
    values = {"kv": arguments.kv, "weights": arguments.weights, "activations": arguments.activations}
    if arguments.isa != "auto":  # older checkouts lack the setting
        values["cpu_isa"] = arguments.isa
    folders = [*(path.resolve() for path in arguments.against), Path(__file__).parents[1]]
    contenders = [
        start(folder, {**values, "num_threads": threads}, arguments.sampling)
        for threads in arguments.threads
        for folder in folders
    ]
    print(f"{'case':20}{'':24}{'best':>9}{'median':>9}  best and median ratio   processor ms per step by thread")
    for case in arguments.cases:
        rounds: list[list[tuple[list[float], dict[str, float]]]] = [[] for _ in contenders]
        for number in range(arguments.rounds):
            order = range(len(contenders)) if number % 2 == 0 else reversed(range(len(contenders)))
            for place in order:
                rounds[place].append(contenders[place].run(case, arguments.seconds))
        for place, contender in enumerate(contenders):
            _print(case, contender.name, rounds[place], rounds[place - place % len(folders)])
    for contender in contenders:
        contender.pipes[0].close()
        contender.process.wait()


def _print(
    case: str,
    name: str,
    own: list[tuple[list[float], dict[str, float]]],
    first: list[tuple[list[float], dict[str, float]]],
) -> None:
    best = min(min(times) for times, _ in own)
    median = statistics.median(statistics.median(times) for times, _ in own)
    best_ratio = min(min(times) for times, _ in first) / best
    ratio = statistics.median(
        statistics.median(theirs) / statistics.median(ours) for (theirs, _), (ours, _) in zip(first, own, strict=True)
    )
    threads = {thread: statistics.median(cpu.get(thread, 0) for _, cpu in own) for _, cpu in own for thread in cpu}
    used = " ".join(f"{thread} {ms:.2f}" for thread, ms in threads.items())
    print(f"{case:20}{name:24}{best:9.2f}{median:9.2f}{best_ratio:9.3f}{ratio:9.3f}       {used}", flush=True)


if __name__ == "__main__":
    main()
