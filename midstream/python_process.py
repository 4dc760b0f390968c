"""Starts Python processes without the working directory on their import path.

`python -m` imports from the working directory first, so that a user's `scheduler.py`, `protos/` or `logging.py` would
be executed instead of this project's or the standard library's.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import midstream

_ROOT = Path(midstream.__file__).parents[1]

# Top-level folders of a checkout; in an installation they are inside the package midstream (see setup.py).
PARTS = frozenset({"detokenizer", "gpu_worker", "kernels", "protos", "router", "scheduler"})


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `module`, named as in a checkout; start it with `python_environment`."""
    return [sys.executable, "-P", "-m", installed_module(module), *arguments]


def installed_module(module: str) -> str:
    """Return the name with which to import `module`, which is named as in a checkout."""
    part = module.partition(".")[0]
    is_inside = part in PARTS and (Path(midstream.__file__).parent / part).is_dir()
    return f"midstream.{module}" if is_inside else module


def bare_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that handles untrusted data: what Python needs to start and to find packages,
    and `variables`. Others may contain keys.
    """
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH") if name in os.environ}
    return python_environment({**kept, **variables})


def python_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` with a PYTHONPATH that puts this project's packages first and excludes the working directory.

    Absolute entries of PYTHONPATH are kept, for plugins. Relative and empty entries depend on the working directory and
    are removed. PYTHONSAFEPATH prevents child processes from adding the working directory again.
    """
    entries = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if Path(entry).is_absolute()]
    root = str(_ROOT)
    # If this project is installed in site-packages and there are no other entries, no entry is added, since
    # site-packages in front of the standard library could shadow its modules. Otherwise this project's entry must be
    # the first.
    if entries or root not in (*site.getsitepackages(), site.getusersitepackages()):
        entries.insert(0, root)
    environment = {**base, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries))}
    if not entries:
        del environment["PYTHONPATH"]
    return environment
