"""Hashes the model's weights in the background: `python -m gpu_worker.weight_hasher MODEL BYTES_PER_S`.

Files that were hashed before are read as well, to find damage. A separate process does this, because a thread would
hold the interpreter's lock at the lowest priority while the compute loop waits for it. It reads at a limited rate with
the lowest CPU and I/O priority, prints the root, and exits when its standard input is closed, which happens at the
worker's end, however the worker ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import psutil

from midstream.errors import MidstreamError
from midstream.model.folder import ModelFolder, midstream_home, open_model_folder
from midstream.model.weight_tree import hash_weights, stored_root, verify_weights
from midstream.python_process import python_command, python_environment

logger = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19


class WeightHasher:
    """The process that hashes the weights for this worker."""

    def __init__(self, folder: ModelFolder, bytes_per_s: int, on_root: Callable[[str], None]) -> None:
        """Prepare to hash `folder`; `on_root` is called with the root in another thread."""
        self._folder, self._bytes_per_s, self._on_root = folder, bytes_per_s, on_root
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process."""
        command = python_command("gpu_worker.weight_hasher", str(self._folder.path), str(self._bytes_per_s))
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, env=python_environment(), text=True, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            logger.warning("cannot hash the weights: %s", error)
            return
        with contextlib.suppress(psutil.Error, OSError):  # at once, so that its imports do not delay the first steps
            started = psutil.Process(self._process.pid)
            started.nice(_LOWEST_PRIORITY)
            started.ionice(psutil.IOPRIO_CLASS_IDLE)
        threading.Thread(target=self._wait, args=(self._process,), name="weight-hasher", daemon=True).start()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        started = time.monotonic()
        with process:  # closes the pipes at the end; closing its input earlier would end the process
            root, problem = process.stdout.read().strip(), process.stderr.read().strip()
        if process.returncode == 0 and root:
            logger.info("hashed the weights in %.0f s", time.monotonic() - started, extra={"weights_root": root})
            self._on_root(root)
        elif problem:
            logger.warning("cannot hash the weights: %s", problem.splitlines()[-1])


class Pace:
    """Keeps the rate of reading at or below a limit, and ends the process when its parent is gone."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s, self._due = bytes_per_s, time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        """Wait for as long as reading `num_bytes` may take."""
        self._due = max(self._due, time.monotonic() - 1) + num_bytes / self._bytes_per_s
        if select.select([sys.stdin], [], [], max(self._due - time.monotonic(), 0))[0]:
            sys.exit(1)


@contextlib.contextmanager
def _alone(folder: ModelFolder) -> Iterator[None]:
    """Let only one process of this host hash the folder at a time; the next one finds the result. Where nothing can be
    written, each process hashes for itself.
    """
    path = midstream_home() / "trees" / f"{folder.fingerprint[:32]}.lock"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.open("a"))
        except OSError:
            yield
            return
        while not _is_locked(lock):
            if select.select([sys.stdin], [], [], 0.5)[0]:
                sys.exit(1)
        yield


def _is_locked(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> int:
    """Read all files of a model folder and print the root of its tree; return the exit code."""
    model, bytes_per_s = sys.argv[1:]
    try:
        folder = open_model_folder(str(Path(model)))
        with _alone(folder):
            # Files that have not changed since they were hashed are read again, since they may have been damaged.
            read = verify_weights if stored_root(folder) else hash_weights
            print(read(folder, Pace(int(bytes_per_s))))
    except (MidstreamError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
