"""Runs peers one after another, round after round, each in a process of its own.

A round gives all of them the same token ids, and the next round others: what somebody kept from the round before, in a
prefix cache say, is of no use. Taking turns, they share whatever else the machine does at that time of the day.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from midstream.cli.bench import workloads

from .peer import Figures, Paths, Peer, Request, Workload, parse_figures, write_workloads
from .registry import WARM_UP

TIMEOUT_S = 1500.0
_REASON_LENGTH = 300
_BUSY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One peer's figures for one workload in one round.

    Attributes:
        load: Cores that other programs kept busy just before the peer started.
    """

    round: int
    peer: str
    load: float
    figures: Figures


def round_workloads(names: Sequence[str], round_number: int) -> list[Workload]:
    """The workloads of a round; the same for whoever asks."""
    return [_converted(workloads.WORKLOADS[name](random.Random(round_number))) for name in names]


def warm_up() -> Workload:
    """Some of everything, with tokens that no round has: what first use compiles or allocates is not measured."""
    generator = random.Random("warm-up")
    mixed = [workloads.BenchRequest(it.token_ids, 8) for it in workloads.mixed(generator).requests[:16]]
    long = workloads.uniform(generator, 1, 1024, 8, 1).requests
    return _converted(workloads.Workload(WARM_UP, (*mixed, *long), len(mixed) + 1))


def _converted(workload: workloads.Workload) -> Workload:
    requests = tuple(Request(it.token_ids, it.max_tokens) for it in workload.requests)
    return Workload(workload.name, requests, workload.concurrency, workload.counts_input)


def run_rounds(
    peers: Sequence[Peer],
    names: Sequence[str],
    numbers: Sequence[int],
    paths: Paths,
    on_done: Callable[[Measurement], None],
    on_start: Callable[[int, Peer], None],
) -> tuple[list[Measurement], dict[str, str]]:
    """Measures `peers` in the rounds of these numbers; one that fails is not tried again.

    Returns:
        What was measured, and why a peer failed.
    """
    measurements: list[Measurement] = []
    failed: dict[str, str] = {}
    for number in numbers:
        for peer in peers:
            wanted = [name for name in names if name in peer.workloads]
            if peer.name in failed or not wanted:
                continue
            on_start(number, peer)
            load = _busy_cores()

            def add(figures: Figures, peer: Peer = peer, number: int = number, load: float = load) -> None:
                measurements.append(Measurement(number, peer.name, load, figures))
                on_done(measurements[-1])

            reason = run_peer(peer, [warm_up(), *round_workloads(wanted, number)], paths, add)
            if reason:
                failed[peer.name] = reason
    return measurements, failed


def _busy_cores() -> float:
    """Cores that all programs together keep busy while this one waits; a load average would hold the peer before."""
    return sum(psutil.cpu_percent(_BUSY_INTERVAL_S, percpu=True)) / 100


def run_peer(peer: Peer, wanted: Sequence[Workload], paths: Paths, on_figures: Callable[[Figures], None]) -> str:
    """Runs a peer's process; gives why it failed, or nothing."""
    folder = paths.home / "runs"
    folder.mkdir(exist_ok=True)
    workloads_file, log = folder / f"{peer.name}.json", folder / f"{peer.name}.log"
    write_workloads(wanted, workloads_file)
    words = (peer.name, str(paths.home), str(paths.model_folder), str(workloads_file))
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [str(peer.python(paths)), "-P", "-m", "peers.child", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            # Not the checkout itself: a library that looks for a package named `kernels` would find ours.
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        end = functools.partial(os.killpg, process.pid, signal.SIGTERM)
        timer = threading.Timer(TIMEOUT_S, end)
        timer.start()
        try:
            for line in process.stdout:
                on_figures(parse_figures(line))
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    return "" if process.returncode == 0 else f"{_status(process.returncode)}: {_last_words(log)}"


def _status(code: int) -> str:
    return f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:_REASON_LENGTH] if lines else "it said nothing"
