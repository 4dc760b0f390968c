"""Install peers. Each step runs once and leaves a marker file, which becomes invalid if the commands of the step
change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from midstream.setup_env import SetupError, Steps

from .peer import Paths, Peer, Step


def install(peers: Sequence[Peer], paths: Paths) -> dict[str, str]:
    """Install what is missing, and show progress.

    Returns:
        The peers that could not be installed, with the reasons.
    """
    paths.home.mkdir(parents=True, exist_ok=True)
    marks = paths.home / "done"
    marks.mkdir(exist_ok=True)
    progress = Steps(len(pending(peers, paths)), paths.home / "install.log")
    failed: dict[str, str] = {}
    broken: dict[Step, str] = {}
    for peer in peers:
        for step in peer.steps(paths):
            mark = marks / _key(step)
            if step not in broken and not mark.exists():
                try:
                    progress.run(step.title, step.commands)
                    mark.touch()
                except SetupError as error:
                    broken[step] = str(error)
            if step in broken:
                failed[peer.name] = broken[step]
                break
    return failed


def pending(peers: Iterable[Peer], paths: Paths) -> list[Step]:
    """Return the steps that remain to be run, each once, in order."""
    steps = dict.fromkeys(step for peer in peers for step in peer.steps(paths))
    return [step for step in steps if not (paths.home / "done" / _key(step)).exists()]


def _key(step: Step) -> str:
    return hashlib.sha256(repr((step.title, step.commands)).encode()).hexdigest()[:16]


def make_paths(home: Path, model: str) -> Paths:
    """Return the paths for a comparison on `model`, which must be the GGUF file or its folder.

    Raises:
        ConfigError: The model is not there.
    """
    from midstream.model.folder import open_model_folder

    return Paths(home.resolve(), open_model_folder(model).path)
