"""Run short workloads in turn on peers that stay loaded, for several rounds.

All peers get the same token ids within a round, and different ones in the next round, so that prefix caches have no
effect. A workload runs on all peers before the next one begins, so that compared runs are seconds apart, and each round
begins with a different peer.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from midstream.cli.bench import workloads

from .peer import Figures, Paths, Peer, Request, Workload, parse_figures, workload_line

# Time limits for loading and for one workload.
TIMEOUT_S = 900.0
_CLOSE_TIMEOUT_S = 90.0
_REASON_LENGTH = 300
_BUSY_INTERVAL_S = 0.3
# A quick run divides output lengths by this; without output, it divides the number of requests.
_SHORTER = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    """One peer's figures for one workload in one round.

    Attributes:
        load: Number of cores that other programs kept busy just before the measurement began.
    """

    round: int
    peer: str
    load: float
    figures: Figures


def round_workload(name: str, round_number: int, *, is_quick: bool = False) -> Workload:
    """Return the workload of a round; it depends only on the arguments."""
    workload = _converted(workloads.WORKLOADS[name](random.Random(round_number)))
    if not is_quick or name == "single":
        return workload
    if workload.counts_input:
        return replace(workload, requests=workload.requests[: len(workload.requests) // _SHORTER])
    requests = tuple(replace(it, max_tokens=-(-it.max_tokens // _SHORTER)) for it in workload.requests)
    return replace(workload, requests=requests)


def warm_up() -> Workload:
    """Return a warm-up workload with tokens that no round uses, so that compilation and allocation on first use are not
    measured.
    """
    generator = random.Random("warm-up")
    mixed = [workloads.BenchRequest(it.token_ids, 8) for it in workloads.mixed(generator).requests[:16]]
    long = workloads.uniform(generator, 1, 1024, 8, 1).requests
    return _converted(workloads.Workload("warm-up", (*mixed, *long), len(mixed) + 1))


def _converted(workload: workloads.Workload) -> Workload:
    requests = tuple(Request(it.token_ids, it.max_tokens) for it in workload.requests)
    return Workload(workload.name, requests, workload.concurrency, workload.counts_input)


class PeerFailedError(Exception):
    """The process of a peer ended or took too long; the message contains its last output."""


class PeerProcess:
    """A loaded peer in its own process."""

    def __init__(self, peer: Peer, paths: Paths) -> None:
        """Start loading; `run` waits until it is ready."""
        self.peer = peer
        folder = paths.home / "runs"
        folder.mkdir(exist_ok=True)
        self._log = folder / f"{peer.name}.log"
        words = (peer.name, str(paths.home), str(paths.model_folder))
        with self._log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(peer.python(paths)), "-P", "-m", "peers.child", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                # The checkout itself is not used, because a library that imports a package named `kernels` would find
                # ours.
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )

    def run(self, workload: Workload) -> Figures:
        """Run a workload.

        Raises:
            PeerFailedError: The peer failed and is no longer usable.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, self._terminate)
        timer.start()
        try:
            self._process.stdin.write(workload_line(workload))
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerFailedError(f"{_status(self._process.wait())}: {_last_words(self._log)}")
        return parse_figures(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if error is not None:
            self._terminate()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._terminate()
            self._process.wait()
        self._process.stdout.close()

    def _terminate(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)


def run_rounds(
    peers: Sequence[Peer],
    names: Sequence[str],
    numbers: Sequence[int],
    paths: Paths,
    on_done: Callable[[Measurement], None],
    on_load: Callable[[Peer], None],
    *,
    is_quick: bool = False,
    limit_s: float = float("inf"),
) -> tuple[list[Measurement], dict[str, str]]:
    """Measure `peers` in the given rounds; one that fails is not retried.

    Args:
        peers: The peers, all of which are loaded at the same time.
        names: Names of workloads.
        numbers: Numbers of rounds.
        paths: Paths of the comparison.
        on_done: Called with each measurement.
        on_load: Called before a peer is loaded.
        is_quick: Shorten the workloads.
        limit_s: After the first round, a round is not started if it would exceed this limit, judging by the longest
            round so far.

    Returns:
        The measurements, and the reasons why peers failed.
    """
    begin = time.monotonic()
    measurements: list[Measurement] = []
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        loaded: list[PeerProcess] = []
        for peer in peers:
            on_load(peer)
            process = stack.enter_context(PeerProcess(peer, paths))
            try:
                process.run(warm_up())
                loaded.append(process)
            except PeerFailedError as error:
                failed[peer.name] = str(error)
        longest_s = 0.0
        for number in numbers:
            start = time.monotonic()
            if longest_s and start - begin + longest_s > limit_s:
                break
            shift = number % max(len(loaded), 1)
            for name in names:
                workload = round_workload(name, number, is_quick=is_quick)
                for process in [*loaded[shift:], *loaded[:shift]]:
                    peer = process.peer
                    if peer.name in failed or name not in peer.workloads:
                        continue
                    load = _busy_cores()
                    try:
                        measurements.append(Measurement(number, peer.name, load, process.run(workload)))
                        on_done(measurements[-1])
                    except PeerFailedError as error:
                        failed[peer.name] = str(error)
            longest_s = max(longest_s, time.monotonic() - start)
    return measurements, failed


def _busy_cores() -> float:
    """Return the number of cores that all programs keep busy while this process waits; a load average would include the
    previous peer.
    """
    return sum(psutil.cpu_percent(_BUSY_INTERVAL_S, percpu=True)) / 100


def _status(code: int) -> str:
    return f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:_REASON_LENGTH] if lines else "it printed nothing"
