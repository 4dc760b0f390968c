"""`midstream replay FILE --shadow CANDIDATE`: runs recorded requests on a candidate, and shows where it differs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from midstream.cli.connect import add_connection, open_client
from midstream.cli.credentials import credentials_of
from midstream.cli.progress import work_through
from midstream.cli.run_dir import RunDir
from midstream.client import AsyncClient
from midstream.errors import ConfigError, InvalidArgumentError, NotFoundError, UnavailableError
from midstream.python_process import python_command, python_environment
from midstream.receipts.evidence import Evidence, read_evidence
from midstream.receipts.shadow import Shadow, ShadowFinding
from scheduler.replay.recording import read_recording

_ADDRESS = re.compile(r"[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+")
_NUM_SHOWN = 20
MISSED = 3  # exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of shadow runs."""
    group = parser.add_argument_group(
        "shadow runs",
        "Run recorded requests on a candidate, such as other weights, another quantization or another build. FILE then "
        "has requests and outputs, as for `midstream audit`, or is a recording whose requests the running service has "
        "stored (--receipts payload). The running service, if there is one, is the reference for log probabilities.",
    )
    group.add_argument(
        "--shadow", metavar="CANDIDATE",
        help="HOST:PORT of a running service, or a model (folder, .gguf file or name) that is served meanwhile.",
    )  # fmt: skip
    group.add_argument(
        "--shadow-setting", action="append", default=[], metavar="NAME=VALUE",
        help="A setting of the candidate that is served, such as weights=int8; repeatable.",
    )  # fmt: skip
    group.add_argument("--concurrency", type=int, default=16, metavar="N", help="Requests in progress. [16]")
    group.add_argument(
        "--max-distance", type=float, metavar="X",
        help="Exit with 3 if the log probabilities of candidate and reference differ by more than this on average.",
    )  # fmt: skip
    group.add_argument(
        "--min-equal", type=float, metavar="SHARE", help="Exit with 3 if a smaller share of the answers is equal."
    )
    group.add_argument("--json", action="store_true", help="Print a line of JSON for each request.")
    add_connection(group)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status: 3 if an objective is missed."""
    if arguments.max_distance is not None and not arguments.max_distance >= 0:
        raise InvalidArgumentError("must be at least 0", field="max_distance")
    findings = asyncio.run(_compare_all(arguments, _read(arguments.file)))
    if arguments.json:
        for finding in findings:
            fields = asdict(finding) | {"distances": finding.distances}
            print(json.dumps({name: value for name, value in fields.items() if value not in (None, "")}))
    else:
        _show(findings)
    return 0 if _meets(arguments, findings) else MISSED


def _meets(arguments: argparse.Namespace, findings: Sequence[ShadowFinding]) -> bool:
    """Return whether the objectives are met; one that could not be measured is missed."""
    compared = [finding for finding in findings if not finding.reason]
    distances = [distance for finding in compared for distance in finding.distances]
    if arguments.max_distance is not None and not (distances and statistics.fmean(distances) <= arguments.max_distance):
        return False
    equal = sum(finding.token is None for finding in compared)
    return arguments.min_equal is None or bool(findings and equal / len(findings) >= arguments.min_equal)


async def _compare_all(arguments: argparse.Namespace, read: list[Evidence] | None) -> list[ShadowFinding]:
    async with contextlib.AsyncExitStack() as stack:
        reference: AsyncClient | None = None
        with contextlib.suppress(UnavailableError):  # no service is running, and none was named
            reference = await stack.enter_async_context(open_client(arguments))
        evidence = read if read is not None else await _stored(_ended(arguments.file), reference)
        if not evidence:
            raise InvalidArgumentError("has no requests that could be compared", field="FILE")
        candidate = await stack.enter_async_context(_candidate(arguments))
        shadow = Shadow(candidate, reference)
        return await work_through(evidence, shadow.compare, concurrency=arguments.concurrency, title="comparing")


def _read(path: Path) -> list[Evidence] | None:
    """Return the requests and outputs in a file; None if it is no text. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            is_text = file.read(1) in (b"{", b"[")
        return list(read_evidence(path.read_text(encoding="utf-8"), str(path))) if is_text else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="FILE") from None


def _ended(path: Path) -> Iterator[str]:
    """Yield the ids of the requests that ended in a recording."""
    for record in read_recording(path):
        for end in record.ends:
            yield end.request_id


async def _stored(request_ids: Iterator[str], reference: AsyncClient | None) -> list[Evidence]:
    """Return what the service has stored of these requests; of the others, nothing but their receipts."""
    if reference is None:
        raise UnavailableError("a recording has no sampling parameters: start the service that has stored its requests")
    found = []
    for request_id in dict.fromkeys(request_ids):
        with contextlib.suppress(NotFoundError):
            found.append(await reference.receipt(request_id, include_request=True, include_outputs=True))
    return found


@contextlib.asynccontextmanager
async def _candidate(arguments: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """Connect to the candidate, which is started first if it is a model."""
    if _ADDRESS.fullmatch(arguments.shadow):
        if arguments.shadow_setting:
            raise InvalidArgumentError("is for a model; this service is running already", field="shadow_setting")
        async with AsyncClient([arguments.shadow], **credentials_of(arguments)) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="midstream-shadow-") as folder:
        addresses = await asyncio.to_thread(_serve, arguments.shadow, arguments.shadow_setting, Path(folder))
        try:
            async with AsyncClient(addresses) as client:
                yield client
        finally:
            await asyncio.to_thread(_midstream, "down", "--run-dir", folder)


def _serve(model: str, settings: Sequence[str], folder: Path) -> list[str]:
    """Serve a model, and return its routers' addresses. Raises ConfigError if it does not start."""
    variables = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise InvalidArgumentError(f"is {setting!r}; must be NAME=VALUE", field="shadow_setting")
        variables[f"MIDSTREAM_{name.strip().replace('-', '_').upper()}"] = value
    done = _midstream(
        "serve", model, "--run-dir", str(folder), "--port", "0", "--http-port", "0", "--detach", **variables
    )
    state = RunDir(folder).read_state()
    if done.returncode or state is None:
        raise ConfigError(f"the candidate {model} does not start:\n{done.stdout.strip()}", field="shadow")
    return [router.addresses["grpc"] for router in state.of_kind("router")]


def _midstream(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python_command("midstream.cli", *words),
        env=python_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _show(findings: Sequence[ShadowFinding]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    compared = [finding for finding in findings if not finding.reason]
    different = sorted(
        (finding for finding in compared if finding.token is not None), key=lambda finding: finding.token or 0
    )
    num_equal = len(compared) - len(different)
    console.print(f"{num_equal} of {len(compared)} answers are equal")
    if len(compared) < len(findings):
        console.print(f"{len(findings) - len(compared)} requests could not be compared")
    ours = [value for finding in compared for value in finding.log_probs]
    theirs = [value for finding in compared for value in finding.reference]
    distances = [value for finding in compared for value in finding.distances]
    for name, values in (("candidate", ours), ("reference", theirs)):
        if values:
            mean = statistics.fmean(values)
            console.print(f"{name}: log probability {mean:.4f} per recorded token, perplexity {math.exp(-mean):.3f}")
    if distances:
        p99 = sorted(distances)[int(0.99 * (len(distances) - 1))]
        console.print(
            f"distance of the log probabilities: mean {statistics.fmean(distances):.2e}, 99th percentile {p99:.2e}, "
            f"largest {max(distances):.2e}"
        )
    if different:
        table = Table("request", "sequence", "first different token", "recorded", "candidate")
        for finding in different[:_NUM_SHOWN]:
            place = str(finding.sequence), f"{finding.token} of {finding.num_tokens}"
            table.add_row(finding.request_id, *place, _shown(finding.expected), _shown(finding.found))
        console.print(table)
    for reason in dict.fromkeys(finding.reason for finding in findings if finding.reason):
        console.print(f"not compared: {reason}")


def _shown(token: int | None) -> str:
    return "end" if token is None else str(token)
