"""Definition of a peer: how it is installed, and how it runs a workload.

Uses only the standard library, because the processes of the peers import it.

`rounds` starts `peers.child NAME` with the interpreter of the peer's environment. The child opens the peer once and
prints a line of figures for each workload that it receives as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

ALL_WORKLOADS = ("single", "mixed", "prefix", "prefill", "chat")
NUM_THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, and the exact number of tokens to generate greedily."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many of them run concurrently.

    Attributes:
        counts_input: Whether throughput counts prompt tokens instead of output tokens.
    """

    name: str
    requests: tuple[Request, ...]
    concurrency: int
    counts_input: bool

    @property
    def num_counted_tokens(self) -> int:
        """Return the number of tokens that are counted for throughput."""
        return sum(len(it.token_ids) if self.counts_input else it.max_tokens for it in self.requests)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one run of a workload.

    Attributes:
        tokens_per_s: Output tokens (for prefill, prompt tokens) per second, from the first start to the last end.
        ttft_ms: Time to first token at p50 and p99; None if individual tokens are not observed.
        inter_token_ms: Gap between tokens of one stream at p50 and p99.
        processor_s: CPU seconds of all processes of the peer; 0 if unknown.
    """

    workload: str
    tokens_per_s: float
    duration_s: float
    ttft_ms: tuple[float, float] | None = None
    inter_token_ms: tuple[float, float] | None = None
    processor_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of the comparison.

    Attributes:
        home: Folder in which everything for the comparison is installed.
        model_folder: The embedded model's folder, with model.gguf.
    """

    home: Path
    model_folder: Path

    @property
    def gguf(self) -> Path:
        """Path of the published 4-bit weights."""
        return self.model_folder / "model.gguf"

    @property
    def bf16(self) -> Path:
        """Path of the same model as a Hugging Face folder of bf16 weights."""
        return self.home / "models" / "bf16"

    def python(self, environment: str) -> Path:
        """Return the interpreter of an environment."""
        return self.home / environment / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Step:
    """Commands that install something; they run once, and again only if they change."""

    title: str
    commands: tuple[tuple[str, ...], ...]


Runner = Callable[[Workload], Figures]


class Peer(Protocol):
    """One system that serves the model."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        ...

    @property
    def label(self) -> str:
        """Name in the tables."""
        ...

    @property
    def workloads(self) -> Sequence[str]:
        """Workloads that the peer supports."""
        ...

    def python(self, paths: Paths) -> Path:
        """Return the interpreter that runs the peer."""
        ...

    def steps(self, paths: Paths) -> Sequence[Step]:
        """Return the steps that install the peer."""
        ...

    def open(self, paths: Paths) -> AbstractContextManager[Runner]:
        """Load the model in the peer's process while the context is open."""
        ...


def new_environment(paths: Paths, environment: str) -> tuple[str, ...]:
    """Return the command that creates a virtual environment."""
    return (sys.executable, "-m", "venv", str(paths.home / environment))


def pip_install(paths: Paths, environment: str, *words: str) -> tuple[str, ...]:
    """Return the command that installs packages into an environment."""
    return (str(paths.python(environment)), "-m", "pip", "install", *words)


def export_step(paths: Paths) -> Step:
    """Return the step that writes the model as bf16, using transformers from our own environment."""
    script = str(Path(__file__).with_name("export_model.py"))
    return Step("Write the model as bf16", ((sys.executable, script, str(paths.model_folder), str(paths.bf16)),))


def workload_line(workload: Workload) -> str:
    """Return a workload as a line of JSON."""
    return json.dumps(asdict(workload)) + "\n"


def parse_workload(line: str) -> Workload:
    """Parse the output of `workload_line`."""
    item = json.loads(line)
    requests = tuple(Request(tuple(it["token_ids"]), it["max_tokens"]) for it in item["requests"])
    return Workload(item["name"], requests, item["concurrency"], item["counts_input"])


def parse_figures(line: str) -> Figures:
    """Parse a line printed by a peer's process.

    Raises:
        ValueError: The line does not contain figures.
    """
    item = json.loads(line)
    if not isinstance(item, dict) or "workload" not in item:
        raise ValueError(line)
    return Figures(
        workload=item["workload"],
        tokens_per_s=float(item["tokens_per_s"]),
        duration_s=float(item["duration_s"]),
        ttft_ms=_pair(item.get("ttft_ms")),
        inter_token_ms=_pair(item.get("inter_token_ms")),
        processor_s=float(item.get("processor_s", 0.0)),
    )


def _pair(values: Sequence[float] | None) -> tuple[float, float] | None:
    return None if values is None else (float(values[0]), float(values[1]))
