"""What a release is built from, and where."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


class ReleaseError(Exception):
    """The release cannot be built here; the message says why."""


def refuse_other_machines(machine: str) -> None:
    """Raise ReleaseError on machines for which no release is built."""
    if machine != "x86_64":
        raise ReleaseError(
            f"releases are built for x86_64, and this machine is {machine}. The kernels for aarch64 have only been "
            "tested in an emulator, so no release contains them; `make wheel` and `make images` build them for your "
            "own tests"
        )


def commit_of(root: Path, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the commit to build, and the time of its files in Unix seconds.

    Raises:
        ReleaseError: Files differ from the commit.
    """
    if changes := git(root, "status", "--porcelain"):
        raise ReleaseError(f"a release is built from a commit, and these files differ from it:\n{changes}")
    commit, committed_s = git(root, "log", "-1", "--format=%H %ct").split()
    return commit, int(environment.get("SOURCE_DATE_EPOCH") or committed_s)


def copy_commit(root: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into a new folder."""
    target.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)


def git(root: Path, *words: str) -> str:
    """Return the output of a git command, without white space at its end."""
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.rstrip()
