"""Measure how an interactive client fares while another client abuses the service: `python -m benchmarks.abuse [NAME
...]`.

Starts a router, a scheduler, a detokenizer and a worker as processes, with tokens for two clients. A probe sends a
short request over gRPC and one over HTTP every 0.2 s, alternately alone and while another process abuses the service
with the second token (abuses.py). That process runs at a lower priority, so that the CPU time of the client itself is
not measured. Prints the times to the first token alone and under each abuse, their ratios, the probe's errors, and the
CPU time of each component per request of the abuser.

If the abuser's requests are computed, the probe also runs alongside the same number of ordinary requests, to which the
abuser is entitled. An abuse passes if the 99th percentile is at most three times that of the probe alone or alongside
the ordinary requests.

The worker has no model, and each step takes --step-ms; with --real it has the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.abuse.abuses import ABUSES, AS_ORDINARY, NEED_A_MODEL, ORDINARY
from benchmarks.abuse.probe import Probe, Seen
from benchmarks.control_plane import cpu_seconds, wait_until_whole
from benchmarks.http_cost import ROOT, Target, start_service
from midstream.client import AsyncClient

PROBE, ABUSER = "token-of-the-probe", "token-of-the-abuser"
MAX_RATIO = 3.0
# Time to wait after an abuse until the connections of its client are closed.
_PAUSE_S = 3.0
_START_S, _STOP_S = 60.0, 5.0


@dataclass
class Result:
    """The probe's measurements of each API, alone and under load.

    Attributes:
        abuser: Number of the abuser's requests by outcome.
        ordinary: Number of ordinary requests by outcome.
        cpu_s, ordinary_cpu_s: CPU seconds of each component under the abuse, and alongside the ordinary requests.
        router_mb: Largest resident memory of the router at the end of a round.
        probe_late_s: Largest scheduling delay of the probe itself, caused by the machine.
    """

    alone: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    beside: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    beside_ordinary: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    abuser: Counter[str] = field(default_factory=Counter)
    ordinary: Counter[str] = field(default_factory=Counter)
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ordinary_cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    router_mb: float = 0.0
    probe_late_s: float = 0.0


def quantile(times_s: list[float], part: float) -> float:
    """Return the `part` quantile of some times, by nearest rank; infinite if there are none."""
    ordered = sorted(times_s)
    return ordered[max(-int(-part * len(ordered) // 1) - 1, 0)] if ordered else float("inf")


def main() -> int:
    """Run the rounds; fail if the probe had an error or its p99 more than tripled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Abuses to run: {', '.join(ABUSES)}. [all]")
    parser.add_argument("--rounds", type=int, default=2, help="Rounds of each abuse: alone, then under abuse. [2]")
    parser.add_argument("--seconds", type=float, default=5.0, help="Duration of each half of a round, in seconds. [5]")
    parser.add_argument("--real", dest="fake", action="store_false", help="Use a worker with the embedded model.")
    parser.add_argument("--step-ms", type=float, default=20.0, help="Duration of a step without a model, in ms. [20]")
    arguments = parser.parse_args()
    names = arguments.names or [name for name in ABUSES if not (arguments.fake and name in NEED_A_MODEL)]
    if unknown := set(names) - set(ABUSES):
        parser.error(f"unknown abuse: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes are also stopped on SIGTERM
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text(f"{PROBE} probe\n{ABUSER} abuser\n")
        flags = f"--auth token --auth-tokens {tokens}"
        with start_service(Path(folder), arguments, router_flags=flags) as target:
            asyncio.run(wait_until_served(target))
            for name in names:
                results[name] = asyncio.run(measure(target, name, arguments.rounds, arguments.seconds))
                print(f"{name}: {summary(results[name])}", flush=True)
    report(results, Console())
    return 1 if any(problems(result) for result in results.values()) else 0


async def wait_until_served(target: Target) -> None:
    """Return once the service is ready."""
    async with AsyncClient([target.grpc], token=PROBE) as client:
        await wait_until_whole(client)
    await Probe(target.grpc, target.http_port, PROBE).run(2)  # warm up


async def measure(target: Target, name: str, num_rounds: int, seconds: float) -> Result:
    """Run the probe alternately alone and under the abuse."""
    probe, result = Probe(target.grpc, target.http_port, PROBE), Result()

    async def observe(seen_so_far: dict[str, Seen]) -> None:
        for api, seen in (await probe.run(seconds)).items():
            seen_so_far[api].add(seen)
        result.probe_late_s = max(result.probe_late_s, probe.late_s)

    for _ in range(num_rounds):
        await observe(result.alone)
        if name in AS_ORDINARY:
            async with running_abuser(target, ORDINARY + name, result.ordinary, result.ordinary_cpu_s):
                await observe(result.beside_ordinary)
            await asyncio.sleep(_PAUSE_S)
        async with running_abuser(target, name, result.abuser, result.cpu_s):
            await observe(result.beside)
            result.router_mb = max(result.router_mb, target.processes["router"].memory_info().rss / 1e6)
        await asyncio.sleep(_PAUSE_S)
    return result


@contextlib.asynccontextmanager
async def running_abuser(
    target: Target, name: str, outcomes: Counter[str], cpu_s: dict[str, float]
) -> AsyncIterator[None]:
    """Run an abuse while the context is open; add its requests to `outcomes`, and the CPU seconds of each component to
    `cpu_s`.
    """
    ports = (target.grpc.rpartition(":")[2], str(target.http_port))
    before = {part: cpu_seconds(process) for part, process in target.processes.items()}
    abuser = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.abuse.abuses", name, *ports, ABUSER),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert abuser.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await abuser.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError(f"{name} did not start")
        yield
        for part, process in target.processes.items():
            cpu_s[part] += cpu_seconds(process) - before[part]
        abuser.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                outcomes.update(json.loads(await abuser.stdout.readline()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            abuser.kill()
        await abuser.wait()


def problems(result: Result) -> list[str]:
    """Return every effect of the abuse on the probe that exceeds the limits."""
    found = []
    for api, beside in result.beside.items():
        found += [f"{api}: {error}" for error in beside.errors]
        alone_s, beside_s = (quantile(seen.times_s, 0.99) for seen in (result.alone[api], beside))
        share_s = quantile(result.beside_ordinary[api].times_s, 0.99) if result.ordinary_cpu_s else 0.0
        if not beside_s <= max(MAX_RATIO * alone_s, share_s):
            found.append(f"{api}: p99 is {beside_s / alone_s:.1f} times the p99 without the abuse")
    return found


def cost(outcomes: Counter[str], cpu_s: dict[str, float]) -> str:
    """Return the CPU time of each component per request, as text; requests that have not ended are not counted."""
    count = max(outcomes.total(), 1)
    return ", ".join(f"{part} {1e3 * seconds / count:.1f}" for part, seconds in cpu_s.items()) + " ms per request"


def summary(result: Result) -> str:
    """Return a result as one line of text."""
    parts = []
    for api, beside in result.beside.items():
        alone = result.alone[api].times_s
        middle, high = (
            f"{1e3 * quantile(alone, part):.0f} -> {1e3 * quantile(beside.times_s, part):.0f} ms"
            for part in (0.5, 0.99)
        )
        ratio = quantile(beside.times_s, 0.99) / quantile(alone, 0.99)
        served = f"{len(beside.times_s)} of {len(beside.times_s) + len(beside.errors)}"
        share_s = result.beside_ordinary[api].times_s if result.ordinary_cpu_s else []
        share = f", beside ordinary requests {1e3 * quantile(share_s, 0.99):.0f} ms" if share_s else ""
        parts.append(f"{api} p50 {middle}, p99 {high} ({ratio:.1f} times){share}, served {served}")
        parts += [f"{count} x {error[:100]}" for error, count in Counter(beside.errors).most_common(3)]
    parts.append(f"router {result.router_mb:.0f} MB, probe late by {1e3 * result.probe_late_s:.0f} ms")
    parts.append(f"abuser {dict(result.abuser)}: {cost(result.abuser, result.cpu_s)}")
    if result.ordinary_cpu_s:
        parts.append(f"ordinary {dict(result.ordinary)}: {cost(result.ordinary, result.ordinary_cpu_s)}")
    return "; ".join(parts)


def report(results: dict[str, Result], console: Console) -> None:
    """Print a table of all results."""
    table = Table("beside", "API", "p50 alone, ms", "beside", "p99 alone, ms", "beside", "ordinary", "ratio", "errors")
    for name, result in results.items():
        for api, beside in result.beside.items():
            alone = result.alone[api].times_s
            quantiles = [1e3 * quantile(times, part) for part in (0.5, 0.99) for times in (alone, beside.times_s)]
            ratio = quantiles[3] / quantiles[2]
            share = f"{1e3 * quantile(result.beside_ordinary[api].times_s, 0.99):.0f}" if name in AS_ORDINARY else ""
            table.add_row(
                name, api, *(f"{value:.0f}" for value in quantiles), share, f"{ratio:.1f}", str(len(beside.errors))
            )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
