"""Install an example package for tests in a separate folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(package: Path, folder: Path) -> Path:
    """Build `package` and install it under `folder`; return the path to add to PYTHONPATH."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for file in package.glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    options = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=400)
    return site
