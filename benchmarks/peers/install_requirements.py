"""Install the requirements of an installed distribution, except those that are excluded. It is run as a separate
program, in the environment that it installs into:

python install_requirements.py DISTRIBUTION PACKAGE_LEFT_OUT ...
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from importlib import metadata


def without(requirements: Iterable[str], left_out: Collection[str]) -> list[str]:
    """Return the requirements without excluded packages and without those of extras."""
    kept = []
    for line in requirements:
        name = re.match(r"[\w.-]+", line)
        if name and name[0].lower() not in left_out and "extra ==" not in line:
            kept.append(line)
    return kept


if __name__ == "__main__":
    wanted = without(metadata.requires(sys.argv[1]) or (), sys.argv[2:])
    subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True)
