"""Compare serving systems while their processes fail: `python -m benchmarks.league`.

Each system gets the same requests: once undisturbed, then once per row with the fault of the row, injected --faults
times while requests run. Processes that end are restarted at once. A row shows how many requests completed, how many of
these have the same output as the undisturbed run, and the longest pauses.

The wheels of the peers are installed by `make bench-peers`. Two need separate environments, whose interpreters are
passed as --gateway-python and --dynamo-python: `pip install sglang-router`; and the peers' vLLM with `pip install
--no-deps ai-dynamo ai-dynamo-runtime` and `pip install redis 'kubernetes<33' 'prometheus-client<1' zstandard`. The
table is in docs/reliability.md; --raw stores the rows as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.kills.service import running_service
from benchmarks.league.load import (
    KINDS,
    Outcome,
    Request,
    Stream,
    make_requests,
    openai_stream,
    own_stream,
    run_requests,
)
from benchmarks.league.systems import Fault, Peer, dynamo, gateway, own_faults, vllm
from midstream.cli.run_dir import RunDir
from midstream.client import AsyncClient

PORT = 18_400
NO_FAULT = "nothing"
# Number of different requests, which are repeated within a row.
NUM_DIFFERENT = 64
Row = dict[str, object]


def main() -> int:
    """Run the systems one after another; fail if one of our rows is incomplete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "systems", nargs="*", metavar="SYSTEM", help="Systems to compare: midstream, vllm, gateway, dynamo. [midstream]"
    )
    parser.add_argument("--rows", default="", help="Names of rows, comma-separated. [all]")
    parser.add_argument("--requests", type=int, default=800, help="Number of requests per row. [800]")
    parser.add_argument("--at-once", type=int, default=32, help="Number of concurrent requests. [32]")
    parser.add_argument("--faults", type=int, default=5, help="Number of faults per row. [5]")
    parser.add_argument("--tokens", type=int, default=64, help="Output tokens per request. [64]")
    parser.add_argument("--model", default="smollm2", help="Model served by Midstream. [smollm2]")
    parser.add_argument(
        "--peers", type=Path, default=Path(".venv-peers"), help="Environment created by bench-peers. [.venv-peers]"
    )
    parser.add_argument("--gateway-python", type=Path, help="Python of an environment that has sglang-router.")
    parser.add_argument("--dynamo-python", type=Path, help="Python of an environment that has ai-dynamo and vLLM.")
    parser.add_argument("--raw", type=Path, help="JSON file to add results to.")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are also stopped on SIGTERM
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="midstream-league-") as logs:
        for system in arguments.systems or ["midstream"]:
            if system == "midstream":
                rows += asyncio.run(run_own(arguments, Path(logs)))
            else:
                rows += asyncio.run(run_peer(make_peer(system, arguments, Path(logs)), arguments))
    console = Console(width=120)
    console.print(table_of(rows))
    if arguments.raw:
        earlier = json.loads(arguments.raw.read_text(encoding="utf-8")) if arguments.raw.exists() else []
        arguments.raw.write_text(json.dumps([*earlier, *rows], indent=1), encoding="utf-8")
    ours = [row for row in rows if row["system"] == "Midstream"]
    return 0 if all(row["identical"] == row["requests"] for row in ours) else 1


def make_peer(system: str, arguments: argparse.Namespace, logs: Path) -> Peer:
    """Return a peer by its name."""
    python, model = arguments.peers / "vllm" / "bin" / "python", arguments.peers / "models" / "bf16"
    if system == "vllm":
        return vllm(python, model, PORT, logs)
    if system == "gateway" and arguments.gateway_python:
        return gateway(python, arguments.gateway_python, model, PORT, logs)
    if system == "dynamo" and arguments.dynamo_python:
        return dynamo(arguments.dynamo_python, model, PORT, logs)
    raise SystemExit(
        f"{system}: must be a system; the gateway and Dynamo also require --gateway-python and --dynamo-python"
    )


async def run_own(arguments: argparse.Namespace, logs: Path) -> list[Row]:
    """Run all rows of Midstream, with two routers, two detokenizers and two workers."""
    run_dir = RunDir(logs / "midstream")
    with running_service(arguments.model, 2, 2, 2, folder=run_dir.path) as service:
        async with AsyncClient(service.routers, unavailable_timeout_s=120) as client:

            def restore() -> None:
                while not service.is_whole():
                    time.sleep(0.2)

            setting = "midstream serve --workers 2 --routers 2 --detokenizers 2"
            faults = own_faults(service, run_dir)
            return await run_rows("Midstream", own_stream(client), faults, restore, arguments, [setting])


async def run_peer(peer: Peer, arguments: argparse.Namespace) -> list[Row]:
    """Run all rows of a peer."""
    with peer.running():
        async with AsyncOpenAI(base_url=f"{peer.door.url}/v1", api_key="none", max_retries=30) as client:
            return await run_rows(
                peer.name, openai_stream(client, peer.guide), peer.faults, peer.restore, arguments, peer.configuration
            )


async def run_rows(
    system: str,
    stream: Stream,
    faults: dict[str, Fault],
    restore: Callable[[], None],
    arguments: argparse.Namespace,
    configuration: list[str],
) -> list[Row]:
    """Run the requests undisturbed, then once per fault."""
    different = make_requests(min(NUM_DIFFERENT, arguments.requests), arguments.tokens)
    requests = list(itertools.islice(itertools.cycle(different), arguments.requests))
    print(f"{system}: undisturbed run", flush=True)
    chosen = {name.strip() for name in arguments.rows.split(",") if name.strip()} or {NO_FAULT, *faults}
    await asyncio.to_thread(restore)
    expected = await run_requests(stream, different, arguments.at_once)
    if failed := [outcome.error for outcome in expected if outcome.error]:
        raise RuntimeError(f"{system}, undisturbed: {failed[0]}")
    rows = []
    for name in (name for name in (NO_FAULT, *faults) if name in chosen):
        await asyncio.to_thread(restore)
        outcomes = await run_requests(
            stream, requests, arguments.at_once, whole_first(restore, faults.get(name)), arguments.faults
        )
        rows.append(row_of(system, name, requests, expected, outcomes) | {"configuration": configuration})
        print(
            json.dumps({key: rows[-1][key] for key in ("system", "row", "requests", "complete", "identical", "gap_s")}),
            flush=True,
        )
    return rows


def whole_first(restore: Callable[[], None], fault: Fault | None) -> Fault | None:
    """Return a fault that waits until all processes are running again, and then injects `fault`; None if `fault` is
    None.
    """
    if fault is None:
        return None

    def inject() -> None:
        restore()
        fault()

    return inject


def row_of(
    system: str, name: str, requests: Sequence[Request], expected: Sequence[Outcome], outcomes: Sequence[Outcome]
) -> Row:
    """Return one row: counts in total and by kind, the 99th percentile of each stream's longest pause, and errors."""
    counts = {kind: [0, 0, 0] for kind in KINDS}
    for request, should, did in zip(itertools.cycle(requests), itertools.cycle(expected), outcomes, strict=False):
        count = counts[request.kind]
        count[0] += 1
        count[1] += not did.error
        count[2] += not did.error and did.texts == should.texts
    pauses = sorted(
        max((after - before for before, after in itertools.pairwise(did.arrivals)), default=0.0)
        for did in outcomes
        if not did.error
    )
    return {
        "system": system,
        "row": name,
        "requests": len(outcomes),
        "complete": sum(count[1] for count in counts.values()),
        "identical": sum(count[2] for count in counts.values()),
        "gap_s": round(pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))], 2) if pauses else None,
        "by_kind": counts,
        "errors": sorted({did.error[:200] for did in outcomes if did.error}),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """Return one line per row."""
    table = Table("system", "fault", "requests", "complete", "identical", "p99 pause, s")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("system", "row", "requests", "complete", "identical", "gap_s")))
    return table


if __name__ == "__main__":
    sys.exit(main())
