"""Measure the cost of a token's path through the services: `python -m benchmarks.data_path [--baseline PATH] [--rows
single,fake] [--rounds 5]`.

Starts the services of this checkout, and of the one at PATH (with its own .venv), and sends the same load to each in
turn. Prints the best and the median of the rounds, and the median of the ratios within a round. For each component, it
prints the CPU time per token in microseconds, the share of this time that is spent in the kernel, and the number of
times per token that its threads went to sleep. The load comes from `benchmarks/load/client.cpp`, which is compiled here
(needs g++) and takes a few microseconds per message.

Rows:
    single    one stream of the embedded model at a time, 128 tokens in and 128 out, compared with the same worker in
              process, without services, just before and after
    mixed     64 of these streams at once
    paced     one stream of 256 tokens, with a worker whose steps take 5 ms but no CPU time
    fake      256 streams of 512 tokens, with a worker whose steps take no time
    short     256 concurrent requests of 32 tokens in and 16 out, with the same worker
    sse       256 streams over HTTP
    many      2,000 concurrent streams of 64 tokens
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.service_times import Times, thread_seconds
from midstream.cli.bench.workloads import FIRST_TOKEN_ID, LAST_TOKEN_ID
from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 120.0
# All components except the worker and the client.
SERVICES = ("scheduler", "detokenizer", "router")


@dataclass(frozen=True)
class Load:
    """Requests of one size.

    Attributes:
        concurrency: Number of concurrent requests.
        connections: Number of connections.
        api: API that the clients use, grpc or sse.
    """

    num_requests: int
    concurrency: int
    num_prompt_tokens: int
    num_tokens: int
    connections: int = 1
    api: str = "grpc"

    def write_bodies(self, path: Path, dice: random.Random) -> None:
        """Write the requests in the format that the load generator reads."""
        with path.open("wb") as file:
            for _ in range(self.num_requests):
                prompt = self.prompt(dice)
                body = _grpc_body(prompt, self.num_tokens) if self.api == "grpc" else _sse_body(prompt, self.num_tokens)
                file.write(struct.pack("<I", len(body)) + body)

    def prompt(self, dice: random.Random) -> list[int]:
        """Return a random prompt."""
        return [dice.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(self.num_prompt_tokens)]


def _grpc_body(prompt: list[int], num_tokens: int) -> bytes:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(values=prompt),
        max_tokens=num_tokens,
        sampling=pb.SamplingConfig(temperature=0.0),
        stopping=pb.StoppingConfig(ignore_eos=True),
    ).SerializeToString()


def _sse_body(prompt: list[int], num_tokens: int) -> bytes:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()


@dataclass(frozen=True)
class Row:
    """One row of the table: a load and the worker that serves it."""

    load: Load
    is_fake: bool = True
    step_ms: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.load.concurrency


ROWS = {
    "single": Row(Load(8, 1, 128, 128), is_fake=False),
    "mixed": Row(Load(64, 64, 128, 128), is_fake=False),
    "paced": Row(Load(1, 1, 128, 256), step_ms=5.0),
    "fake": Row(Load(256, 256, 32, 512)),
    "short": Row(Load(2000, 256, 32, 16)),
    "sse": Row(Load(256, 256, 32, 128, connections=256, api="sse")),
    "many": Row(Load(2000, 2000, 32, 64, connections=4)),
}
Figures = dict[str, float]


@dataclass(frozen=True)
class Counted:
    """The kernel's counters for each component: ticks in user and in kernel mode, and voluntary context switches."""

    parts: dict[str, tuple[int, int, int]]
    pids: dict[str, int]

    @classmethod
    def of(cls, pids: dict[str, int]) -> Counted:
        parts = {}
        for name, pid in pids.items():
            if name not in SERVICES:
                continue
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            num_switches = 0
            for task in Path(f"/proc/{pid}/task").iterdir():
                lines = (task / "status").read_text().splitlines()
                num_switches += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
            parts[name] = int(stat[11]), int(stat[12]), num_switches
        return cls(parts, pids)

    def until_now(self, num_tokens: float) -> Figures:
        """Return each component's share of CPU time in the kernel and its context switches per token, both since this
        snapshot.
        """
        figures: Figures = {}
        for name, after in Counted.of(self.pids).parts.items():
            user, kernel, switches = (now - then for now, then in zip(after, self.parts[name], strict=True))
            figures[f"{name}_kernel_share"] = kernel / max(user + kernel, 1)
            figures[f"{name}_switches"] = switches / num_tokens
        return figures


class Checkout:
    """The services of one checkout, as processes on this machine."""

    def __init__(self, name: str, root: Path, flags: Sequence[str], router_flags: Sequence[str] = ()) -> None:
        """Prepare the services; `flags` are passed to the scheduler, detokenizer and router."""
        self.name, self.root = name, root
        self.flags = dict.fromkeys(SERVICES, tuple(flags))
        self.flags["router"] += tuple(router_flags)
        python = root / ".venv" / "bin" / "python"
        self.python = str(python) if python.exists() else sys.executable

    def _of_model(self, attribute: str) -> str:
        """Return an attribute of the embedded model as this checkout's code reads it; fingerprints have changed."""
        code = f"from midstream.model.folder import open_model_folder as o; print(o('smollm2').{attribute})"
        found = subprocess.run([self.python, "-c", code], cwd=self.root, check=True, stdout=subprocess.PIPE, text=True)
        return found.stdout.strip()

    @contextlib.contextmanager
    def open(self, row: Row, folder: Path) -> Iterator[Callable[[Path, Path], Figures]]:
        """Run the services while the context is open; yield a function that sends a load and measures it."""
        scheduler, zmq, detokenizer, grpc, http = free_ports(5)
        vocab_size, fingerprint = self._of_model("vocab_size"), self._of_model("fingerprint")
        streams = max(row.num_rows, 8)
        journal = folder / f"{self.name}.journal"
        commands = {
            "scheduler": f"scheduler --port {scheduler} --worker-port {zmq} --max-batch-size {streams} "
            f"--journal-path {journal}",
            "worker": f"tests.fakes.worker --scheduler tcp://127.0.0.1:{zmq} --vocab-size {vocab_size} "
            f"--model-fingerprint {fingerprint} --num-blocks 131072 --max-batch-size {streams} "
            f"--step-ms {row.step_ms}",
            "detokenizer": f"detokenizer --port {detokenizer} --schedulers 127.0.0.1:{scheduler}",
            "router": f"router --port {grpc} --http-port {http} --schedulers 127.0.0.1:{scheduler} "
            f"--detokenizers 127.0.0.1:{detokenizer} --max-streams-per-client 4096",
        }
        if not row.is_fake:
            commands["worker"] = f"gpu_worker --scheduler tcp://127.0.0.1:{zmq} --num-threads {os.cpu_count()}"
        popens: dict[str, subprocess.Popen[bytes]] = {}
        with contextlib.ExitStack() as stack:
            for name, command in commands.items():
                log = stack.enter_context((folder / f"{self.name}-{name}.log").open("wb"))
                words = [*command.split(), *self.flags.get(name, ())]
                environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
                popen = subprocess.Popen(
                    [self.python, "-m", *words], cwd=self.root, stdout=log, stderr=log, env=environment
                )
                stack.callback(_end, popen)
                popens[name] = popen
            _wait_until_served(http, popens)
            pids = {name: popen.pid for name, popen in popens.items()}

            def send(client: Path, bodies: Path) -> Figures:
                before, counted = thread_seconds(pids), Counted.of(pids)
                port = http if row.load.api == "sse" else grpc
                load = row.load
                numbers = (port, load.connections, load.concurrency, load.num_tokens)
                command = [str(client), load.api, "127.0.0.1", *map(str, numbers), str(bodies)]
                found: Figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                figures = figures_of(found, before, thread_seconds(pids))
                return figures | counted.until_now(max(found["tokens"], 1))

            yield send

    @contextlib.contextmanager
    def open_engine(self, row: Row, folder: Path) -> Iterator[Callable[[random.Random], float]]:
        """Load the worker's model runner in a process without services while the context is open; yield a function
        that runs the requests of the row in it, with random prompts, and returns the tokens per second.
        """
        model = str(open_model_folder("smollm2").path)
        command = [self.python, "-m", "benchmarks.peers.child", "midstream-engine", str(folder), model]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=self.root
        )

        def run(dice: random.Random) -> float:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(_engine_workload(row.load, dice))
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                raise RuntimeError(f"the engine of {self.name} ended with exit code {child.wait()}")
            return float(json.loads(line)["tokens_per_s"])

        with child:
            try:
                yield run
            finally:
                child.kill()


def _engine_workload(load: Load, dice: random.Random) -> bytes:
    requests = [{"token_ids": load.prompt(dice), "max_tokens": load.num_tokens} for _ in range(load.num_requests)]
    name = "single" if load.concurrency == 1 else "mixed"
    workload = {"name": name, "requests": requests, "concurrency": load.concurrency, "counts_input": False}
    return json.dumps(workload).encode() + b"\n"


def figures_of(found: Figures, before: Times, after: Times) -> Figures:
    """Return the results of one run: rates, gaps, and microseconds of CPU time per token for each component."""
    spent: Figures = {}
    for key, seconds in after.items():
        part = key.partition(" ")[0]
        spent[part] = spent.get(part, 0.0) + seconds - before.get(key, 0.0)
    tokens = max(found["tokens"], 1)
    figures = {
        "tokens_per_s": found["tokens"] / found["seconds"],
        "requests_per_s": found["requests"] / found["seconds"],
        "failed": found["failed"],
        "gap_p50_ms": found["gap_p50_ms"],
        "gap_p99_ms": found["gap_p99_ms"],
        "tokens_per_message": found["tokens"] / max(found["messages"], 1),
        "services_us": sum(spent[part] for part in SERVICES) / tokens * 1e6,
        "client_us": found["cpu_s"] / tokens * 1e6,
    }
    return figures | {f"{part}_us": seconds / tokens * 1e6 for part, seconds in spent.items()}


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def _wait_until_served(http_port: int, popens: dict[str, subprocess.Popen[bytes]]) -> None:
    """Return once a request succeeds."""
    body = json.dumps({"model": "smollm2", "prompt": [300, 301], "max_tokens": 1}).encode()
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        request = urllib.request.Request(
            f"http://127.0.0.1:{http_port}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                response.read()
                return
        except OSError:
            ended = [name for name, popen in popens.items() if popen.poll() is not None]
            if ended or time.monotonic() > give_up_at:
                raise RuntimeError(f"the service did not start; processes that ended: {ended}") from None
            time.sleep(0.2)


def measure(name: str, checkouts: Sequence[Checkout], client: Path, rounds: int, folder: Path) -> list[list[Figures]]:
    """Return figures by checkout and round; the checkouts are measured in turn. With a real worker, the same load also
    runs in an engine without services just before and after; `engine_ratio` is relative to the mean of these two runs.
    """
    row = ROWS[name]
    results: list[list[Figures]] = [[] for _ in checkouts]
    with contextlib.ExitStack() as stack:
        sends = [stack.enter_context(checkout.open(row, folder)) for checkout in checkouts]
        engines = [] if row.is_fake else [stack.enter_context(it.open_engine(row, folder)) for it in checkouts]
        bodies = folder / "bodies"
        for number in range(-1, rounds):  # the first round is a warm-up
            order = range(len(checkouts)) if number % 2 == 0 else reversed(range(len(checkouts)))
            for place in order:
                seed = f"{name} {number}"
                row.load.write_bodies(bodies, random.Random(seed))
                if row.is_fake:
                    figures = sends[place](client, bodies)
                else:
                    before = engines[place](random.Random(seed))
                    figures = sends[place](client, bodies)
                    alone = (before + engines[place](random.Random(seed))) / 2
                    figures |= {"engine_tokens_per_s": alone, "engine_ratio": figures["tokens_per_s"] / alone}
                if number >= 0:
                    results[place].append(figures)
    return results


# Higher values are better for these figures; for all others lower values are better.
RATES = frozenset({"tokens_per_s", "requests_per_s", "engine_tokens_per_s", "engine_ratio", "tokens_per_message"})


def report(name: str, checkouts: Sequence[Checkout], results: list[list[Figures]]) -> Table:
    """Print the best and the median result of each checkout, and the ratio to the last checkout."""
    table = Table("figure", *(f"{it.name} {kind}" for it in checkouts for kind in ("best", "median")), title=name)
    if len(checkouts) > 1:
        table.add_column("ratio (range)")
    for key in results[0][0]:
        cells = []
        for figures in results:
            values = [item[key] for item in figures]
            cells += [f"{max(values) if key in RATES else min(values):,.2f}", f"{statistics.median(values):,.2f}"]
        if len(checkouts) > 1:
            pairs = zip(results[0], results[-1], strict=True)
            ratios = [ours[key] / theirs[key] for ours, theirs in pairs if theirs.get(key)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})" if ratios else "")
        table.add_row(key, *cells)
    return table


def main() -> int:
    """Run the benchmark; fail if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="single,paced,fake,short,sse,many", help=f"Of {','.join(ROWS)}.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", type=Path, help="Path of another checkout, measured alternately with this one.")
    parser.add_argument(
        "--flags", default="", help="Additional flags for this checkout's scheduler, detokenizer and router."
    )
    parser.add_argument(
        "--baseline-flags",
        default="",
        help="Additional flags for the other checkout's scheduler, detokenizer and router.",
    )
    parser.add_argument("--router-flags", default="", help="Additional flags for this checkout's router.")
    parser.add_argument("--baseline-router-flags", default="", help="Additional flags for the other checkout's router.")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to.")
    arguments = parser.parse_args()
    checkouts = [Checkout("this", ROOT, arguments.flags.split(), arguments.router_flags.split())]
    if arguments.baseline is not None:
        flags, router_flags = arguments.baseline_flags.split(), arguments.baseline_router_flags.split()
        checkouts.append(Checkout("baseline", arguments.baseline.resolve(), flags, router_flags))
    console = Console()
    everything: dict[str, list[list[Figures]]] = {}
    with tempfile.TemporaryDirectory(prefix="data-path-") as name:
        folder = Path(name)
        client = folder / "client"
        source = ROOT / "benchmarks" / "load" / "client.cpp"
        subprocess.run(["g++", "-O2", "-std=c++17", "-o", str(client), str(source)], check=True)
        for row in arguments.rows.split(","):
            everything[row] = measure(row, checkouts, client, arguments.rounds, folder)
            console.print(report(row, checkouts, everything[row]))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(everything, indent=1))
    num_failed = sum(item["failed"] for results in everything.values() for own in results for item in own)
    if num_failed:
        console.print(f"[red]{num_failed:.0f} requests failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
