"""Midstream with all of its services, measured by gRPC clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .peer import ALL_WORKLOADS, Figures, Paths, Runner, Step, Workload
from .streams import Stream, stream_figures


@dataclass(frozen=True, slots=True)
class MidstreamService:
    """The service as started by `midstream up`.

    Attributes:
        weights: Storage type in the worker; auto means 4 bits, as in the file.
        activations: Type to which inputs of linear layers are rounded; auto means 16 bits.
    """

    name: str
    weights: str = "auto"
    activations: str = "auto"
    workloads: Sequence[str] = ALL_WORKLOADS

    @property
    def label(self) -> str:
        weights = "Q4_1" if self.weights == "auto" else self.weights
        activations = "" if self.activations == "auto" else f" with {self.activations} activations"
        return f"Midstream, {weights}{activations}, the whole service"

    def python(self, paths: Paths) -> Path:
        return own_python(paths)

    def steps(self, paths: Paths) -> Sequence[Step]:
        return ()

    @contextmanager
    def open(self, paths: Paths) -> Iterator[Runner]:
        from midstream.cli.run_dir import RunDir

        run_dir = paths.home / "runs" / self.name  # keep the logs for diagnosis
        shutil.rmtree(run_dir, ignore_errors=True)
        command = [sys.executable, "-m", "midstream.cli"]
        flags = ("--port", "0", "--http-port", "0", "--model", str(paths.model_folder), "--run-dir", str(run_dir))
        up = ("up", "--detach", *flags)
        # The working directory contains a folder with the same name as our package.
        types = {"MIDSTREAM_WEIGHTS": self.weights, "MIDSTREAM_ACTIVATIONS": self.activations}
        environment = os.environ | types | {"PYTHONSAFEPATH": "1"}
        subprocess.run([*command, *up], check=True, env=environment)
        try:
            state = RunDir(run_dir).read_state()
            assert state is not None
            addresses = [router.addresses["grpc"] for router in state.of_kind("router")]
            yield lambda workload: _run(addresses, workload)
        finally:
            subprocess.run([*command, "down", "--run-dir", str(run_dir)], check=True, env=environment)


def own_python(_: Paths) -> Path:
    """Return the interpreter of our own environment, in which the comparison runs."""
    return Path(sys.executable)


def _run(addresses: Sequence[str], workload: Workload) -> Figures:
    from midstream.cli.bench import measure, workloads

    requests = tuple(workloads.BenchRequest(it.token_ids, it.max_tokens) for it in workload.requests)
    converted = workloads.Workload(workload.name, requests, workload.concurrency, workload.counts_input)
    result = asyncio.run(measure.run_workload(addresses, converted))
    errors = {times.error for times in result.requests if times.error}
    if errors:
        raise RuntimeError(f"requests failed: {', '.join(sorted(errors))}")
    streams = [Stream(times.started, times.arrivals) for times in result.requests]
    return stream_figures(workload, streams, result.duration_s)
