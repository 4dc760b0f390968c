"""`midstream doctor`: check this machine's prerequisites and suggest a fix for each problem."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.cli.machine import ask_machine
from midstream.cli.run_dir import RunDir
from midstream.cli.topology import is_free_port
from midstream.cli.up import MODEL_HELP, add_run_dir
from midstream.config import KNOWN_SETTINGS, RouterConfig, check_environment, parse_config
from midstream.errors import MidstreamError
from midstream.model.folder import EMBEDDED_MODEL, open_model_folder
from midstream.model.hub import is_hub_name

_GIB = 1 << 30
# Memory for Python, PyTorch and three small services, in addition to the weights.
_MIN_MEMORY_BYTES = 2 * _GIB
_MIN_SHARED_BYTES = _GIB // 4
_MIN_DISK_BYTES = _GIB
# Packages, by the extra that installs them.
_PACKAGES = {
    "router": ("uvicorn", "starlette", "tokenizers"),
    "scheduler": ("zmq",),
    "worker": ("torch", "transformers"),
}


class Verdict(StrEnum):
    """Result of a check: with `slow` a service would run below its normal speed, with `fault` not at all."""

    GOOD = "good"
    SLOW = "slow"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one check; `cure` is the suggested fix, or empty if none is needed."""

    name: str
    verdict: Verdict
    text: str
    cure: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, metavar="MODEL", help=f"{MODEL_HELP} [smollm2]")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if a service would not run on this machine."""
    console = Console(highlight=False)
    with console.status("Checking this machine (this may compile the kernels)"):
        findings = list(examine(arguments.model, RunDir(arguments.run_dir)))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console.print(_table(findings))
    return 1 if any(finding.verdict is Verdict.FAULT for finding in findings) else 0


def examine(model: str, run_dir: RunDir) -> Iterator[Finding]:
    yield _python()
    yield _settings()
    yield from _packages()
    yield from _compute()
    yield _memory(model)
    yield _shared_memory(Path("/dev/shm"))  # noqa: S108 (looked at, not written to)
    yield from _ports(run_dir)
    yield _model(model)
    yield _disk(run_dir.path)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 (an installation may be forced)
        return Finding("Python", Verdict.FAULT, version, "install Python 3.11 or newer")
    return Finding("Python", Verdict.GOOD, version)


def _settings() -> Finding:
    try:
        check_environment(os.environ)
    except MidstreamError as error:
        return Finding("settings", Verdict.FAULT, str(error), "change or unset the variable")
    count = sum(name.startswith("MIDSTREAM_") for name in os.environ)
    return Finding("settings", Verdict.GOOD, f"MIDSTREAM_ variables set: {count}")


def _packages() -> Iterator[Finding]:
    for extra, names in _PACKAGES.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            text = f"{', '.join(missing)} is not installed"
            yield Finding(f"{extra}'s packages", Verdict.FAULT, text, f"pip install 'midstream[{extra}]'")


def _compute() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        machine = ask_machine()
    except MidstreamError as error:
        yield Finding("worker", Verdict.FAULT, str(error), "pip install --force-reinstall 'midstream[worker]'")
        return
    text = f"{machine.threads} cores, "
    if machine.kernels:
        why = f" ({'; '.join(machine.reasons)})" if machine.reasons else ""
        yield Finding("processor", Verdict.GOOD, f"{text}{machine.kernels} kernels{why}")
    else:
        verdict = Verdict.GOOD if machine.gpus else Verdict.SLOW
        cure = "" if machine.gpus else _kernel_cure()
        yield Finding("processor", verdict, f"{text}PyTorch's operations: {'; '.join(machine.reasons)}", cure)
    if machine.gpus:
        yield Finding("GPU", Verdict.GOOD, f"{', '.join(machine.gpus)}; PyTorch {machine.torch}")
    elif shutil.which("nvidia-smi"):
        cure = (
            "install a PyTorch build for CUDA (pip install torch), or a driver that supports its CUDA version"
            if not machine.cuda
            else f"update the driver to one that supports CUDA {machine.cuda}, or install a PyTorch build for the "
            "driver's CUDA version (see nvidia-smi)"
        )
        yield Finding("GPU", Verdict.SLOW, f"PyTorch {machine.torch} finds no GPU, but nvidia-smi is installed", cure)
    else:
        yield Finding("GPU", Verdict.GOOD, f"none; PyTorch {machine.torch} runs on the CPU")


def _kernel_cure() -> str:
    if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return "the kernels need a CPU with AVX2, FMA and F16C, or an ARM CPU with dot products"
    return "install g++, which makes the worker about 15 times as fast (apt-get install g++)"


def _memory(model: str) -> Finding:
    available = available_memory()
    wanted = _MIN_MEMORY_BYTES
    if not is_hub_name(model):
        with contextlib.suppress(MidstreamError, OSError):  # the model check reports the error
            wanted += sum(file.stat().st_size for file in open_model_folder(model).weight_files)
    text = f"{available / _GIB:.1f} GiB free; the services and the weights need about {wanted / _GIB:.1f} GiB"
    if available < wanted:
        return Finding(
            "memory", Verdict.FAULT, text, "free memory, raise the container's limit, or use a smaller model"
        )
    return Finding("memory", Verdict.GOOD, text)


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory available to this process, limited by the machine and its cgroup."""
    facts = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(facts["MemAvailable"].split()[0]) << 10
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            left = int((root / "sys/fs/cgroup" / limit).read_text()) - int((root / "sys/fs/cgroup" / used).read_text())
        except (OSError, ValueError):  # there is no such group, or the limit is `max`
            continue
        available = min(available, left)
    return available


def _shared_memory(folder: Path) -> Finding:
    if not os.access(folder, os.W_OK):
        cure = "mount a tmpfs at /dev/shm; without it, a worker that crashes loses its KV cache"
        return Finding("shared memory", Verdict.SLOW, f"{folder} is not writable", cure)
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < _MIN_SHARED_BYTES:
        cure = "docker run --shm-size=2g, or in Kubernetes an emptyDir of medium Memory"
        return Finding("shared memory", Verdict.SLOW, text, cure)
    return Finding("shared memory", Verdict.GOOD, text)


def _ports(run_dir: RunDir) -> Iterator[Finding]:
    if run_dir.is_supervised():
        yield Finding("ports", Verdict.GOOD, f"a service is running in {run_dir.path}")
        return
    try:
        config = parse_config(RouterConfig, (), os.environ, program="doctor", known=KNOWN_SETTINGS)
        taken = [
            f"--{flag} {port}"
            for flag, port in (("port", config.port), ("http-port", config.http_port))
            if port and not is_free_port(port, config.host)
        ]
    except MidstreamError as error:
        yield Finding("ports", Verdict.FAULT, str(error), "change MIDSTREAM_HOST or the port")
        return
    if taken:
        text = f"in use on {config.host}: {', '.join(taken)}"
        yield Finding(
            "ports", Verdict.FAULT, text, "stop the process that uses them, or choose other ports (0: any free one)"
        )
    else:
        yield Finding(
            "ports", Verdict.GOOD, f"gRPC {config.port} and HTTP {config.http_port} of {config.host} are free"
        )


def _model(model: str) -> Finding:
    if is_hub_name(model):
        return Finding("model", Verdict.GOOD, f"{model} would be downloaded from the Hub: midstream prepare {model}")
    try:
        folder = open_model_folder(model)
    except (MidstreamError, OSError) as error:
        return Finding("model", Verdict.FAULT, str(error), "give a folder, a .gguf file, or ORG/NAME on the Hub")
    num_bytes = sum(file.stat().st_size for file in folder.weight_files)
    text = f"{folder.name}: {folder.architecture}, {num_bytes / 1e6:,.0f} MB of {folder.weights_format}"
    return Finding("model", Verdict.GOOD, text)


def _disk(path: Path) -> Finding:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Finding("run folder", Verdict.FAULT, f"{existing} is not writable", "give --run-dir, or MIDSTREAM_HOME")
    free = shutil.disk_usage(existing).free
    text = f"{free / _GIB:.1f} GiB free at {path}"
    if free < _MIN_DISK_BYTES:
        return Finding("run folder", Verdict.SLOW, text, "free space: the journal and logs are written there")
    return Finding("run folder", Verdict.GOOD, text)


def _table(findings: list[Finding]) -> Table:
    styles = {Verdict.GOOD: "green", Verdict.SLOW: "yellow", Verdict.FAULT: "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        style = styles[finding.verdict]
        text = finding.text + (f"\n→ {finding.cure}" if finding.cure else "")
        table.add_row(Text(finding.verdict, style=style), finding.name, Text(text))
    return table
